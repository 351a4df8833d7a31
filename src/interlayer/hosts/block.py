"""The attached block: a block of a network with an ordered list of mechanisms.

`AttachedBlock.forward` loops over its mechanisms, all of which implement `BlockMechanism`. It does not distinguish
between kinds of mechanisms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..mechanisms.modules import member
from ..mechanisms.protocol import BlockMechanism, BlockValues, MemoryScope, Place
from .carried import Carried, refuse_reentrant
from .extending import Extended, extend, original_class, restore
from .finding import components
from .finding.layout import Layout
from .finding.probe import AttachError
from .stochastic_depth import forward_with_factors

Held = tuple["Entry", BlockMechanism]


@dataclass(frozen=True)
class Entry:
    """One mechanism of a block.

    Args:
        key: the name of its memory, and of its submodule in the block or, if it is shared, in the network.
        place: the position of the block.
        scope: how far the memory is passed on.
        inside: whether the block must be run component by component for this mechanism.
        gates: whether the mechanism changes the branch.
        shared: the module, if it belongs to the network. None if it is the submodule `key` of the block.
    """

    key: str
    place: Place
    scope: MemoryScope
    inside: bool
    gates: bool
    shared: BlockMechanism | None = None

    def mechanism_in(self, block: Any) -> BlockMechanism:
        """Returns the module, given the block that holds it or refers to it."""
        return member(block, self.key) if self.shared is None else self.shared

    def memory_from(self, memories: dict[str, Any]) -> Any:
        """Returns this mechanism's memory from those that arrived, or None in the first block of its scope."""
        begins = self.place.index == 0 and (self.scope == "stage" or self.place.stage == 0)
        if self.scope == "none" or begins:
            return None
        if self.key not in memories:
            whole = "the stage from its first block, or attach with stages= that begin here"
            if self.scope == "network":
                whole = "the network from its first block"
            raise RuntimeError(
                f"block {self.place.index} of stage {self.place.stage} got no memory of {self.key!r}: its input must "
                f"be the output of the previous block; run {whole}"
            )
        return memories[self.key]


class AttachedBlock(Extended):
    """A block, or a component of a block, with mechanisms.

    Attributes:
        interlayer_entries: the mechanisms, in the order in which they run.
        interlayer_layout: how the output is converted to a feature map, if a mechanism reads one.
        interlayer_passes_grid: whether the grid of the tokens is passed on with the output.
    """

    interlayer_entries: tuple[Entry, ...] = ()
    interlayer_layout: Layout | None = None
    interlayer_passes_grid: bool = False

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_reentrant(self)
        memories, grid = {}, None
        if isinstance(x, Carried):
            x, memories, grid = x.x, dict(x.memories), x.grid
        all_held = ((entry, entry.mechanism_in(self)) for entry in self.interlayer_entries)
        held = [(entry, mechanism) for entry, mechanism in all_held if not mechanism.switched_off]
        current = {entry.key: entry.memory_from(memories) for entry, _ in held}
        for entry, mechanism in held:
            x, current[entry.key] = mechanism.enter(x, current[entry.key], entry.place)

        values, others = self._run_body(x, args, kwargs, held, current)
        layout = self.interlayer_layout
        if layout is not None and any(mechanism.reads_map for _, mechanism in held):
            grid = layout.grid_of(values.output, grid, args, kwargs)
            values = BlockValues(
                x, values.output, values.shortcut, values.projected, layout, grid, values.branch_factor, values.open_end
            )

        output = values.output
        for entry, mechanism in held:
            output, memory = mechanism.leave(output, values, current[entry.key], entry.place)
            if entry.scope == "none" or (entry.scope == "stage" and entry.place.last):
                memories.pop(entry.key, None)
            else:
                memories[entry.key] = memory
        keeps_grid = grid is not None and self.interlayer_passes_grid
        result = Carried(output, memories, grid) if memories or keeps_grid else output
        return result if others is None else (result, *others)

    def _run_body(
        self, x: Tensor, args: Any, kwargs: Any, held: list[Held], current: dict[str, Any]
    ) -> tuple[BlockValues, tuple[Any, ...] | None]:
        """Run the block itself: component by component if a mechanism works inside it, otherwise unchanged.

        Returns its values, and the outputs after the first one if it returns a tuple.
        """
        if any(entry.inside for entry, _ in held):
            return self._run_components(x, held, current), None
        if len(held) == 1 and held[0][1].ends_block(x) and components.opens(self):
            return components.run_open(self, x), None
        reads_shortcut = any(mechanism.reads_shortcut for _, mechanism in held)
        if reads_shortcut and components.projects(self):
            return components.run_block(self, x), None
        factors: list[Tensor] = []
        if self.training and any(mechanism.reads_branch_factor for _, mechanism in held):  # type: ignore[attr-defined]
            output, factors = forward_with_factors(self, x, *args, **kwargs)  # type: ignore[arg-type]
        else:
            output = self._run_original(x, *args, **kwargs)
        others = None
        if isinstance(output, tuple):
            output, others = output[0], output[1:]
        fits = reads_shortcut and x.shape == output.shape
        per_sample = [factor for factor in factors if len(factor) == len(x)]  # windows may be dropped one by one
        factor = per_sample[-1] if per_sample else None
        return BlockValues(x, output, x if fits else None, branch_factor=factor), others

    def _run_components(self, x: Tensor, held: list[Held], current: dict[str, Any]) -> BlockValues:
        """Run a residual block with the additions, gates and projections of its mechanisms."""
        addition = weight = None
        for entry, mechanism in held:
            added = mechanism.addition(x, current[entry.key], entry.place)
            addition = added if addition is None else components.plus(addition, added)
            projection = mechanism.branch_projection(entry.place)
            if projection is not None and weight is not None:
                raise RuntimeError(f"two mechanisms of one block project its branch; the second is {entry.key!r}")
            weight = weight if projection is None else projection
        gates = [(entry, mechanism) for entry, mechanism in held if entry.gates]

        def gate(y: Tensor, inner: list[Tensor]) -> Tensor:
            for entry, mechanism in gates:
                y, current[entry.key] = mechanism.gate(y, inner, current[entry.key], entry.place)
            return y

        return components.run_block(self, x, addition=addition, gate=gate if gates else None, weight=weight)

    def _run_original(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, nn.ModuleDict | nn.ModuleList):
            kind = original_class(self).__name__
            raise TypeError(f"{kind} runs every module that it holds, the mechanism among them, as one of its layers")
        if not isinstance(self, nn.Sequential):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        own = {entry.key for entry in self.interlayer_entries}
        for name, child in self.named_children():  # nn.Sequential would run the mechanisms as layers
            if name not in own:
                x = child(x)
        return x


def hold(owner: nn.Module, key: str, mechanism: nn.Module) -> None:
    """Register a mechanism as a submodule, unless the owner uses that name for something else."""
    if hasattr(owner, key):
        raise AttachError(
            f"{type(owner).__name__} has an attribute {key!r} already, the name of the "
            f"mechanism's submodule: rename it first"
        )
    owner.add_module(key, mechanism)


def add_entry(
    block: nn.Module, key: str, mechanism: BlockMechanism, place: Place, *, shared: bool = False, layout: Any = None
) -> None:
    """Append a mechanism to the list of a block.

    Args:
        block: the block, or a component of a block.
        key: the name of the mechanism's memory and, unless it is shared, of its submodule in the block.
        mechanism: the module.
        place: the position of the block.
        shared: whether the module belongs to the network, so that the block only refers to it.
        layout: how the output of the block is converted to a feature map.
    """
    if not shared:
        hold(block, key, mechanism)
    extend(block, AttachedBlock)
    attached: Any = block
    gates = type(mechanism).gate is not BlockMechanism.gate
    entry = Entry(key, place, mechanism.memory_scope, mechanism.works_inside(), gates, mechanism if shared else None)
    attached.interlayer_entries = (*attached.interlayer_entries, entry)
    if layout is not None:
        attached.interlayer_layout = layout


def remove_entries(model: nn.Module, keys: tuple[str, ...]) -> None:
    """Remove these mechanisms from every block. A block without any mechanism left gets its original class back."""
    for module in list(model.modules()):
        if not isinstance(module, AttachedBlock):
            continue
        kept = tuple(entry for entry in module.interlayer_entries if entry.key not in keys)
        for entry in module.interlayer_entries:
            if entry.key in keys and entry.shared is None:
                delattr(module, entry.key)
        module.interlayer_entries = kept
        if not any(entry.mechanism_in(module).reads_map for entry in kept):
            module.__dict__.pop("interlayer_layout", None)
        if not kept:
            for name in ("interlayer_entries", "interlayer_passes_grid"):
                module.__dict__.pop(name, None)
            restore(module, AttachedBlock)  # type: ignore[arg-type]


def entry_of(block: Any, key: str) -> Entry | None:
    """Returns the entry of a block with this key, or None."""
    entries: tuple[Entry, ...] = getattr(block, "interlayer_entries", ())
    return next((entry for entry in entries if entry.key == key), None)
