"""Similarity of the queries of consecutive layers, the assumption of MRLA-light (MRLA, Section 5.1 and Figure 2b).

MRLA-light replaces Q^t (K^s)^T by lambda^t Q^{t-1} (K^s)^T (Eq. 7). The two are equal if, within each head, the query
of a layer is proportional to the query of the layer before:

    similarity of layer t, head h = |cos(Q_h^t, Q_h^{t-1})|

A value of one means that they are. The first layer of a stage has no predecessor. MRLA-base and MLA do not assume it:
their similarities say whether MRLA-light could replace them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import evaluating
from ..mechanisms import LayerAttention
from .capture import Before, hooked
from .scores import attention_stages, stage_name


@dataclass(frozen=True)
class StageQueries:
    """Similarities of the queries of one stage of T layers.

    Args:
        name: name of the stage, made of the names of its first and last block.
        blocks: names of the T - 1 blocks after the first one.
        similarities: [B, heads, T - 1], the absolute cosine similarity of each layer's query and that of the layer
            before, by image and head.
        channels: the number of channels of a head's query.
    """

    name: str
    blocks: tuple[str, ...]
    similarities: Tensor
    channels: int

    @property
    def means(self) -> Tensor:
        """The mean over images and heads for each layer, [T - 1]."""
        return self.similarities.mean((0, 1))


def query_similarity(queries: Sequence[Tensor]) -> Tensor:
    """Returns the absolute cosine similarity of consecutive queries.

    Args:
        queries: the queries of T layers, [..., d] each.

    Returns:
        [..., T - 1]; zero where a query is zero.
    """
    if len(queries) < 2:
        raise ValueError(f"expected the queries of at least two layers, got {len(queries)}")
    pairs = zip(queries[1:], queries[:-1], strict=True)
    similarities = [nn.functional.cosine_similarity(query.double(), before.double(), dim=-1) for query, before in pairs]
    return torch.stack(similarities, dim=-1).abs().clamp(max=1.0).float()


def random_similarity(channels: int) -> float:
    """Returns the mean absolute cosine similarity of two random directions in ``channels`` dimensions."""
    return math.exp(math.lgamma(channels / 2) - math.lgamma((channels + 1) / 2)) / math.sqrt(math.pi)


@torch.no_grad()
def query_similarities(model: nn.Module, images: Tensor | Iterable[Tensor]) -> list[StageQueries]:
    """Runs `model` in eval mode and returns the similarities of the queries of consecutive layers, for each stage.

    The queries are those of the attention: projections of the average of each block's output, or of its normalized
    tokens in a transformer. Stages of a single layer are left out.

    Args:
        model: a model with layer attention attached.
        images: preprocessed images [B, C, H, W], or an iterable of such batches, which are moved to the device of the
            model.

    Raises:
        ValueError: the model has no layer attention, or no stage of at least two layers, or its layers have no queries.
    """
    stages = [layers for layers in attention_stages(model) if len(layers) > 1]
    if not stages:
        raise ValueError(f"no stage of {type(model).__name__} has two layers with layer attention to compare")
    for name, mechanism in (layer for layers in stages for layer in layers):
        if not hasattr(mechanism, "query"):
            raise ValueError(f"{name} has no queries: attention=False leaves them out")
    found: list[list[Tensor]] = [[] for _ in stages]
    channels: dict[int, int] = {}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    captured: dict[nn.Module, Tensor] = {}
    keep = keep_queries(captured)
    with evaluating(model), hooked(model, before={mechanism: keep for layers in stages for _, mechanism in layers}):
        for batch in [images] if isinstance(images, Tensor) else images:
            model(batch.to(device))
            for index, layers in enumerate(stages):
                queries = [captured[mechanism] for _, mechanism in layers]
                channels[index] = queries[0].shape[-1]
                found[index].append(query_similarity(queries).cpu())
    if not channels:
        raise ValueError("there are no images to compute queries for")
    result = []
    for index, layers in enumerate(stages):
        blocks = tuple(name for name, _ in layers)
        result.append(StageQueries(stage_name(blocks), blocks[1:], torch.cat(found[index]), channels[index]))
    return result


def keep_queries(captured: dict[nn.Module, Tensor]) -> Before:
    """Returns a hook that computes the queries of a layer from the arguments with which it is called."""

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, LayerAttention)
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        grid = given.get("token_grid")
        captured[module], _ = module.queries_and_keys(given["x"], end=given.get("end"), token_grid=grid)

    return keep
