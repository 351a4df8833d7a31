"""How the memory of a stage travels from block to block.

An attached block returns its output together with the stage's memory, as one `Carried` value, and the next block opens
it; the last block of a stage returns a plain tensor, unless a state goes on to the next stage. timm's loops,
Sequentials and gradient checkpoints hand a block's output to the next block untouched, so nothing is kept on a module:
a stage can be run twice, checkpointed, compiled, exported and copied.

Attaching changes the class of a block to a subclass made here, so parameters keep their names and `isinstance` still
holds. Such classes are made once for each class they extend, and pickle by naming that class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from timm.layers import use_reentrant_ckpt
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from . import residual
from .layout import Layout

STATE = "rla"  # the name of a recurrent state among what is carried, and of its module in a network
FINISHED = "rla_finished"  # whether the state is that of the network's last block
GATE = "gate"  # the name of what gates on the branch hand on


class Carried:
    """A block's output and the memories of the stages it is in.

    Whoever reads it between two blocks of a stage (timm does, to collect intermediate features) sees the output alone:
    torch functions, indexing and tensor attributes apply to `x`.
    """

    def __init__(self, x: Tensor, memories: dict[str, Any], grid: tuple[int, int] | None) -> None:
        self.x = x
        self.memories = memories
        self.grid = grid

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is checkpoint:  # torch.compile asks here; the memory belongs into the checkpoint
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*release(args), **release(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "memories", "grid"):  # not there yet: being copied or unpickled
            raise AttributeError(name)
        return getattr(self.x, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.x[index]


# Known to torch as a tree of tensors: checkpoints, sharding and casts of a block's inputs reach what is inside.
_pytree.register_pytree_node(
    Carried,
    lambda carried: ([carried.x, carried.memories], carried.grid),
    lambda children, grid: Carried(*children, grid=grid),  # type: ignore[misc]
)


def release(value: Any) -> Any:
    """`value` with every `Carried` in its lists, tuples and dicts replaced by its plain output."""
    if isinstance(value, Carried):
        return value.x
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(release(item) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return type(value)((key, release(item)) for key, item in value.items())
    return value


@dataclass(frozen=True)
class Slot:
    """One mechanism's place in a block: the block is number `index` of the `length` blocks of stage `stage`."""

    name: str
    stage: int
    index: int
    length: int

    @property
    def last(self) -> bool:
        return self.index == self.length - 1


class Extended:
    """Mixin of every class made by `extend`: copies and pickles by the class that was extended."""

    _mixin: type
    _extended: type

    @staticmethod
    def methods(base: Any) -> dict[str, Any]:
        """Methods made for the class that is extended."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return (_new_extended, (self._mixin, self._extended), *reduced[2:])


@cache
def _extended_class(mixin: Any, base: Any) -> Any:
    namespace = {"_mixin": mixin, "_extended": base, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(f"Attached{base.__name__}", (mixin, base), namespace | mixin.methods(base))


def _new_extended(mixin: type, base: type) -> Any:
    cls = _extended_class(mixin, base)
    return cls.__new__(cls)


def extend(module: nn.Module, mixin: type) -> None:
    """Give `module` the methods of `mixin` on top of its own."""
    base: Any = type(module)
    module.__class__ = _extended_class(mixin, base)


def restore(module: nn.Module) -> None:
    """Undo `extend`."""
    module.__class__ = module._extended  # type: ignore[assignment]


@dataclass(frozen=True)
class Place:
    """A block's place in what the whole network shares: it is number `index` of stage `stage`."""

    holder: Any  # a module of the network, not of the block: the block only refers to it
    stage: int
    index: int


class AttachedBlock(Extended):
    """A block with mechanisms: a state that enters it, a gate on its branch, layer attention behind it."""

    interlayer_slots: tuple[Slot, ...] = ()  # layer attention
    interlayer_layout: Layout | None = None
    interlayer_state: Place | None = None
    interlayer_gate: Place | None = None

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        memories: dict[str, Any] = {}
        grid = None
        if isinstance(x, Carried):
            x, memories, grid = x.x, x.memories, x.grid
        handed_on: dict[str, Any] = {}
        mechanisms = [getattr(self, slot.name) for slot in self.interlayer_slots]
        wants_shortcut = any(mechanism.reads_shortcut for mechanism in mechanisms)
        if self.interlayer_state is not None or self.interlayer_gate is not None:
            parts = self._run_parts(x, memories, handed_on)
            output, shortcut = parts.output, parts.shortcut
        elif wants_shortcut and residual.projects(self):
            parts = residual.run_parts(self, x)
            output, shortcut = parts.output, parts.shortcut
        else:
            output, shortcut = self._run_block(x, *args, **kwargs), x
        if not self.interlayer_slots:
            return Carried(output, handed_on, grid) if handed_on else output
        if not wants_shortcut or (shortcut is not None and shortcut.shape != output.shape):
            shortcut = None

        layout = self.interlayer_layout
        assert layout is not None
        if grid is None:
            grid = layout.grid_of(output, args, kwargs)
        feature_map, prefix = layout.to_map(output, grid)
        if shortcut is not None:
            shortcut, _ = layout.to_map(shortcut, grid)
        for slot, mechanism in zip(self.interlayer_slots, mechanisms, strict=True):
            if slot.index and slot.name not in memories:
                raise RuntimeError(
                    f"block {slot.index} of stage {slot.stage} got no memory of {slot.name!r}: its input must be what "
                    f"the block before it returned; run the stage from its first block, or attach with stages= that "
                    f"begin here"
                )
            memory = memories.get(slot.name) if slot.index else None
            feature_map, memory, prefix = mechanism(feature_map, memory, shortcut, prefix)
            if not slot.last:
                handed_on[slot.name] = memory
        output = layout.from_map(feature_map, prefix)
        return Carried(output, handed_on, grid) if handed_on else output

    def _run_parts(self, x: Tensor, memories: dict[str, Any], handed_on: dict[str, Any]) -> residual.Parts:
        """Run the block with the state inside and the gate on its branch; what both hand on goes into `handed_on`."""
        place, gate_place = self.interlayer_state, self.interlayer_gate
        gate = None
        if gate_place is not None:
            memory = memories.get(GATE) if gate_place.index else None

            def gate(y: Tensor, taps: list[Tensor]) -> Tensor:
                y, handed_on[GATE] = gate_place.holder.gate(gate_place.stage, y, taps, memory)
                return y

        if place is None:
            return residual.run_parts(self, x, gate=gate)
        if (place.stage or place.index) and STATE not in memories:
            raise RuntimeError(
                f"block {place.index} of stage {place.stage} got no state: its input must be what the block before it "
                f"returned; run the network from its first block"
            )
        rla, state = place.holder, memories.get(STATE)
        addition = rla.read(place.stage, place.index, state, x)
        if not rla.updates(place.stage, place.index):
            return residual.run_parts(self, x, addition=addition, gate=gate)
        weight = rla.projection(place.stage, place.index)
        of_branch = rla.insert == "branch"
        parts = residual.run_parts(self, x, addition=addition, gate=gate, weight=weight if of_branch else None)
        projected = parts.projected
        if projected is None:
            inserted = parts.output if rla.insert == "output" else parts.shortcut
            projected = nn.functional.conv2d(inserted, weight)  # type: ignore[arg-type]
        handed_on[STATE] = rla.update(place.stage, place.index, state, projected)
        handed_on[FINISHED] = rla.is_last(place.stage, place.index)
        return parts

    def _run_block(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, nn.Sequential):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        attached = {slot.name for slot in self.interlayer_slots}
        for name, child in self.named_children():  # a Sequential would run the mechanisms as parts of itself
            if name not in attached:
                x = child(x)
        return x


def open_block(block: nn.Module) -> AttachedBlock:
    """The block, ready to be given mechanisms."""
    if not isinstance(block, AttachedBlock):
        extend(block, AttachedBlock)
    return block  # type: ignore[return-value]


def close_blocks(model: nn.Module, *attributes: str) -> None:
    """Take these attributes from every opened block; one that has no mechanism left is as it was."""
    for module in list(model.modules()):
        if isinstance(module, AttachedBlock):
            for attribute in attributes:
                module.__dict__.pop(attribute, None)
            if not (module.interlayer_slots or module.interlayer_state or module.interlayer_gate):
                restore(module)  # type: ignore[arg-type]


def release_from(model: nn.Module, blocks: Sequence[str]) -> None:
    """Make the network, and every part of it that hands out features of these blocks, return plain tensors."""
    for name, module in list(model.named_modules()):
        runs_blocks = not name or any(block.startswith(f"{name}.") for block in blocks)
        hands_out_features = not name or hasattr(module, "forward_intermediates")
        if runs_blocks and hands_out_features and not isinstance(module, AttachedModel):
            extend(module, AttachedModel)


class AttachedModel(Extended):
    """A network that runs attached blocks: what it returns, also from the middle of a stage, are plain tensors."""

    @staticmethod
    def methods(base: Any) -> dict[str, Any]:
        """The methods of `base` that hand out features, with its signatures, which torch.export reads."""
        names = ("forward", "forward_features", "forward_intermediates")
        wrapped = {name: _releasing(getattr(base, name), name) for name in names if hasattr(base, name)}
        if hasattr(base, "set_grad_checkpointing"):
            wrapped["set_grad_checkpointing"] = _refusing_reentrant(base.set_grad_checkpointing)
        return wrapped


def _releasing(method: Any, name: str) -> Any:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if name == "forward_features":
            result = _with_state(self, result)
        elif name == "forward_intermediates" and isinstance(result, tuple):
            result = (_with_state(self, result[0]), *result[1:])
        return release(result)

    return run


def _with_state(model: Any, features: Any) -> Any:
    """The last map with the last state behind it, where the classifier of `model` reads both."""
    rla = getattr(model, STATE, None)
    if rla is None or not rla.joins_features or not isinstance(features, Carried):
        return features
    if not features.memories.get(FINISHED, False):  # of a network that stopped early
        return features
    return torch.cat((features.x, rla.last(features.memories[STATE])), 1)


class JoiningHead(Extended):
    """A module behind the last block that reads the last state: a norm beside it, or a convolution of both."""

    interlayer_state: Place

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Carried):
            return super().forward(x)  # type: ignore[misc]
        rla = self.interlayer_state.holder
        state = rla.last(x.memories[STATE])
        output = super().forward(x.x)  # type: ignore[misc]
        return torch.cat((output, state), 1) if rla.join is None else output + rla.join(state)


def _refusing_reentrant(method: Any) -> Any:
    @wraps(method)
    def set_grad_checkpointing(self: Any, enable: bool = True, **kwargs: Any) -> Any:
        if enable and use_reentrant_ckpt():
            raise RuntimeError(
                "reentrant checkpoints do not carry a stage's memory and would lose gradients: call "
                "timm.layers.set_reentrant_ckpt(False) first"
            )
        return method(self, enable, **kwargs)

    return set_grad_checkpointing


class RecordingPatchEmbed(Extended):
    """A patch embedding that takes images of any size and remembers the grids it made of them.

    The tokens it returns do not tell their grid. Grids are kept by their number of tokens, so running a block again
    for a backward pass finds the grid of its own input also when images of another size came through meanwhile.
    """

    interlayer_grids: dict[int, tuple[int, int]]

    def forward(self, x: Tensor) -> Any:
        height, width = self.dynamic_feat_size((x.shape[-2], x.shape[-1]))  # type: ignore[attr-defined]
        self.interlayer_grids[height * width] = (height, width)
        return super().forward(x)  # type: ignore[misc]
