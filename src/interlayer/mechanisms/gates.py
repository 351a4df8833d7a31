"""Attention on a residual branch, with which layer attention is compared.

A gate changes the branch y of a residual block before the shortcut is added.

    BranchAttention   any of timm's attention layers on y. SE, ECA and CBAM scale it; GC and NL add to it.
                      GC is the global context block of Cao et al., GCNet, ICCVW 2019, section 3.3:
                      y' = y + W_2 ReLU(LayerNorm(W_1 sum over pixels j of softmax_j(w · y_j) y_j)), hidden C / 16.
                      NL is the non-local block of Wang et al., Non-local Neural Networks, CVPR 2018, section 3.3:
                      y' = y + BN(W_z attention(y)), hidden C / 2.
    TokenSE           SE on the tokens of a transformer, at the end of the MLP
    DIA               see `interlayer.mechanisms.dia`
    BridgeAttention   see `interlayer.mechanisms.bridge`
    DoubleAttention   see `interlayer.mechanisms.double_attention`

Shapes: y [B, C, H, W]; a map inside the branch [B, C_i, H_i, W_i]; averages [B, C]; scales [B, C, 1, 1].

`init="identity"` starts every gate at one and every addition at zero, which preserves the function of a trained
network. The layer before a sigmoid is initialized to zero, and the sigmoid, which is then 1/2, is always multiplied by
two (`UnitScale`). The factor is a tensor of the state dict. `init="paper"` has no such factor.

`drop_path` is the stochastic depth of the gate alone: y' = y + drop_path(gate(y) - y). Where a sample is dropped, its
gate is one or its addition zero; elsewhere the difference is divided by the survival probability, so that its expected
value is that of the gate. MRLA (appendix B.4, Table 12 c) states only that the survival probability is that of
MRLA-light.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from timm.layers import DropPath, GlobalContext, NonLocalAttn, create_attn
from timm.layers.eca import EcaModule
from timm.layers.squeeze_excite import SEModule
from torch import Tensor, nn

from .description import record_description
from .options import Init, OptionError, expect_choice, expect_odd
from .protocol import BlockMechanism, BlockValues, MemoryScope, Place

REDUCTION = 16  # of the hidden layer of SE, CBAM, GC and bridge attention, as in their papers
NL_REDUCTION = 2  # of the hidden layers of a non-local block
Fuse = Literal["add", "scale"]
# timm's attention layers, as its ResNets use them. SE has no bias here, in agreement with the counts that RLA reports.
ON_BRANCH: dict[str, Any] = {
    "se": partial(SEModule, rd_ratio=1 / REDUCTION, bias=False),
    "eca": "eca",
    "cbam": "cbam",
    "gc": partial(GlobalContext, fuse_add=True, fuse_scale=False, rd_ratio=1 / REDUCTION),
    "nl": partial(NonLocalAttn, rd_ratio=1 / NL_REDUCTION),
}


# The last layer of each of timm's gates, which an identity start initializes to zero.
LAST_LAYERS = {
    "se": ("fc2",),
    "eca": ("conv",),
    "cbam": ("channel.fc2", "spatial.conv.bn"),
    "nl": ("norm",),
}


class UnitScale(nn.Module):
    """Multiplies gates by a factor that makes them one at an identity start. Without a factor, returns its input."""

    factor: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", None)

    def set(self, factor: float | None) -> None:
        """Set the factor, which becomes a tensor of the state dict, or remove it."""
        self.register_buffer("factor", None if factor is None else torch.tensor(float(factor)))

    def forward(self, gates: Tensor) -> Tensor:
        return gates if self.factor is None else gates * self.factor


class Gate(BlockMechanism):
    """Base class of gates.

    Args:
        init: "paper", or "identity" to start with y' = y.
        drop_path: stochastic depth rate of the gate; see the module docstring.
    """

    memory_scope: MemoryScope = "none"

    def __init__(self, *, init: Init = "paper", drop_path: float = 0.0) -> None:
        super().__init__()
        expect_choice("init", init, ("paper", "identity"))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        record_description(self)

    def drop(self, y: Tensor, gated: Tensor) -> Tensor:
        """Returns the gated branch, or in training the branch itself where a sample is dropped."""
        if not self.training or isinstance(self.drop_path, nn.Identity):
            return gated
        return y + self.drop_path(gated - y)

    def fit_layers(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the layers the form that they had when `tensors` was saved. Parameters stay the same objects."""

    def describe(self) -> dict[str, str]:
        return {"mechanism": type(self).__name__}


class BranchGate(Gate):
    """Base class of gates on the branch of a residual block, which implement `attend`."""

    def gate(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        gated, memory = self.attend(y, inner, memory, place)
        return self.drop(y, gated), memory

    def attend(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        """Returns the branch after the gate and the memory, given the arguments of `BlockMechanism.gate`."""
        raise NotImplementedError


class BranchAttention(BranchGate):
    """One of timm's attention layers on the branch.

    Args:
        channels: C.
        kind: the name of the layer in timm: "se", "eca", "cbam", "gc" or "nl".
        reduction: C divided by the channels of the hidden layer. Default: that of the paper, see `ON_BRANCH`.
        fuse: whether the context of "gc" is added to y or scales it by a sigmoid.
        kernel_size: the kernel size of ECA's convolution, an odd number. None derives it from C as in its paper.
    """

    def __init__(
        self,
        channels: int,
        *,
        kind: str,
        reduction: int | None = None,
        fuse: Fuse = "add",
        kernel_size: int | None = None,
        init: Init = "paper",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__(init=init, drop_path=drop_path)
        expect_choice("fuse", fuse, ("add", "scale"))
        self.kind = kind
        options: dict[str, Any] = {} if reduction is None else {"rd_ratio": 1 / reduction}
        if kind == "gc":
            options |= {"fuse_add": fuse == "add", "fuse_scale": fuse == "scale"}
        self.attention: Any
        if kernel_size is None:
            self.attention = create_attn(ON_BRANCH[kind], channels, **options)
        else:
            expect_odd("kernel_size", kernel_size)
            if kind != "eca":
                raise OptionError(f"kernel_size is an option of eca, {kind} has none")
            self.attention = EcaModule(kernel_size=kernel_size)
        if kind != "gc" or fuse == "scale":
            self._give_factor()
        if init == "identity":
            last = (f"mlp_{fuse}.fc2",) if kind == "gc" else LAST_LAYERS[kind]
            for name in last:
                set_to_zero(self.attention.get_submodule(name))
            set_factors(self, 2)

    def _give_factor(self) -> None:
        for module in list(self.attention.modules()):
            if isinstance(getattr(module, "gate", None), nn.Module):  # the sigmoid
                module.gate = nn.Sequential(module.gate, UnitScale())

    def attend(self, y: Tensor, inner: list[Tensor], memory: Any, place: Place) -> tuple[Tensor, Any]:
        gated = self.attention(y)
        if self.kind == "nl" and y.is_contiguous():
            gated = gated.contiguous()  # in another memory layout, the next convolution rounds differently
        return gated, None

    def fit_layers(self, tensors: Mapping[str, Tensor]) -> None:
        if self.kind == "gc":
            scales = "attention.mlp_scale.fc1.weight" in tensors
            if scales and self.attention.mlp_scale is None:  # earlier versions had only this form
                self.attention.mlp_scale, self.attention.mlp_add = self.attention.mlp_add, None
                self._give_factor()
            name = "mlp_scale" if scales else "mlp_add"
            mlp = getattr(self.attention, name)
            if mlp is not None:
                fit_hidden((mlp.fc1,), mlp.norm, mlp.fc2, tensors.get(f"attention.{name}.fc1.weight"))
        elif self.kind == "nl":
            layer = self.attention
            fit_hidden((layer.t, layer.p, layer.g), None, layer.z, tensors.get("attention.t.weight"))

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "kind": self.kind}


class TokenSE(Gate):
    """Squeeze-and-excitation on tokens: x' = x ⊙ sigmoid(W_2 ReLU(W_1 mean over tokens of x)).

    As a mechanism of a component, such as the MLP, it is applied to the output, [B, N, C] or [B, H, W, C]. The mean is
    over all tokens, including class and other prefix tokens, as in context broadcasting, with which the CB paper
    compares it (Table 3b, which does not specify its place).

    Args:
        channels: C.
        reduction: C divided by the channels of the hidden layer.
    """

    def __init__(
        self, channels: int, *, reduction: int = REDUCTION, init: Init = "paper", drop_path: float = 0.0
    ) -> None:
        super().__init__(init=init, drop_path=drop_path)
        hidden = max(1, channels // reduction)
        self.fc1 = nn.Linear(channels, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, channels, bias=False)
        self.unit_scale = UnitScale()
        if init == "identity":
            set_to_zero(self.fc2)
            set_factors(self, 2)

    def leave(self, output: Tensor, values: BlockValues, memory: Any, place: Place) -> tuple[Tensor, Any]:
        average = output.mean(tuple(range(1, output.dim() - 1)), keepdim=True)
        scale = self.unit_scale(self.fc2(self.fc1(average).relu()).sigmoid())
        return self.drop(output, output * scale), None


def fit_gate_factors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the gates of `model` the factors, and the hidden layers, that they had when `tensors` was saved.

    Without it, the gates of a network that was built in the other way, or by an earlier version with other defaults,
    would not fit the tensors.
    """
    for gate_name, gate in model.named_modules():
        if not isinstance(gate, Gate):
            continue
        prefix = f"{gate_name}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if not own:
            continue
        gate.fit_layers(own)
        for name, module in gate.named_modules(prefix=gate_name):
            if isinstance(module, UnitScale):
                saved = tensors.get(f"{name}.factor")
                module.set(None if saved is None else saved.item())
                module.to(next(gate.parameters()).device)


@contextmanager
def fitted_gates(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Run `fit_gate_factors`, and undo it if the body raises an error, such as that of tensors that do not fit."""
    modules = [module for gate in model.modules() if isinstance(gate, Gate) for module in gate.modules()]
    parameters = [(parameter, parameter.data) for module in modules for parameter in module.parameters(recurse=False)]
    before = [(module, _attributes(module), dict(module._modules), dict(module._buffers)) for module in modules]
    try:
        fit_gate_factors(model, tensors)
        yield
    except Exception:
        for module, attributes, children, buffers in before:
            module.__dict__.update(attributes)
            for entries, saved in ((module._modules, children), (module._buffers, buffers)):
                entries.clear()
                entries.update(saved)  # type: ignore[arg-type]
        for parameter, data in parameters:
            parameter.data = data
        raise


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that are neither submodules nor tensors, such as the width of a layer."""
    return {name: value for name, value in module.__dict__.items() if not isinstance(value, dict)}


def fit_hidden(first: Sequence[Any], norm: Any, last: Any, saved: Tensor | None) -> None:
    """Give two layers the number of hidden channels between them that a saved network had.

    Args:
        first: the layers before the hidden channels, linear layers or 1x1 convolutions.
        norm: a LayerNorm of the hidden channels, or None.
        last: the layer after them.
        saved: the saved weight of the first layer, or None if there is none.
    """
    if saved is None or saved.dim() != first[0].weight.dim() or saved.shape == first[0].weight.shape:
        return
    hidden = len(saved)
    for layer in first:
        layer.weight.data = layer.weight.new_empty(hidden, *layer.weight.shape[1:])
        if layer.bias is not None:
            layer.bias.data = layer.bias.new_empty(hidden)
    if norm is not None:
        norm.weight.data, norm.bias.data = norm.weight.new_ones(hidden), norm.bias.new_zeros(hidden)
        norm.normalized_shape = (hidden,)
    last.weight.data = last.weight.new_empty(len(last.weight), hidden, *last.weight.shape[2:])
    for layer, side in (*((layer, "out") for layer in first), (last, "in")):
        name = f"{side}_features" if isinstance(layer, nn.Linear) else f"{side}_channels"
        setattr(layer, name, hidden)


def set_factors(gate: nn.Module, factor: float) -> None:
    """Set the factor of every `UnitScale` of a gate."""
    for module in gate.modules():
        if isinstance(module, UnitScale):
            module.set(factor)


def set_to_zero(layer: nn.Module) -> None:
    """Initialize all parameters of a layer to zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
