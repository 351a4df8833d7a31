"""Where neighboring layers attend alike: divergence between the scores of a layer and of the layer before.

Let p_t be the scores of layer t over the layers that both t and t - 1 read, s <= t - 1, renormalized to sum to one:

    divergence of layer t = KL(p_t || p_{t-1}) = sum over s of p_t(s) log(p_t(s) / p_{t-1}(s))

in nats, averaged over images and heads. Zero means that layer t could use the scores of the layer before for what both
read. Only layers from the third of a stage on have at least two layers in common with the layer before.

For MRLA-light, p_t is the distribution of the magnitudes of the weights in the second equality of Eq. 8, because lambda
has both signs: |lambda_t ... lambda_{s+1}| times the gate of layer s, averaged over the channels of a head. A channel
of MRLA-light shares these proportions by construction, because it multiplies all that it reads by one lambda; only the
channels of a head can differ, so its divergences are small. In the published reading, a layer reads itself and the
layer before, so that consecutive layers have one layer in common and nothing can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scores import StageScores

SMALLEST = 1e-8  # a probability below this counts as this: float32 scores of zero would give an infinite divergence


@dataclass(frozen=True)
class StageSharing:
    """Divergences of one stage.

    Args:
        name: name of the stage.
        blocks: names of the blocks that can be compared with the block before.
        divergences: KL(p_t || p_{t-1}) of each block in nats, the mean over images and heads.
    """

    name: str
    blocks: tuple[str, ...]
    divergences: tuple[float, ...]

    def shared(self, threshold: float) -> list[str]:
        """Returns the names of the blocks with a divergence of at most ``threshold``, the smallest first."""
        ordered = sorted(zip(self.divergences, self.blocks, strict=True))
        return [block for divergence, block in ordered if divergence <= threshold]


def score_divergence(scores: Tensor, reads: Tensor | None = None) -> Tensor:
    """Returns KL(p_t || p_{t-1}) for every layer of a stage, averaged over images and heads.

    Args:
        scores: [B, heads, T, T], not negative; row t contains the weights of the layers s <= t.
        reads: [T, T]; whether layer t reads layer s. A weight of zero that is read is a small one, one that is not read
            is left out. Default: every layer reads all layers before it.

    Returns:
        [T] in nats; NaN for a layer that has fewer than two layers in common with the layer before.
    """
    layers = scores.shape[-1]
    reads = torch.ones(layers, layers).tril() > 0 if reads is None else reads
    result = torch.full((layers,), math.nan, dtype=torch.float64)
    for t in range(2, layers):
        rows = scores[:, :, t - 1 : t + 1, :t].double()  # the layers before t, as read by t - 1 and by t
        common = reads[t - 1 : t + 1, :t].all(0)
        if int(common.sum()) < 2:
            continue
        before, own = _distribution(rows[:, :, 0, common]), _distribution(rows[:, :, 1, common])
        result[t] = (own * (own / before).log()).sum(-1).mean()
    return result


def _distribution(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)  # zero if only the layer itself has a weight
    return (weights / total).where(total > 0, 1 / weights.shape[-1]).clamp(min=SMALLEST)


def score_sharing(stages: Sequence[StageScores]) -> list[StageSharing]:
    """Returns how much the scores of each layer differ from those of the layer before.

    Stages in which no layer can be compared are left out.

    Args:
        stages: the result of `interlayer.layer_scores`.

    Raises:
        ValueError: no layer can be compared.
    """
    result = []
    for stage in stages:
        magnitudes = stage.scores.abs() if stage.magnitudes is None else stage.magnitudes
        found = [
            (block, float(divergence))
            for block, divergence in zip(stage.blocks, score_divergence(magnitudes, stage.reads), strict=True)
            if not math.isnan(divergence)
        ]
        if found:
            blocks, divergences = zip(*found, strict=True)
            result.append(StageSharing(stage.name, blocks, divergences))
    if not result:
        raise ValueError(
            "no layer has two layers in common with the layer before: that needs a stage of at least three layers that "
            "read all layers before them (MRLA-light only in the paper's reading)"
        )
    return result
