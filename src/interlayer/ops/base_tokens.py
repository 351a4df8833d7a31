"""A layer with MRLA-base in a transformer: the norm, the attention over the layers and the sum.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), ICLR 2023, section 4.1 and Algorithm 2.

    n   = LayerNorm(x)                               of the patch tokens
    y   = average of n over the tokens               [B, C]
    q, k_t = Conv1d(y), Conv1d(y)                    [B, C], over the channels
    V_t = 3x3 depthwise convolution of n             [B, C, H, W], with zeros outside of the grid
    p_s = softmax over s <= t of q · k_s / sqrt(d)   [B, heads, t]
    O   = sum over s <= t of p_s V_s
    x'  = x + m O                                    m: the factor of stochastic depth, [B]

for the layer t of a stage. See `light_tokens.py` for the tokens x and x', their prefix and dtypes; the values have the
dtype of O there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import Operation, triton_implementation
from .layer_attention import layer_attention
from .light_layer import channel_projections
from .light_tokens import LayerNormArguments, layer_norm, tokens_sum, tokens_to_map
from .linked import Linked, tensors_of


def _reference(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    keys: Sequence[Tensor] | Linked,
    values: Sequence[Tensor] | Linked,
    norm: LayerNormArguments,
    mask: Tensor | None = None,
    *,
    heads: int,
    grid: tuple[int, int],
    prefix: int = 0,
    add_prefix: bool = False,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Computes x', the attention weights, and the keys and values of a stage up to a layer with MRLA-base.

    See the module docstring for the equations. Pass the returned keys and values on to the next layer, instead of the
    given ones: their gradients are then computed layer by layer. In functions compiled by torch.compile they may be
    `Linked`.

    Args:
        x: The tokens that the block returns, [B, P + H W, C].
        query_weight: The weight of the Conv1d for q, [1, 1, k].
        key_weight: The weight of the Conv1d for k, [1, 1, k].
        value_weight: The weight of the depthwise convolution, [C, 1, 3, 3].
        keys: The keys of the previous layers, each [B, C].
        values: The values of the previous layers, each [B, C, H, W].
        norm: The norm of x.
        mask: m, [B], or None for m = 1.
        heads: The number of heads.
        grid: H and W.
        prefix: P, the number of prefix tokens.
        add_prefix: Whether the normalized prefix tokens are added to the prefix tokens.

    Returns:
        x', [B, P + H W, C], the attention weights, [B, heads, t], and the keys and values of all t layers.
    """
    normed = tokens_to_map(layer_norm(x[:, prefix:], norm), grid)
    query, key = channel_projections(normed.mean((2, 3)), query_weight, key_weight)
    keys, values = (*tensors_of(keys), key), tensors_of(values)
    output, weights, derived = layer_attention(query, keys, values, (normed,), value_weight, heads=heads)
    return tokens_sum(x, output, norm, mask, prefix, add_prefix), weights, keys, (*values, *derived)


base_tokens = Operation("base_tokens", _reference, triton_implementation("base_tokens"))
