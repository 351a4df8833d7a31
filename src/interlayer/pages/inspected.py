"""The figures of an inspection: what is measured of each network, and how it is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from ..analysis import (
    ActivationColumn,
    AttentionRow,
    attention_distance,
    attention_entropy,
    attention_jacobian,
    broadcast_scales,
    class_activation,
    contribution,
    emsa_heads,
    layer_scores,
    plot_attention_distance,
    plot_attention_entropy,
    plot_attention_jacobian,
    plot_broadcast_scales,
    plot_class_activation,
    plot_emsa_heads,
    plot_layer_scores,
    plot_query_attention,
    plot_query_similarity,
    plot_score_sharing,
    query_attention,
    query_similarities,
    score_sharing,
)
from ..analysis.class_activation import METHODS
from ..experiments import LoadedNetwork, ShownImages
from .figures import contribution_figure
from .rendering import colour

BATCH = 16  # number of images that are measured at a time
PICTURES = 4  # number of images that are shown with class activation maps
LETTERS = 14  # of a title in an inch
CAM_METHODS = ("grad_cam", "group_cam")


@dataclass(frozen=True)
class Subject:
    """A network and the images that it is looked at with."""

    loaded: LoadedNetwork
    images: ShownImages

    @property
    def batches(self) -> tuple[torch.Tensor, ...]:
        return self.images.inputs.split(BATCH)

    @property
    def backbone(self) -> torch.nn.Module:
        return self.loaded.task.backbone(self.loaded.network)


Measured = Mapping[str, Any]  # what was measured of each network, by its name


@dataclass(frozen=True)
class InspectedFigure:
    """A figure.

    Args:
        name: its key in `READINGS`.
        measure: measures a network. A ValueError says why the figure does not apply to it.
        plot: draws what was measured of all networks, in one figure or several.
    """

    name: str
    measure: Callable[[Subject], Any]
    plot: Callable[[Measured], Sequence[Figure]]


def _measure_activation(subject: Subject) -> Any:
    if subject.loaded.task.annotations not in ("labels", "label_maps"):
        raise ValueError("class activation needs a classifier or a segmenter")
    columns = []
    for method in CAM_METHODS:
        try:
            found = class_activation(subject.loaded.network, subject.images.inputs[:PICTURES], method=method)
        except ImportError:  # pytorch-grad-cam is not installed
            continue
        columns.append((METHODS[method].title, subject, found))
    return columns


def _plot_activation(networks: Measured) -> list[Figure]:
    columns = [
        ActivationColumn(
            title if len(networks) == 1 else f"{name}\n{title}",
            subject.images.pictures[:PICTURES],
            found,
            subject.loaded.classes,
        )
        for name, measured in networks.items()
        for title, subject, found in measured
    ]
    return [plot_class_activation(columns, title="")]


def _measure_contribution(subject: Subject) -> Any:
    labels = subject.images.labels
    return contribution(subject.loaded.network, subject.images.inputs, labels)


def _plot_contribution(networks: Measured) -> list[Figure]:
    figures = []
    for index, (name, record) in enumerate(networks.items()):
        figure = contribution_figure(record, colour(index))
        letters = int(LETTERS * figure.get_figwidth())
        figure.suptitle(textwrap.fill(f"{name}: {record.change}", letters), fontsize=9)
        figures.append(figure)
    return figures


def _measure_attention(subject: Subject) -> AttentionRow:
    image = subject.images.inputs[:1]
    found = query_attention(subject.loaded.network, image, forward=subject.loaded.task.forward)
    return AttentionRow("", subject.images.pictures[0], found)


def _plot_attention(networks: Measured) -> list[Figure]:
    rows = [AttentionRow(name, row.picture, row.attention) for name, row in networks.items()]
    return [plot_query_attention(rows, title="")]


def _of_attention(measure: Callable[..., Any], subject: Subject) -> Any:
    return measure(subject.loaded.network, subject.batches)


def _plot_scores(networks: Measured) -> list[Figure]:
    return [plot_layer_scores(stages, title=name) for name, stages in networks.items()]


def _one(plot: Callable[..., Figure], networks: Measured) -> list[Figure]:
    return [plot(networks, title="")]


def _of_layers(subject: Subject) -> Any:
    return layer_scores(subject.backbone, subject.images.inputs)


FIGURES = (
    InspectedFigure("class_activation", _measure_activation, _plot_activation),
    InspectedFigure("contribution", _measure_contribution, _plot_contribution),
    InspectedFigure("layer_scores", _of_layers, _plot_scores),
    InspectedFigure(
        "queries", lambda s: query_similarities(s.backbone, s.batches), partial(_one, plot_query_similarity)
    ),
    InspectedFigure("sharing", lambda s: score_sharing(_of_layers(s)), partial(_one, plot_score_sharing)),
    InspectedFigure("attention", _measure_attention, _plot_attention),
    InspectedFigure("entropy", partial(_of_attention, attention_entropy), partial(_one, plot_attention_entropy)),
    InspectedFigure("distance", partial(_of_attention, attention_distance), partial(_one, plot_attention_distance)),
    InspectedFigure("jacobian", partial(_of_attention, attention_jacobian), partial(_one, plot_attention_jacobian)),
    InspectedFigure(
        "broadcast_scales", lambda s: broadcast_scales(s.loaded.network), partial(_one, plot_broadcast_scales)
    ),
    InspectedFigure(
        "emsa_heads", lambda s: emsa_heads(s.loaded.network, s.batches)[-1], partial(_one, plot_emsa_heads)
    ),
)
