"""Measures of the spatial attention of each layer of a network, averaged over images.

Weights are reduced when they are computed, so that the weights of one layer and one batch only are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .attention_measures import jacobian_norm, relative_distance, row_entropy
from .batches import image_batches
from .spatial_attention import AttentionMap, attention_maps

BATCH = 16  # number of images that are run at a time, if they are one tensor
LOW, HIGH = 0.15, 0.85  # CB, Figure 4
MASKED = (
    1e-30  # a weight below this is of a masked key, whose score is lower by 100 in Swin, and minus infinity elsewhere
)
POINTS = 1000  # rows of each layer that `attention_jacobian` keeps


@dataclass(frozen=True)
class LayerEntropy:
    """Entropy of the attention rows of one layer, in nats.

    Args:
        name: name of the module.
        mean: mean over images, heads and queries.
        low: 15th percentile.
        high: 85th percentile, above which are the highest 15%.
        class_token: mean for the class token, over images and heads; None if the queries have no class token.
        bound: log of the number of keys, the entropy of uniform attention.
        heads: number of heads.
        images: number of images.
    """

    name: str
    mean: float
    low: float
    high: float
    class_token: float | None
    bound: float
    heads: int
    images: int


@dataclass(frozen=True)
class LayerDistance:
    """Relative distance of the attention of one layer; see `relative_distance`.

    Args:
        name: name of the module.
        mean: mean over images and heads.
        heads_means: mean of each head over images.
        uniform: the value for uniform attention to the same keys, without those that are masked.
        images: number of images.
    """

    name: str
    mean: float
    heads_means: tuple[float, ...]
    uniform: float
    images: int


@dataclass(frozen=True)
class LayerJacobian:
    """Nuclear norm of the softmax's Jacobian and entropy, for the attention rows of one layer.

    Args:
        name: name of the module.
        norm: mean nuclear norm over images, heads and queries.
        entropy: mean entropy.
        norms: nuclear norm of some rows, evenly spaced over images, heads and queries.
        entropies: entropy of the same rows.
        keys: number of keys.
        heads: number of heads.
        images: number of images.
    """

    name: str
    norm: float
    entropy: float
    norms: np.ndarray
    entropies: np.ndarray
    keys: int
    heads: int
    images: int


def attention_entropy(model: nn.Module, images: Tensor | Iterable[Any]) -> list[LayerEntropy]:
    """Measures the entropy of the rows of every spatial attention (CB, Figures 4 and 7a).

    The caption of CB's Figure 4 says "15th percentile", its text "the top 15% of entropy values": both ends are
    returned. `low` is the 15th percentile, `high` the 85th, the lowest of the highest 15%.

    Args:
        model: any network with spatial attention.
        images: preprocessed images [B, C, H, W], or an iterable of such batches, such as a DataLoader.

    Raises:
        ValueError: the network has no spatial attention.
    """

    def reduce(each: AttentionMap) -> tuple[AttentionMap, Tensor, Tensor | None]:
        entropies = row_entropy(each.weights)
        of_class = entropies[..., 0].mean() * len(each.weights) if each.queries.prefix else None
        return _facts(each), _of_real_queries(each, entropies).cpu(), of_class

    result = []
    for parts, count in _by_layer(model, images, reduce):
        facts, values = parts[0][0], torch.cat([each for _, each, _ in parts]).numpy()
        low, high = np.quantile(values, (LOW, HIGH))
        of_class = [float(each) for _, _, each in parts if each is not None]
        result.append(
            LayerEntropy(
                facts.name, float(values.mean(dtype=np.float64)), float(low), float(high),
                sum(of_class) / count if of_class else None, math.log(facts.weights.shape[-1]), facts.heads, count,
            )
        )  # fmt: skip
    return result


def attention_distance(
    model: nn.Module, images: Tensor | Iterable[Any], *, per_query: bool = False
) -> list[LayerDistance]:
    """Measures the relative distance of the interactions of every spatial attention (CB, section 3.3, Figure 7b).

    Class and other prefix tokens are left out. For attention in windows, keys outside the window of a query have a
    weight of zero. Layers of which it is not known where their tokens are in the image are left out.

    Args:
        model: any network with spatial attention.
        images: preprocessed images [B, C, H, W], or an iterable of such batches.
        per_query: whether products are summed over the keys and averaged over queries, instead of averaged over pairs;
            see `relative_distance`.

    Raises:
        ValueError: the network has no spatial attention, or it is not known where its tokens are.
    """

    def reduce(each: AttentionMap) -> tuple[AttentionMap, Tensor, Tensor] | None:
        distances = _distances(each, each.weights, per_query)
        if distances is None:
            return None
        attended = (each.weights[:1] > MASKED).to(each.weights)
        uniform = _distances(each, attended / attended.sum(-1, keepdim=True).clamp_min(1), per_query)
        assert uniform is not None
        return _facts(each), distances.double().sum(0), uniform.double().mean()

    result = []
    for parts, count in _by_layer(model, images, reduce):
        if any(part is None for part in parts):
            continue
        facts = parts[0][0]
        means = (sum(total for _, total, _ in parts) / count).tolist()
        result.append(LayerDistance(facts.name, sum(means) / len(means), tuple(means), float(parts[0][2]), count))
    if not result:
        raise ValueError(f"it is not known where in the image the tokens of {type(model).__name__} are")
    return result


def attention_jacobian(model: nn.Module, images: Tensor | Iterable[Any]) -> list[LayerJacobian]:
    """Measures how steep the softmax of every spatial attention is, against its entropy (CB, section 3.1, Figure 5).

    Args:
        model: any network with spatial attention.
        images: preprocessed images [B, C, H, W], or an iterable of such batches.

    Raises:
        ValueError: the network has no spatial attention.
    """

    def reduce(each: AttentionMap) -> tuple[AttentionMap, Tensor]:
        values = [_of_real_queries(each, measure(each.weights)) for measure in (jacobian_norm, row_entropy)]
        return _facts(each), torch.stack(values).cpu()

    result = []
    for parts, count in _by_layer(model, images, reduce):
        facts, values = parts[0][0], torch.cat([each for _, each in parts], 1)
        norm, entropy = values.double().mean(1).tolist()
        some = np.linspace(0, values.shape[1] - 1, min(POINTS, values.shape[1])).astype(int)
        norms, entropies = values[:, some].numpy()
        keys = facts.weights.shape[-1]
        result.append(LayerJacobian(facts.name, norm, entropy, norms, entropies, keys, facts.heads, count))
    return result


def _by_layer(
    model: nn.Module, images: Tensor | Iterable[Any], reduce: Callable[[AttentionMap], Any]
) -> list[tuple[list[Any], int]]:
    """Returns, for each attention, the results of `reduce` for all batches, and the number of images."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    layers: list[list[Any]] = []
    count = 0
    for batch, _ in image_batches(images, size=BATCH):
        found = attention_maps(model, batch.to(device), reduce=reduce)
        layers = layers or [[] for _ in found]
        if len(found) != len(layers):
            raise ValueError(
                f"{type(model).__name__} computes {len(layers)} spatial attentions for one batch of images and "
                f"{len(found)} for another: its layers cannot be averaged"
            )
        for layer, each in zip(layers, found, strict=True):
            layer.append(each)
        count += len(batch)
    if not count:
        raise ValueError("there are no images to measure attention on")
    return [(layer, count) for layer in layers]


def _facts(each: AttentionMap) -> AttentionMap:
    """Returns an attention map whose weights take no memory."""
    return AttentionMap(each.name, torch.empty_like(each.weights, device="meta"), each.queries, each.keys)


def _of_real_queries(each: AttentionMap, values: Tensor) -> Tensor:
    """Returns the values [..., queries] of queries that are in the image, without those that pad a window."""
    if not each.in_windows or each.queries.windows is None:
        return values.flatten()
    return values.transpose(1, 2)[:, :, (each.queries.windows >= 0).to(values.device)].flatten()


def _distances(each: AttentionMap, weights: Tensor, per_query: bool) -> Tensor | None:
    """Returns the relative distance of each image and head, [B, heads], or None if the places are not known."""
    queries, keys = each.queries.positions(), each.keys.positions()
    if queries is None or keys is None:
        return None
    if not each.in_windows:
        spatial = weights[:, :, each.queries.prefix :, each.keys.prefix :]
        return relative_distance(spatial, queries.to(weights), keys.to(weights), per_query=per_query)
    if each.queries.windows is None or each.keys.windows is None:
        return None
    # Positions of padding are arbitrary, because its weights are set to zero. The mean is over all pairs of the map.
    pair = (each.queries.windows >= 0)[:, :, None] & (each.keys.windows >= 0)[:, None, :]
    inside = weights * pair[:, None].to(weights)
    places = queries.to(weights)[each.queries.windows.clamp_min(0)], keys.to(weights)[each.keys.windows.clamp_min(0)]
    per_window = relative_distance(
        inside, places[0][:, None], places[1][:, None], per_query=True
    )  # [B, windows, heads]
    total = per_window.sum(1) * weights.shape[-2]
    if per_query:
        return total / len(queries)
    sizes = [tokens.pixels or tokens.grid for tokens in (each.queries, each.keys)]
    are_keys = sizes[0] == sizes[1]  # every query is at the place of a key, to which its distance is not counted
    return total / (len(queries) * len(keys) - (len(queries) if are_keys else 0))
