"""Attention scores between the layers of a stage, as a matrix (MRLA, Figure 1a)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import attached_blocks, attached_mechanisms, evaluating
from ..mechanisms import LayerAttention, MRLALight
from .capture import After, hooked


@dataclass(frozen=True)
class StageScores:
    """Scores of one stage of T layers.

    Args:
        name: name of the stage, made of the names of its first and last block.
        blocks: names of the T blocks.
        scores: [B, heads, T, T]; entry (t, s) is the weight of layer s in the output of layer t, zero for s > t.
        magnitudes: [B, heads, T, T]; the mean absolute weight over the channels of a head, where `scores` is the mean.
            They differ if the channels of a head have weights of both signs, as lambda has in MRLA-light. Default: the
            absolute values of `scores`.
        reads: [T, T]; whether layer t reads layer s, even if with a weight of zero. Default: every layer before it and
            itself.
    """

    name: str
    blocks: tuple[str, ...]
    scores: Tensor
    magnitudes: Tensor | None = None
    reads: Tensor | None = None

    def parts(self, head: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns the means of the positive and of the negative weights over images, heads and channels, [T, T] each.

        With w+ = max(w, 0) and w- = max(-w, 0), these are mean(w+) and mean(w-). Their difference is the mean weight,
        their sum the mean absolute weight, so weights of both signs do not cancel.

        Args:
            head: index of a head; all heads if None.
        """
        magnitudes = self.scores.abs() if self.magnitudes is None else self.magnitudes
        positive, negative = (magnitudes + self.scores).mean(0) / 2, (magnitudes - self.scores).mean(0) / 2
        return (positive.mean(0), negative.mean(0)) if head is None else (positive[head], negative[head])


@contextmanager
def capture_scores(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects the scores of every attached layer attention during forward passes inside the `with` block.

    Yields a dict that maps the name of each mechanism to the scores of its last call, [B, heads, t].
    """
    captured: dict[str, Tensor] = {}

    def keep_as(name: str) -> After:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            captured[name] = output.detach()

        return keep

    attentions = {name: m for name, m in attached_mechanisms(model).items() if isinstance(m, LayerAttention)}
    with hooked(model, after={attention.scores: keep_as(name) for name, attention in attentions.items()}):
        yield captured


@torch.no_grad()
def layer_scores(model: nn.Module, images: Tensor) -> list[StageScores]:
    """Runs `model` on `images` in eval mode and returns the scores between the layers of each stage.

    For MRLABase, MLA and MRLALinear, entry (t, s) is the attention weight, and rows sum to one. For MRLALight, it is
    the weight of V_s in O_t by the second equality of Eq. 8, lambda_t ... lambda_{s+1} times the gate of layer s,
    averaged over the channels of a head (norms between the layers of a transformer are ignored). In the published
    reading of MRLALight, (t, t) is the gate and (t, t - 1) the mean lambda on the shortcut of the block.

    Args:
        model: a model with layer attention attached.
        images: preprocessed images, [B, C, H, W].
    """
    stages = attention_stages(model)
    names = {id(mechanism): name for name, mechanism in attached_mechanisms(model).items()}
    with evaluating(model), capture_scores(model) as captured:
        model(images)
    result = []
    for layers in stages:
        blocks = tuple(name for name, _ in layers)
        mechanisms = [mechanism for _, mechanism in layers]
        absent = [name for name, mechanism in layers if names[id(mechanism)] not in captured]
        if absent:
            raise ValueError(
                f"{absent[0]} gives no scores: attention=False has none, constant_memory=True does not keep them"
            )
        rows = [captured[names[id(mechanism)]].float() for mechanism in mechanisms]
        light = isinstance(mechanisms[0], MRLALight)
        scores, magnitudes = _light_matrices(rows, mechanisms) if light else (_matrix(rows, mechanisms), None)
        result.append(StageScores(stage_name(blocks), blocks, scores, magnitudes, _reads(mechanisms)))
    return result


def attention_stages(model: nn.Module) -> list[list[tuple[str, LayerAttention]]]:
    """Returns the layers of each stage with layer attention, as names of blocks and their attention."""
    stages: dict[int, list[tuple[str, LayerAttention]]] = {}
    for name, block in attached_blocks(model):
        for entry in block.interlayer_entries:
            mechanism = entry.shared or getattr(block, entry.key)
            if isinstance(mechanism, LayerAttention):
                stages.setdefault(entry.place.stage, []).append((name, mechanism))
    if not stages:
        raise ValueError(
            f"{type(model).__name__} has no layer attention attached: choose a network with it, such as "
            f"NAME+mrla_base, or see interlayer.attach"
        )
    return [layers for _, layers in sorted(stages.items())]


def _reads(mechanisms: list[LayerAttention]) -> Tensor:
    """Returns which layer reads which, [T, T]."""
    reads = torch.eye(len(mechanisms), dtype=torch.bool)
    for t, last in enumerate(mechanisms):
        for s in range(t - 1, -1, -1):
            # MRLA-light reads through the layers between; the others keep all earlier layers
            reader = mechanisms[s + 1] if isinstance(last, MRLALight) else last
            if not reader.cross_layer or not getattr(reader, "memory", True):
                break
            reads[t, s] = True
            if getattr(reader, "reads_shortcut", False):
                break
    return reads


def _matrix(rows: list[Tensor], mechanisms: list[LayerAttention]) -> Tensor:
    padded = []
    for layer, (row, mechanism) in enumerate(zip(rows, mechanisms, strict=True)):
        first = 0 if mechanism.cross_layer else layer  # a layer that attends to itself alone has one weight
        padded.append(nn.functional.pad(row, (first, len(rows) - first - row.shape[-1])))
    return torch.stack(padded, dim=-2)


def _light_matrices(rows: list[Tensor], mechanisms: list[LayerAttention]) -> tuple[Tensor, Tensor]:
    """Returns the mean weights and the mean absolute weights over the channels of each head."""
    gates = [row[..., 0] for row in rows]  # [B, heads] each, positive
    batch, heads = gates[0].shape
    means = gates[0].new_zeros(batch, heads, len(gates), len(gates))
    magnitudes, reads = torch.zeros_like(means), _reads(mechanisms)
    for t, gate in enumerate(gates):
        means[:, :, t, t] = magnitudes[:, :, t, t] = gate
        carried = torch.ones(mechanisms[t].channels, device=gate.device)
        for s in range(t - 1, -1, -1):
            reader = mechanisms[s + 1]
            assert isinstance(reader, MRLALight)
            if not reads[t, s]:
                break
            if reader.decay is not None:
                carried = carried * reader.decay.float()
            by_head = carried.unflatten(0, (heads, -1))
            factor = 1 if reader.reads_shortcut else gates[s]
            means[:, :, t, s] = by_head.mean(-1) * factor
            magnitudes[:, :, t, s] = by_head.abs().mean(-1) * factor
    return means, magnitudes


def stage_name(blocks: tuple[str, ...]) -> str:
    """Returns the name of a stage: the names of its first and last block."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
