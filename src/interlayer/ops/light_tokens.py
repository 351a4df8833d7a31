"""A layer with MRLA-light in a transformer: the norms, the attention over the grid of tokens and the sum.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), ICLR 2023, section 4.2 and Algorithm 4.

    n  = LayerNorm(x)                                     of the patch tokens
    y  = average of n over the tokens                     [B, C]
    q, k = Conv1d(y), Conv1d(y)                           [B, C], over the channels
    V  = GELU(3x3 depthwise convolution of n)             [B, C, H, W], with zeros outside of the grid
    O  = sigmoid(q · k / sqrt(d)) V + lambda ⊙ LayerNorm'(O')   O': of the previous layer
    x' = x + m O                                          m: the factor of stochastic depth, [B]

x and x' are tokens [B, P + H W, C], of which the first P are prefix tokens (class, distillation, register tokens). The
prefix tokens are returned unchanged, or as prefix + m LayerNorm(prefix). Under autocast, O has the autocast dtype, like
the convolution's result, while x', like x, keeps the dtype of the residual stream, which is float32 in timm's ViT.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation, triton_implementation
from .layer_attention import depthwise_value, light_attention
from .light_layer import channel_projections, masked_sum


class LayerNormArguments(NamedTuple):
    """The tensors and numbers of a LayerNorm over C channels.

    Args:
        weight: γ, [C].
        bias: β, [C].
        eps: The value added to the variance.
    """

    weight: Tensor
    bias: Tensor
    eps: float = 1e-5


def _reference(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor,
    previous: Tensor | None,
    decay: Tensor | None,
    norm: LayerNormArguments,
    norm_previous: LayerNormArguments | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    grid: tuple[int, int],
    prefix: int = 0,
    add_prefix: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes x', O and the gates of a layer with MRLA-light in a transformer.

    See the module docstring for the equations.

    Args:
        x: The tokens that the block returns, [B, P + H W, C].
        query_weight: The weight of the Conv1d for q, [1, 1, k], or None for a gate of one, without q, k and memory.
        key_weight: The weight of the Conv1d for k, [1, 1, k], or None.
        value_weight: The weight of the depthwise convolution, [C, 1, 3, 3].
        previous: O', [B, C, H, W], or tokens [B, P + H W, C] whose patch tokens are O', or None for O' = 0.
        decay: lambda, [C], or None for lambda = 1.
        norm: The norm of x.
        norm_previous: The norm of O', or None for a layer without memory.
        mask: m, [B], or None for m = 1.
        heads: The number of heads.
        grid: H and W.
        prefix: P, the number of prefix tokens.
        add_prefix: Whether the normalized prefix tokens are added to the prefix tokens.

    Returns:
        x', [B, P + H W, C], O, [B, C, H, W], and the gates, [B, heads], or None without q and k.
    """
    normed = tokens_to_map(layer_norm(x[:, prefix:], norm), grid)
    gate = None
    if query_weight is None or key_weight is None:
        output = depthwise_value(normed, value_weight, gelu=True)
    else:
        query, key = channel_projections(normed.mean((2, 3)), query_weight, key_weight)
        memory = None if norm_previous is None else _memory(x, previous, norm_previous, grid, prefix)
        output, gate = light_attention(normed, query, key, value_weight, memory, decay, heads=heads, gelu=True)
    return tokens_sum(x, output, norm, mask, prefix, add_prefix), output, gate


def _memory(x: Tensor, previous: Tensor | None, norm: LayerNormArguments, grid: tuple[int, int], prefix: int) -> Tensor:
    """Returns LayerNorm'(O') as a map."""
    if previous is None:  # O' = 0, and zero times the norm: DDP expects a gradient for every parameter
        return 0 * layer_norm(x.new_zeros(1, 1, 1, x.shape[-1]), norm).permute(0, 3, 1, 2)
    if previous.dim() == 3:
        return tokens_to_map(layer_norm(previous[:, prefix:], norm), grid)
    return layer_norm(previous.permute(0, 2, 3, 1), norm).permute(0, 3, 1, 2)


def tokens_sum(
    x: Tensor, output: Tensor, norm: LayerNormArguments, mask: Tensor | None, prefix: int, add_prefix: bool
) -> Tensor:
    """Computes x', [B, P + H W, C], given x and the map O, [B, C, H, W]."""
    first, patches = x[:, :prefix], x[:, prefix:]
    result = masked_sum(patches, map_to_tokens(output), mask)
    if not prefix:
        return result
    first = masked_sum(first, layer_norm(first, norm), mask) if add_prefix else first
    return torch.cat((first.to(result.dtype), result), dim=1)


def layer_norm(x: Tensor, norm: LayerNormArguments) -> Tensor:
    """Normalizes over the last dimension."""
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def tokens_to_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Returns a view of tokens [B, H W, C] as a map [B, C, H, W]."""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def map_to_tokens(feature_map: Tensor) -> Tensor:
    """The inverse of `tokens_to_map`."""
    return feature_map.permute(0, 2, 3, 1).flatten(1, 2)


light_tokens = Operation("light_tokens", _reference, triton_implementation("light_tokens"))
