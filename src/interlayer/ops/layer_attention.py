"""Attention of one layer over the layers of its stage.

Paper: Cross-Layer Retrospective Retrieving via Layer Attention (MRLA), ICLR 2023, sections 3 and 4, appendix A.3.

A layer is a token: its query and key are vectors, its value is a whole feature map. Shapes used here:

    query, key    [B, D]        D = heads x key channels per head
    value, x      [B, C, H, W]  any memory format; C = heads x channels per head
    scores        [B, heads, t] one weight for each of the t layers attended to

Scores are computed in float32 (float64 for float64 input), whatever the maps are stored in.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import Operation

LINEAR_EPS = 1e-6  # added to the normaliser of the linearised form


def _depthwise_value(x: Tensor, weight: Tensor | None, *, gelu: bool = False) -> Tensor:
    """The value map V of a layer: a k x k depthwise convolution of its output, or the output itself.

    Args:
        x: the layer's output, [B, C, H, W].
        weight: [C, 1, k, k], or None for V = x.
        gelu: apply GELU to the result (Algorithm 4, line 13).
    """
    value = x if weight is None else F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=x.shape[1])
    return F.gelu(value) if gelu else value


def head_scores(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """q · k / sqrt(d) of every head: [B, D], [B, D] -> [B, heads]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    product = (query.to(dtype) * key.to(dtype)).unflatten(-1, (heads, -1))
    return product.sum(-1) * product.shape[-1] ** -0.5


def weighted_sum(weights: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Sum over layers s of weights[:, h, s] times head h of values[s].

    Each value is read where it lies: nothing is stacked, so what a stage keeps for its backward pass is every value
    map once and the weights.
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
    """MRLA-light (Eq. 8 and 9): O = sigmoid(q · k / sqrt(d)) V + lambda ⊙ O_previous.

    Args:
        x: the layer's output, [B, C, H, W], from which V is computed (see `depthwise_value`).
        query, key: [B, D].
        value_weight: [C, 1, k, k] or None.
        previous: O of the layer before, broadcastable to x, or None where there is no memory.
        decay: lambda, [C], or None for lambda = 1.
        heads: number of heads.
        gelu: apply GELU to V.

    Returns:
        O, [B, C, H, W], and the gates, [B, heads].
    """
    gate = torch.sigmoid(head_scores(query, key, heads))
    value = depthwise_value(x, value_weight, gelu=gelu)
    output = _per_channel(gate, value) * value
    if previous is not None:
        previous = previous.to(output.dtype)
        output = output + previous if decay is None else torch.addcmul(output, _map_of(decay, output), previous)
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
    """Attention of a layer to the t layers of its stage so far, itself included (Eq. 4, 6 and 9).

    softmax: O = sum_s softmax_s(q · k_s / sqrt(d)) V_s.
    linear:  O = sum_s φ(q) · φ(k_s) V_s / (φ(q) · sum_s φ(k_s) + 1e-6), φ(z) = elu(z) + 1 (appendix A.3). The paper
        writes the same sum as a recurrence, U_t = U_{t-1} + φ(k_t)^T V_t; U has one map for every key channel of a
        head (32 of them in a ResNet), the sum over layers one for every layer of the stage. See `linear_recurrence`.

    Args:
        query: [B, D].
        keys: t tensors [B, D].
        values: the values [B, C, H, W] that are known already, of the first layers.
        maps: outputs [B, C, H, W] of the other layers, whose values are derived here (see `depthwise_value`): the
            layer's own in Eq. 6, all of them in Eq. 4.
        value_weight: [C, 1, k, k] or None.

    Returns:
        O, [B, C, H, W], the weights, [B, heads, t], and the values derived.
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
    """One step of appendix A.3 as the paper writes it: O = φ(q) U / (φ(q) Z + 1e-6), state = (U, Z).

    What `layer_attention(..., weighting="linear")` computes, with a memory that does not grow with depth:
    U is [B, heads, d, C / heads, H, W], Z is [B, heads, d].
    """
    value = depthwise_value(x, value_weight)
    phi_query = _feature_map(query).unflatten(-1, (heads, -1))
    phi_key = _feature_map(key).unflatten(-1, (heads, -1))
    maps = value.unflatten(1, (heads, 1, -1))  # [B, heads, 1, C / heads, H, W]
    update = phi_key.to(value.dtype)[..., None, None, None] * maps
    u, z = (update, phi_key) if state is None else (state[0] + update, state[1] + phi_key)
    normaliser = (phi_query * z).sum(-1, keepdim=True) + LINEAR_EPS
    weights = (phi_query / normaliser).to(value.dtype)
    return (weights[..., None, None, None] * u).sum(2).flatten(1, 2), (u, z)


def _feature_map(z: Tensor) -> Tensor:
    return F.elu(z.to(torch.promote_types(z.dtype, torch.float32))) + 1


def _per_channel(gate: Tensor, value: Tensor) -> Tensor:
    """[B, heads] -> [B, C, 1, 1] in the dtype of `value`."""
    channels_per_head = value.shape[1] // gate.shape[1]
    return gate.to(value.dtype).repeat_interleave(channels_per_head, dim=1)[..., None, None]


def _map_of(vector: Tensor, like: Tensor) -> Tensor:
    """[C] -> [1, C, 1, 1] in the dtype of `like`."""
    return vector.to(like.dtype)[None, :, None, None]


depthwise_value = Operation("depthwise_value", _depthwise_value)
light_attention = Operation("light_attention", _light_attention)
layer_attention = Operation("layer_attention", _layer_attention)
linear_recurrence = Operation("linear_recurrence", _linear_recurrence)
