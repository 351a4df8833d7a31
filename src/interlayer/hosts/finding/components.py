"""Residual blocks and their components: the branch y, the shortcut s and the output act(y + s).

timm adds the shortcut inside the block, in place, so the components cannot be observed from outside. Blocks with
mechanisms that work inside them are run by these functions instead, which follow `timm.models.resnet` and
`timm.models._efficientnet_blocks`. The residual networks of this library consist of `ComponentBlock` modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import Conv2dSame
from timm.models._efficientnet_blocks import (
    ConvBnAct,
    DepthwiseSeparableConv,
    EdgeResidual,
    InvertedResidual,
    UniversalInvertedResidual,
)
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from ... import ops
from ...mechanisms.batch_norm import norm_arguments, norm_unsupported_reason
from ...mechanisms.modules import has_hooks
from ...mechanisms.protocol import BlockValues
from ..extending import original_class
from ..stochastic_depth import recording

Gate = Callable[[Tensor, list[Tensor]], Tensor]
PLAIN_CONVOLUTIONS = (nn.Conv2d, Conv2dSame)
# The components of the branch of timm's EfficientNet blocks, in order. The block adds its input if it has a skip.
BRANCHES: dict[type, tuple[str, ...]] = {
    InvertedResidual: (
        "conv_s2d", "bn_s2d", "conv_pw", "bn1", "conv_dw", "bn2", "aa", "se", "conv_pwl", "bn3",
    ),
    DepthwiseSeparableConv: ("conv_s2d", "bn_s2d", "conv_dw", "bn1", "aa", "se", "conv_pw", "bn2"),
    EdgeResidual: ("conv_exp", "bn1", "aa", "se", "conv_pwl", "bn2"),
    UniversalInvertedResidual: ("dw_start", "pw_exp", "dw_mid", "se", "pw_proj", "dw_end", "layer_scale"),
    ConvBnAct: ("conv", "bn1", "aa"),
}  # fmt: skip


class ComponentBlock(nn.Module):
    """A residual block that can be run component by component.

    Attributes:
        branch_channels: channels of the branch, and of the output.
        inner_channels: channels of the maps inside the branch, after each convolution except the last.
        pools_last: whether the branch keeps the resolution of the input until it is pooled before the addition.
        unsupported_reason: the reason why no mechanism can work inside the block, or None.
    """

    branch_channels: int
    inner_channels: list[int]
    pools_last: bool = False
    unsupported_reason: str | None = None

    def make_exchange(self, state_channels: int) -> nn.Module:
        """See `make_exchange`."""
        raise NotImplementedError

    def run_components(
        self, x: Tensor, *, addition: Tensor | None = None, gate: Gate | None = None, weight: Tensor | None = None
    ) -> BlockValues:
        """See `run_block`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.run_components(x).output


def unsupported_reason(block: Any) -> str | None:
    """Returns the reason why a block cannot be run component by component, or None."""
    if isinstance(block, ComponentBlock):
        return block.unsupported_reason
    if isinstance(block, (BasicBlock, Bottleneck)):
        runs = _runs_as_timms(block)
        return None if runs else f"{type(block).__name__} runs in another way than timm's ResNet blocks"
    if original_class(block) in BRANCHES:
        return None
    return f"{type(block).__name__} is not a block whose branch is known"


def state_unsupported_reason(block: Any) -> str | None:
    """Returns the reason why a block cannot read a recurrent state, or None."""
    if isinstance(block, (BasicBlock, Bottleneck)):
        why = unsupported_reason(block)
        plain = why is not None or type(block.conv1) in PLAIN_CONVOLUTIONS
        return why if plain else f"its first convolution is a {type(block.conv1).__name__}"
    if isinstance(block, (InvertedResidual, DepthwiseSeparableConv)):
        if original_class(block) not in (InvertedResidual, DepthwiseSeparableConv):
            return f"{type(block).__name__} is not the block of MobileNetV2"
        if not isinstance(block.se, nn.Identity):
            return (
                f"its {type(block.se).__name__} would have to read the state too, because it lies between the "
                f"depthwise convolution, with which the state enters, and the projection"
            )
        convs = [getattr(block, name, None) for name in ("conv_pw", "conv_dw", "conv_pwl")]
        plain = all(conv is None or type(conv) in PLAIN_CONVOLUTIONS for conv in convs)
        if block.conv_s2d is not None or not isinstance(block.aa, nn.Identity) or not plain:
            return "it is not the plain inverted residual of MobileNetV2"
        return None
    if isinstance(block, ComponentBlock):
        return block.unsupported_reason
    if is_convolution(block):
        return f"{type(block).__name__} is a convolution without a shortcut, past which no state is carried"
    return f"{type(block).__name__} is neither a block of timm's ResNets nor of its MobileNetV2s"


def _runs_as_timms(block: Any) -> bool:
    """Whether a ResNet block uses the forward method of timm, which `_run_resnet_block` reproduces."""
    cls: Any = original_class(block)
    return cls.forward in (BasicBlock.forward, Bottleneck.forward)


def branch_channels(block: Any) -> int:
    """Returns the channels of the branch, and of the output of the block."""
    if isinstance(block, ComponentBlock):
        return block.branch_channels
    if isinstance(block, Bottleneck):
        return block.conv3.out_channels
    if isinstance(block, BasicBlock):
        return block.conv2.out_channels
    convolutions: list[Any] = [module for module in _branch(block) if hasattr(module, "out_channels")]
    return convolutions[-1].out_channels


def _branch(block: Any) -> list[nn.Module]:
    """Returns the components of the branch of one of timm's EfficientNet blocks."""
    components = [getattr(block, name) for name in BRANCHES[original_class(block)]]
    return [module for module in components if module is not None]


def is_convolution(block: Any) -> bool:
    """Whether a block of timm's EfficientNets is a plain convolution without a shortcut."""
    return original_class(block) is ConvBnAct and not block.has_skip


def last_norm(block: BasicBlock | Bottleneck) -> Any:
    """Returns the norm at the end of a ResNet block's branch."""
    return block.bn3 if isinstance(block, Bottleneck) else block.bn2


def inner_channels(block: Any) -> list[int]:
    """Returns the channels of the maps inside the branch, after each convolution except the last."""
    if isinstance(block, ComponentBlock):
        return block.inner_channels
    if isinstance(block, Bottleneck):
        return [block.conv1.out_channels, block.conv2.out_channels]
    return [block.conv1.out_channels] if isinstance(block, BasicBlock) else []


def make_exchange(block: Any, state_channels: int) -> nn.Module:
    """Create the module by which a state of k channels enters the block.

    A convolution of [x, h] is the sum of a convolution of x and a convolution of h. In a ResNet the second is a
    convolution like the first one, with k input channels. In MobileNetV2 the state is concatenated after the expansion
    (appendix B.2.1), so it has its own depthwise convolution, norm, activation and projection.
    """
    if isinstance(block, ComponentBlock):
        return block.make_exchange(state_channels)
    if isinstance(block, (BasicBlock, Bottleneck)):
        return conv_like(block.conv1, state_channels)
    inverted = isinstance(block, InvertedResidual)
    projection = block.conv_pwl if inverted else block.conv_pw
    norm = block.bn2 if inverted else block.bn1
    return nn.Sequential(
        conv_like(block.conv_dw, state_channels, depthwise=True),
        nn.BatchNorm2d(state_channels, norm.eps, norm.momentum),
        type(norm.act)(),
        conv_like(projection, state_channels),
    )


class Pointwise(nn.Conv2d):
    """A 1x1 convolution that is computed by `interlayer.ops.pointwise`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.pointwise(input, weight)


def conv_like(conv: nn.Conv2d, in_channels: int, *, depthwise: bool = False) -> nn.Conv2d:
    """Create a convolution like `conv`, without bias, for another number of input channels."""
    out_channels, groups = (in_channels, in_channels) if depthwise else (conv.out_channels, 1)
    if conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.padding == (0, 0) and not depthwise:
        return Pointwise(in_channels, out_channels, 1, bias=False)
    convolution = Conv2dSame if isinstance(conv, Conv2dSame) else nn.Conv2d
    return convolution(
        in_channels, out_channels, conv.kernel_size, conv.stride, conv.padding, conv.dilation, groups, bias=False  # type: ignore[arg-type]
    )  # fmt: skip


def run_block(
    block: Any,
    x: Tensor,
    *,
    addition: Tensor | None = None,
    gate: Gate | None = None,
    weight: Tensor | None = None,
) -> BlockValues:
    """Run a block component by component.

    Args:
        block: a block for which `unsupported_reason` returns None.
        x: the input of the block.
        addition: a tensor that is added to the result of the first convolution. For a state, it is the result of the
            module that `make_exchange` creates.
        gate: a function of the branch y and the maps inside it that returns the new branch.
        weight: weight [k, C, 1, 1] of a 1x1 convolution of the branch, computed together with the end of the block.
    """
    if isinstance(block, ComponentBlock):
        return block.run_components(x, addition=addition, gate=gate, weight=weight)
    if isinstance(block, (BasicBlock, Bottleneck)):
        return _run_resnet_block(block, x, addition, gate, weight)
    return _run_inverted_residual(block, x, addition, gate, weight)


def opens(block: Any) -> bool:
    """Whether `run_open` can run a block: one of timm's ResNet blocks that ends with a norm, the sum and a ReLU."""
    if not (isinstance(block, (BasicBlock, Bottleneck)) and _runs_as_timms(block)):
        return False
    activation = block.act3 if isinstance(block, Bottleneck) else block.act2
    plain = block.se is None and (block.drop_path is None or not getattr(block.drop_path, "drop_prob", None))
    return (
        plain
        and type(activation) is nn.ReLU
        and not has_hooks(activation)
        and norm_unsupported_reason(last_norm(block)) is None
    )


def run_open(block: Any, x: Tensor) -> BlockValues:
    """Run a block up to its last convolution, and leave its end to a mechanism, which gets it as `open_end`."""
    raw, _, _ = _run_resnet_branch(block, x, None)
    shortcut, source = (x, None) if block.downsample is None else _run_downsample(block.downsample, x)
    end = ops.BlockEnd(norm_arguments(last_norm(block)), shortcut, source=source)
    return BlockValues(x, raw, shortcut, open_end=end)


def _run_downsample(downsample: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Returns the projected shortcut, and what it can be computed from again, if a kernel computes its norm."""
    norm: Any = downsample[-1] if type(downsample) is nn.Sequential and len(downsample) else None
    if (
        has_hooks(downsample)
        or norm_unsupported_reason(norm) is not None
        or not norm.training
        or not torch.is_grad_enabled()
    ):
        return downsample(x), None
    for module in downsample[:-1]:
        x = module(x)
    if torch.compiler.is_compiling() or not ops.supports_open_end(x) or x.numel() < 2 * x.shape[1]:
        return norm(x), None
    shortcut, table = ops.normalize_shortcut(x, norm_arguments(norm))
    return shortcut, (x.detach(), table)


def _run_resnet_branch(block: Any, x: Tensor, addition: Tensor | None) -> tuple[Tensor, list[Tensor], nn.Module]:
    """Returns the output of the last convolution, the maps inside the branch, and the activation after the sum."""
    first = plus(block.conv1(x), addition)
    if isinstance(block, Bottleneck):
        inner = [block.act1(block.bn1(first))]
        inner.append(block.aa(block.act2(block.drop_block(block.bn2(block.conv2(inner[0]))))))
        return block.conv3(inner[-1]), inner, block.act3
    inner = [block.aa(block.act1(block.drop_block(block.bn1(first))))]
    return block.conv2(inner[-1]), inner, block.act2


def _run_resnet_block(
    block: Any, x: Tensor, addition: Tensor | None, gate: Gate | None, weight: Tensor | None
) -> BlockValues:
    raw, inner, activation = _run_resnet_branch(block, x, addition)
    norm = last_norm(block)
    shortcut = x if block.downsample is None else block.downsample(x)
    factors: list[Tensor] = []
    dropping = None if block.drop_path is None else recording(block.drop_path, factors)
    after = [module for module in (block.se, dropping) if module is not None]
    ends_plainly = gate is None and not after and isinstance(activation, nn.ReLU)
    if weight is not None and ends_plainly and norm.training and norm_unsupported_reason(norm) is None:
        output, projected = _end_of_block(raw, norm, weight, shortcut, relu=True)
        return BlockValues(x, output, shortcut, projected)
    y = _gated(norm(raw), inner, gate, after)
    factor = factors[0] if factors else None
    return BlockValues(x, activation(y + shortcut), shortcut, projection(y, weight), branch_factor=factor)


def _run_inverted_residual(
    block: Any, x: Tensor, addition: Tensor | None, gate: Gate | None, weight: Tensor | None
) -> BlockValues:
    *first, norm = _branch(block)
    raw = x
    for module in first:
        raw = module(raw)
    raw = plus(raw, addition)
    shortcut = x if block.has_skip else None
    factors: list[Tensor] = []
    drops = block.has_skip and not isinstance(block.drop_path, nn.Identity)
    after = [recording(block.drop_path, factors)] if drops else []
    if weight is not None and gate is None and not after and norm.training and norm_unsupported_reason(norm) is None:
        output, projected = _end_of_block(raw, norm, weight, shortcut, relu=False)
        return BlockValues(x, output, shortcut, projected)
    y = _gated(norm(raw), [], gate, after)
    factor = factors[0] if factors else None
    return BlockValues(x, plus(y, shortcut), shortcut, projection(y, weight), branch_factor=factor)


def _end_of_block(
    x: Tensor, norm: Any, weight: Tensor, shortcut: Tensor | None, *, relu: bool
) -> tuple[Tensor, Tensor]:
    """Compute the block's output and the projection of its branch from the input of its last norm.

    Args:
        x: The output of the last convolution.
        norm: A batch norm in training for which `norm_unsupported_reason` is None. Its statistics are updated.
        weight: The weight of the projection, [k, C, 1, 1].
        shortcut: The shortcut, or None for a block without one.
        relu: Whether the block ends with a ReLU.
    """
    return ops.residual_end(x, norm_arguments(norm), weight, shortcut, relu=relu)


def plus(x: Tensor, addition: Tensor | None) -> Tensor:
    return x if addition is None else x + addition


def projection(y: Tensor, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else nn.functional.conv2d(y, weight)


def _gated(y: Tensor, inner: list[Tensor], gate: Gate | None, after: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Apply the gate, and the functions after it, to the normalized branch."""
    if gate is not None:
        y = gate(y, inner)
    for function in after:
        y = function(y)
    return y


def projects(block: Any) -> bool:
    """Whether `block` is one of timm's ResNet blocks with a projection on its shortcut."""
    return isinstance(block, (BasicBlock, Bottleneck)) and _runs_as_timms(block) and block.downsample is not None
