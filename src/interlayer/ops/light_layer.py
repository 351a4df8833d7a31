"""A layer with MRLA-light: the end of a residual block, the attention, its norm and the sum.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), ICLR 2023, section 4.2 and Algorithm 3.

    x  = ReLU(BN(z) + s)                               the end of the block, if z is given instead of x
    y  = global average of x                           [B, C]
    q, k = Conv1d(y), Conv1d(y)                        [B, C], over the channels
    O  = sigmoid(q · k / sqrt(d)) V + lambda ⊙ O'      V: a 3x3 depthwise convolution of x; O': of the previous layer
    x' = x + m BN(O)                                   m: the factor of stochastic depth, [B]

All maps are [B, C, H, W]. The operation covers the end of the block because x is then read where it is computed: its
average costs no pass over the map, and x need not be saved, since z and s are saved anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation, triton_implementation
from .layer_attention import depthwise_value, light_attention
from .residual_end import BatchNormArguments


class BlockEnd(NamedTuple):
    """The end of a residual block, x = ReLU(BN(z) + s).

    Args:
        norm: The last norm of the block.
        shortcut: s, [B, C, H, W], or None for a block without a shortcut.
        relu: Whether the block ends with a ReLU.
        source: The input of the norm of a projected shortcut and the table of that norm, see `batch_norm`. If they are
            given, the shortcut is computed again in the backward pass instead of being saved.
    """

    norm: BatchNormArguments
    shortcut: Tensor | None
    relu: bool = True
    source: tuple[Tensor, Tensor] | None = None


def _reference(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    norm: BatchNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    end: BlockEnd | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes x', O and the gates of a layer with MRLA-light.

    See the module docstring for the equations. Running statistics of norms in training are updated in place.

    Args:
        x: The output of the block, [B, C, H, W], or z if `end` is given.
        query_weight: The weight of the Conv1d for q, [1, 1, k], or None for a gate of one, without q and k.
        key_weight: The weight of the Conv1d for k, [1, 1, k], or None.
        value_weight: The weight of the depthwise convolution, [C, 1, 3, 3].
        previous: O', [B, C, H, W], or None for a layer without memory.
        decay: lambda, [C], or None for lambda = 1.
        norm: The norm of O.
        mask: m, [B], or None for m = 1.
        heads: The number of heads.
        end: The end of the residual block, or None if x is the output of the block.

    Returns:
        x', [B, C, H, W], O, [B, C, H, W], and the gates, [B, heads], or None without q and k.
    """
    if end is not None:
        x = block_output(x, end)
    gate = None
    if query_weight is None or key_weight is None:
        output = depthwise_value(x, value_weight)
        if previous is not None:
            output = output + (previous if decay is None else previous * decay.to(output.dtype)[None, :, None, None])
    else:
        query, key = channel_projections(x.mean((2, 3)), query_weight, key_weight)
        if previous is None and decay is not None:  # lambda times zero: DDP expects a gradient for every parameter
            previous = x.new_zeros(1, x.shape[1], 1, 1)
        output, gate = light_attention(x, query, key, value_weight, previous, decay, heads=heads)
    return masked_sum(x, batch_norm(output, norm), mask), output, gate


def block_output(z: Tensor, end: BlockEnd) -> Tensor:
    """Computes x = ReLU(BN(z) + s)."""
    y = batch_norm(z, end.norm)
    y = y if end.shortcut is None else (y + end.shortcut).to(y.dtype)  # as an addition in place
    return F.relu(y) if end.relu else y


def batch_norm(x: Tensor, norm: BatchNormArguments) -> Tensor:
    """Computes batch norm; in training, the running statistics are updated in place."""
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, norm.momentum, norm.eps
    )


def channel_projections(pooled: Tensor, query_weight: Tensor, key_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Computes q and k, [B, C] each, of averaged maps, [B, C], by one convolution for both."""
    weight = torch.cat((query_weight, key_weight))
    query, key = F.conv1d(pooled[:, None], weight, padding=weight.shape[-1] // 2).unbind(1)
    return query, key


def masked_sum(x: Tensor, output: Tensor, mask: Tensor | None) -> Tensor:
    """Computes x + m O, where m has one element for each sample, or x + O if there is no mask."""
    if mask is None:
        return x + output
    return torch.addcmul(x, output.to(x.dtype), mask.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1)))


light_layer = Operation("light_layer", _reference, triton_implementation("light_layer"))

if light_layer.implementations:
    from ._triton.batch_norm import batch_norm as normalize_shortcut
    from ._triton.light_layer import supports_open_end
else:

    def normalize_shortcut(x: Tensor, norm: BatchNormArguments) -> tuple[Tensor, Tensor]:
        """Returns BN(x) and the table of the norm, by a kernel."""
        raise NotImplementedError

    def supports_open_end(x: Tensor) -> bool:
        """Returns whether a kernel can compute the end of a block with the input x together with its attention."""
        return False
