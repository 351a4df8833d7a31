"""Similarity of the heads of EMSA: before they are mixed, after it, and after the instance norm (ResT, Figure 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import evaluating
from ..mechanisms import EfficientAttention
from .attention_measures import head_similarity
from .batches import image_batches
from .capture import hooked

BATCH = 16  # number of images that are run at a time, if they are one tensor


@dataclass(frozen=True)
class HeadSimilarity:
    """Cosine similarities between the maps of the heads of one attention, [heads, heads] each, averaged over images.

    Args:
        name: name of the module.
        scores: of q kᵀ / sqrt(d), before the 1x1 convolution over the heads.
        mixed: of the scores after that convolution, before the softmax.
        normalized: of the maps after softmax and instance norm, with which values are multiplied.
        images: number of images.
    """

    name: str
    scores: Tensor
    mixed: Tensor
    normalized: Tensor
    images: int

    @staticmethod
    def mean(similarity: Tensor) -> float:
        """Returns the mean similarity of two different heads; the lower, the more diverse the heads are."""
        heads = len(similarity)
        return float((similarity.sum() - similarity.diagonal().sum()) / (heads * (heads - 1)))


@torch.no_grad()
def emsa_heads(model: nn.Module, images: Tensor | Iterable[Any]) -> list[HeadSimilarity]:
    """Measures how similar the heads of every EMSA are (ResT, appendix A.2, Figure 1).

    The three maps are those of the paper: QKᵀ / sqrt(d), Conv(QKᵀ / sqrt(d)) and IN(Softmax(Conv(QKᵀ / sqrt(d)))). See
    `interlayer.ops.mixed_attention_maps`, which also returns the weights between softmax and norm.

    Args:
        model: a ResT, or a detector or segmenter on one.
        images: preprocessed images [B, C, H, W], or an iterable of such batches.

    Raises:
        ValueError: the network has no EMSA of several heads.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, EfficientAttention) and module.mix is not None
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no EMSA of several heads, as ResT has")
    device = next(model.parameters()).device
    names = {module: name for name, module in layers.items()}
    projected: dict[nn.Module, Tensor] = {}
    sums: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        projected[module] = output

    def measure(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        maps = module.maps(projected.pop(module.q), projected.pop(module.kv))
        shown = torch.stack([head_similarity(each.double()) for each in (maps.scores, maps.mixed, maps.normalized)])
        sums[names[module]] = sums.get(names[module], 0) + shown.cpu() * len(output)

    inputs = {part: keep for module in layers.values() for part in (module.q, module.kv)}
    count = 0
    with evaluating(model), hooked(model, after=inputs | dict.fromkeys(layers.values(), measure)):
        for batch, _ in image_batches(images, size=BATCH):
            model(batch.to(device))
            count += len(batch)
    if not count:
        raise ValueError("there are no images to measure attention on")
    means = {name: (sums[name] / count).unbind() for name in layers if name in sums}
    return [HeadSimilarity(name, each[0], each[1], each[2], count) for name, each in means.items()]
