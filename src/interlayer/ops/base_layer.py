"""A layer with MRLA-base in a CNN: the end of a residual block, the attention, its norm and the sum.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), ICLR 2023, section 4.1 and Algorithm 1.

    x   = ReLU(BN(z) + s)                            the end of the block, if z is given instead of x
    y   = global average of x                        [B, C]
    q, k_t = Conv1d(y), Conv1d(y)                    [B, C], over the channels
    V_t = 3x3 depthwise convolution of x
    p_s = softmax over s <= t of q · k_s / sqrt(d)   [B, heads, t]
    O   = sum over s <= t of p_s V_s
    x'  = x + m f(BN(O))                             m: the factor of stochastic depth, [B]

for the layer t of a stage, where f is a ReLU in the published reading and the identity in the paper's. All maps are
[B, C, H, W]. As in `light_layer`, the operation covers the end of the block, because x is then read where it is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation, triton_implementation
from .layer_attention import layer_attention
from .light_layer import BlockEnd, batch_norm, block_output, channel_projections, masked_sum
from .linked import Linked, tensors_of
from .residual_end import BatchNormArguments


def _reference(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: BatchNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    relu: bool = False,
    end: BlockEnd | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Computes x', the attention weights, and the keys and values of a stage up to a layer with MRLA-base.

    See the module docstring for the equations. Running statistics of norms in training are updated in place. Pass the
    returned keys and values on to the next layer, instead of the given ones: their gradients are then computed layer by
    layer. In functions compiled by torch.compile they may be `Linked`.

    Args:
        x: The output of the block, [B, C, H, W], or z if `end` is given.
        query_weight: The weight of the Conv1d for q, [1, 1, k].
        key_weight: The weight of the Conv1d for k, [1, 1, k].
        value_weight: The weight of the depthwise convolution, [C, 1, 3, 3].
        keys: The keys of the previous layers, each [B, C].
        values: The values of the previous layers, each [B, C, H, W].
        norm: The norm of O.
        mask: m, [B], or None for m = 1.
        heads: The number of heads.
        relu: Whether a ReLU is applied to the normalized O.
        end: The end of the residual block, or None if x is the output of the block.

    Returns:
        x', [B, C, H, W], the attention weights, [B, heads, t], and the keys and values of all t layers.
    """
    if end is not None:
        x = block_output(x, end)
    query, key = channel_projections(x.mean((2, 3)), query_weight, key_weight)
    keys, values = (*tensors_of(keys), key), tensors_of(values)
    output, weights, derived = layer_attention(query, keys, values, (x,), value_weight, heads=heads)
    output = batch_norm(output, norm)
    return masked_sum(x, F.relu(output) if relu else output, mask), weights, keys, (*values, *derived)


base_layer = Operation("base_layer", _reference, triton_implementation("base_layer"))
