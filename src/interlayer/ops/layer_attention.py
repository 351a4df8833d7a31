"""Attention of a layer to the layers of its stage.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), ICLR 2023, sections 3 and 4, appendix A.3.

Each layer is a token: its query and key are vectors, its value is a feature map. Shapes:

    query, key    [B, D]        D = heads x key channels per head
    value, x      [B, C, H, W]  any memory format; C = heads x channels per head
    scores        [B, heads, t] one weight for each of the t layers

Scores are computed in float32 (float64 for float64 input), regardless of the dtype of the maps.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation

LINEAR_EPS = 1e-6  # added to the denominator of the linearized form


def _depthwise_value(x: Tensor, weight: Tensor | None, *, gelu: bool = False) -> Tensor:
    """Computes the value map V of a layer: a k x k depthwise convolution of its output, or the output itself.

    Args:
        x: The output of the layer, [B, C, H, W].
        weight: The weight of the convolution, [C, 1, k, k], or None for V = x.
        gelu: Whether to apply GELU to the result (Algorithm 4, line 13).
    """
    value = x if weight is None else F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=x.shape[1])
    return F.gelu(value) if gelu else value


def head_scores(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """Computes q · k / sqrt(d) for each head: [B, D], [B, D] -> [B, heads]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    product = (query.to(dtype) * key.to(dtype)).unflatten(-1, (heads, -1))
    return product.sum(-1) * product.shape[-1] ** -0.5


def weighted_sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Computes the sum over layers s of weights[:, h, s] times head h of values[s].

    The values are not stacked, so a stage saves each value map only once for its backward pass.
    """
    heads = weights.shape[1]
    weights = weights.to(values[0].dtype)[..., None, None, None]  # [B, heads, t, 1, 1, 1]
    total = weights[:, :, 0] * values[0].unflatten(1, (heads, -1))
    for layer, value in enumerate(values[1:], start=1):
        total = torch.addcmul(total, weights[:, :, layer], value.unflatten(1, (heads, -1)))
    return total.flatten(1, 2)


def _light_attention(
    x: Tensor,
    query: Tensor,
    key: Tensor,
    value_weight: Tensor | None,
    previous: Tensor | None,
    decay: Tensor | None,
    *,
    heads: int,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes MRLA-light (Eq. 8 and 9): O = sigmoid(q · k / sqrt(d)) V + lambda ⊙ O_previous.

    Args:
        x: The output of the layer, [B, C, H, W], from which V is computed (see `depthwise_value`).
        query: The query of the layer, [B, D].
        key: The key of the layer, [B, D].
        value_weight: The weight of the convolution that computes V, [C, 1, k, k], or None for V = x.
        previous: O of the previous layer, broadcastable to x, or None for attention without memory.
        decay: lambda, [C], or None for lambda = 1.
        heads: The number of heads.
        gelu: Whether to apply GELU to V.

    Returns:
        O, [B, C, H, W], and the gates, [B, heads].
    """
    gate = torch.sigmoid(head_scores(query, key, heads))
    value = depthwise_value(x, value_weight, gelu=gelu)
    output = _per_channel(gate, value) * value
    if previous is not None:
        previous = previous.to(output.dtype)
        output = output + previous if decay is None else torch.addcmul(output, _as_map(decay, output), previous)
    return output, gate


def _layer_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    maps: Sequence[Tensor] = (),
    value_weight: Tensor | None = None,
    *,
    heads: int,
    weighting: Literal["softmax", "linear"] = "softmax",
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Computes the attention of a layer to the t layers of its stage so far, including itself (Eq. 4, 6 and 9).

    softmax: O = sum_s softmax_s(q · k_s / sqrt(d)) V_s.
    linear:  O = sum_s φ(q) · φ(k_s) V_s / (φ(q) · sum_s φ(k_s) + 1e-6), φ(z) = elu(z) + 1 (appendix A.3). The paper
        writes the same sum as a recurrence, U_t = U_{t-1} + φ(k_t)^T V_t. U has one map for each key channel of a
        head (32 in a ResNet), the sum over layers one for each layer of the stage. See `linear_recurrence`.

    Args:
        query: The query of the layer, [B, D].
        keys: The keys of the t layers, each [B, D].
        values: The values of the first layers, each [B, C, H, W], if they have been computed before.
        maps: The outputs of the other layers, each [B, C, H, W], from which their values are computed (see
            `depthwise_value`): only the layer's own output for Eq. 6, those of all layers for Eq. 4.
        value_weight: The weight of the convolution that computes the values, [C, 1, k, k], or None.
        heads: The number of heads.
        weighting: "softmax" or "linear".

    Returns:
        O, [B, C, H, W], the weights, [B, heads, t], and the values computed from `maps`.
    """
    derived = [depthwise_value(x, value_weight) for x in maps]
    if weighting == "linear":
        query = _feature_map(query)
        keys = [_feature_map(key) for key in keys]
        weights = torch.stack([(query * key).unflatten(-1, (heads, -1)).sum(-1) for key in keys], dim=-1)
        weights = weights / (weights.sum(-1, keepdim=True) + LINEAR_EPS)
    else:
        weights = torch.stack([head_scores(query, key, heads) for key in keys], dim=-1).softmax(-1)
    return weighted_sum(weights, [*values, *derived]), weights, derived


def _linear_recurrence(
    x: Tensor,
    query: Tensor,
    key: Tensor,
    value_weight: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes one step of the recurrence of appendix A.3: O = φ(q) U / (φ(q) Z + 1e-6) with the state (U, Z).

    The result is that of `layer_attention(..., weighting="linear")`, with a memory that does not grow with depth.

    Args:
        x: The output of the layer, [B, C, H, W].
        query: The query of the layer, [B, D].
        key: The key of the layer, [B, D].
        value_weight: The weight of the convolution that computes V, [C, 1, k, k], or None for V = x.
        state: U, [B, heads, d, C / heads, H, W], and Z, [B, heads, d], of the previous layer, or None.
        heads: The number of heads.

    Returns:
        O, [B, C, H, W], and the updated state.
    """
    value = depthwise_value(x, value_weight)
    phi_query = _feature_map(query).unflatten(-1, (heads, -1))
    phi_key = _feature_map(key).unflatten(-1, (heads, -1))
    maps = value.unflatten(1, (heads, 1, -1))  # [B, heads, 1, C / heads, H, W]
    update = phi_key.to(value.dtype)[..., None, None, None] * maps
    u, z = (update, phi_key) if state is None else (state[0] + update, state[1] + phi_key)
    denominator = (phi_query * z).sum(-1, keepdim=True) + LINEAR_EPS
    weights = (phi_query / denominator).to(value.dtype)
    return (weights[..., None, None, None] * u).sum(2).flatten(1, 2), (u, z)


def _feature_map(z: Tensor) -> Tensor:
    return F.elu(z.to(torch.promote_types(z.dtype, torch.float32))) + 1


def _per_channel(gate: Tensor, value: Tensor) -> Tensor:
    """Expands [B, heads] to [B, C, 1, 1] in the dtype of `value`."""
    channels_per_head = value.shape[1] // gate.shape[1]
    return gate.to(value.dtype).repeat_interleave(channels_per_head, dim=1)[..., None, None]


def _as_map(vector: Tensor, like: Tensor) -> Tensor:
    """Reshapes [C] to [1, C, 1, 1] in the dtype of `like`."""
    return vector.to(like.dtype)[None, :, None, None]


depthwise_value = Operation("depthwise_value", _depthwise_value)
light_attention = Operation("light_attention", _light_attention)
layer_attention = Operation("layer_attention", _layer_attention)
linear_recurrence = Operation("linear_recurrence", _linear_recurrence)
