"""Measures of attention weights, as functions of arrays.

a is a row of attention weights: a >= 0, and its sum is one.

    entropy          H(a) = -sum_j a_j log a_j                           0 for one key, log N for N equal ones
    Jacobian         J = diag(a) - a aᵀ, the derivative of a softmax     CB, section 3.1, with λ = 1
    nuclear norm     ‖J‖* = trace J = 1 - sum_j a_j²                     J is symmetric and positive semidefinite
    distance         mean over i ≠ j of a_ij |p_i - p_j|_1               CB, section 3.3
    similarity       cos(A_i, A_j) of the maps of two heads              ResT, appendix A.2

The nuclear norm of a row is at most 1 - e^(-H): sum_j a_j² >= e^(-H), with equality for equal weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def row_entropy(weights: Tensor) -> Tensor:
    """Returns the entropy of every row of attention weights, in nats: [..., queries, keys] -> [..., queries]."""
    return torch.special.entr(weights).sum(-1)


def jacobian_norm(weights: Tensor) -> Tensor:
    """Returns the nuclear norm of the softmax's Jacobian for every row: [..., queries, keys] -> [..., queries].

    It equals the trace, 1 - sum_j a_j² (CB, section 3.1). For softmax(λ s), the norm with respect to s is λ times it.
    """
    return 1 - weights.square().sum(-1)


def relative_distance(weights: Tensor, queries: Tensor, keys: Tensor, *, per_query: bool = False) -> Tensor:
    """Returns the mean of a_ij |p_i - p_j|_1 over pairs of tokens at different places (CB, section 3.3, Figure 7b).

    The mean is over pairs, as in the paper: with N tokens, it is about 1 / N of the distance at which a query attends
    on average. With `per_query`, products are summed over the keys and averaged over the queries instead, which is
    that distance.

    Args:
        weights: attention weights of spatial tokens, [..., queries, keys].
        queries: positions of the queries as fractions of the height and width of the image, [..., queries, 2].
        keys: positions of the keys, [..., keys, 2].
        per_query: whether to average over queries instead of pairs.
    """
    distances = (queries[..., :, None, :] - keys[..., None, :, :]).abs().sum(-1).to(weights)
    total = (weights * distances).sum((-2, -1))
    if per_query:
        return total / weights.shape[-2]
    return total / (distances > 0).sum((-2, -1)).clamp_min(1)


def head_similarity(maps: Tensor) -> Tensor:
    """Returns the cosine similarity between the maps of heads, averaged over images (ResT, appendix A.2, Figure 1).

    Args:
        maps: the maps of the heads, [B, heads, queries, keys]. Each map is one vector.

    Returns:
        [heads, heads], one on the diagonal.
    """
    directions = F.normalize(maps.flatten(2), dim=-1)
    return (directions @ directions.transpose(1, 2)).mean(0)
