"""What the explorer shows: pictures of what networks do with a photograph. `interlayer.pages.explorer` lays them out.

A network is built once and used by one caller at a time, because capturing what its modules compute adds hooks to it.
Nothing about a photograph is kept, so that several people can use an explorer without seeing each other's photographs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ..analysis import (
    AttentionMap,
    StageScores,
    attention_maps,
    class_activation,
    layer_scores,
    plot_layer_scores,
    query_attention,
)
from ..analysis.overlay import mark_box, overlay
from ..hosts import attached_mechanisms
from ..hosts.finding.feature_maps import FoundMaps
from ..mechanisms import LayerAttention
from ..models.build import split_name
from ..tasks import Classification
from ..training.data.images import open_rgb, unreadable
from .pretrained import PretrainedNetwork
from .shown_images import ShownImages, show_photograph
from .trained import LoadedNetwork

MOST_BYTES = 20 * 2**20  # of an image file
MOST_PIXELS = 50_000_000
MOST_NETWORKS = 8  # that were built by name; the one that was not used for the longest time is dropped
SCORED_CHANNELS = 64  # of Score-CAM: all of them would take minutes on a CPU
SHOWN_SIZE = 448  # pixels to which smaller pictures are enlarged, by a whole number


class ExplorerError(ValueError):
    """An error of a user of the explorer, in one sentence."""


@dataclass(frozen=True)
class Shown:
    """A picture and what it shows."""

    image: Image.Image
    caption: str


@dataclass(frozen=True)
class SpatialAttention:
    """A spatial attention of a network: its name and the number of heads."""

    name: str
    heads: int


class ExploredNetwork:
    """A network that is used by one caller at a time.

    Args:
        loaded: the network, its transform and its classes.
    """

    def __init__(self, loaded: LoadedNetwork) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        mechanisms = attached_mechanisms(loaded.network).values()
        self.has_layer_attention = any(isinstance(mechanism, LayerAttention) for mechanism in mechanisms)

    @property
    def title(self) -> str:
        return self._loaded.title

    @property
    def classes(self) -> list[str]:
        return self._loaded.classes

    @contextmanager
    def _using(self, photograph: Image.Image) -> Iterator[tuple[LoadedNetwork, ShownImages]]:
        with self._lock:
            yield self._loaded, show_photograph(self._loaded, photograph)

    def predictions(self, photograph: Image.Image, top: int = 5) -> list[tuple[str, float]]:
        """Returns the most likely classes and their probabilities; none if the network is no classifier."""
        with self._using(photograph) as (loaded, shown), torch.no_grad():
            if not isinstance(loaded.task, Classification):
                return []
            outputs = loaded.task.forward(loaded.network, shown.inputs, None)
            (found,) = loaded.task.predictions(outputs, top)
        return [(answer["class"], answer["probability"]) for answer in found["classes"]]

    def stages(self, photograph: Image.Image) -> list[str]:
        """Returns the name of the last block of each stage; none if the network has no stages."""
        with self._using(photograph) as (loaded, shown):
            try:
                return [stage[-1].name for stage in FoundMaps(loaded.network, shown.inputs).stages]
            except ValueError:  # the grid of its tokens is not known
                return []

    def class_activation(
        self,
        photograph: Image.Image,
        method: str,
        *,
        target: str | None = None,
        stage: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Shown:
        """Returns where the network sees a class.

        Args:
            method: a method of `interlayer.class_activation`.
            target: the name of the class; the predicted one if None.
            stage: the number of a stage, from 1; the default layer of `interlayer.class_activation` if None.
            progress: a function that is called with the number of images that have been run, and of those to run.
        """
        channels = SCORED_CHANNELS if method == "score_cam" else None
        with self._using(photograph) as (loaded, shown):
            if loaded.task.annotations not in ("labels", "label_maps"):
                raise ExplorerError(f"the network {self.title} is a detector: choose a classifier or a segmenter")
            found = class_activation(
                loaded.network,
                shown.inputs,
                method=method,
                targets=None if target is None else self._label(target),
                layer=stage,
                channels=channels,
                progress=progress,
            )
        name = self.classes[found.targets[0]]
        used = f", {channels} channels" if channels else ""
        zero = "" if found.maps.any() else ", zero everywhere: nothing in the photograph speaks for the class"
        caption = f"{name}, {found.probabilities[0]:.1%}; map of {found.layer}{used}{zero}"
        return Shown(overlay(enlarged(shown.pictures[0]), found.maps[0]), caption)

    def _label(self, name: str) -> int:
        try:
            return self.classes.index(name)
        except ValueError:
            raise ExplorerError(f"the network {self.title} has no class {name!r}: choose one of its classes") from None

    def layer_scores(self, photograph: Image.Image) -> list[StageScores]:
        """Returns the scores between the layers of each stage; none if the network has no layer attention."""
        if not self.has_layer_attention:
            return []
        with self._using(photograph) as (loaded, shown):
            return layer_scores(loaded.task.backbone(loaded.network), shown.inputs)

    def layer_attention(self, photograph: Image.Image, *, stage: int = 0, head: int | None = None) -> Shown:
        """Returns a heatmap of which layer of a stage reads which.

        Args:
            stage: the number of the stage, from 0.
            head: the number of a head, from 0; the mean over all heads if None.
        """
        stages = self.layer_scores(photograph)
        if not stages:
            raise ExplorerError(
                f"the network {self.title} has no layer attention: choose a network with a mechanism, NAME+mrla_base"
            )
        chosen = stages[min(stage, len(stages) - 1)]
        caption = f"{chosen.name}, " + ("mean over heads" if head is None else f"head {head}")
        return Shown(as_picture(plot_layer_scores([chosen], head=head, title="")), caption)

    def attentions(self, photograph: Image.Image) -> list[SpatialAttention]:
        """Returns the spatial attentions of the network of which it is known where in the image their tokens are."""
        return [attention for attention in self._attentions(photograph) if attention is not None]

    def _attentions(self, photograph: Image.Image) -> list[SpatialAttention | None]:
        """Returns the spatial attentions of the network, with None for those whose tokens are at unknown places."""
        with self._using(photograph) as (loaded, shown):
            try:
                return attention_maps(loaded.network, shown.inputs, reduce=_described)
            except ValueError:  # the network has no spatial attention
                return []

    def spatial_attention(
        self,
        photograph: Image.Image,
        *,
        layer: str | None = None,
        head: int | None = None,
        place: tuple[float, float] = (0.5, 0.5),
    ) -> Shown:
        """Returns what the query at a place of the image attends to.

        Args:
            layer: the name of an attention; the last one if None.
            head: the number of a head, from 0; the mean over all heads if None.
            place: the place of the query, as fractions of the width from the left and of the height from the top.
        """
        every = self._attentions(photograph)
        attentions = [attention for attention in every if attention is not None]
        if not attentions:
            reason = "has no spatial attention" if not every else "has spatial attention at places that are not known"
            raise ExplorerError(f"the network {self.title} {reason}: choose a transformer, vit_tiny_patch16_224")
        chosen = next((each for each in attentions if each.name == layer), attentions[-1])
        with self._using(photograph) as (loaded, shown):
            found = query_attention(loaded.network, shown.inputs, layer=chosen.name, at=place)
        head = head if head is None else min(head, chosen.heads - 1)
        weights = found.maps[0].mean(0) if head is None else found.maps[0, head]
        low, high = float(weights.min()), float(weights.max())
        heatmap = (weights - low) / max(high - low, 1e-12)
        image = mark_box(overlay(enlarged(shown.pictures[0]), heatmap), found.box)
        heads = "mean over heads" if head is None else f"head {head}"
        return Shown(image, f"{chosen.name}, {heads}; weights from {low:.4f} to {high:.4f}")


def _described(attention: AttentionMap) -> SpatialAttention | None:
    if attention.queries.grid is None or attention.keys.grid is None:
        return None
    return SpatialAttention(attention.name, attention.heads)


class Explorer:
    """The networks of an explorer, by name.

    Args:
        networks: functions that load networks, by the names under which they are offered.
        device: the device of networks that are built by name; a GPU if available, if None.
    """

    def __init__(
        self, networks: Mapping[str, Callable[[], LoadedNetwork]], *, device: torch.device | None = None
    ) -> None:
        self.device = device
        self._loaders = dict(networks)
        self._opened: dict[str, ExploredNetwork] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """The networks that are offered. Others can be named as NAME or NAME+MECHANISM."""
        return list(self._loaders)

    def open(self, name: str) -> ExploredNetwork:
        """Returns a network that is offered, or builds one of timm with mechanisms and random weights.

        Folders and repositories are not opened by name: only who starts the explorer may offer them.
        """
        with self._lock:
            found = self._opened.pop(name, None) or self._load(name)
            self._opened[name] = found  # last: the first is the one that was not used for the longest time
            built = [each for each in self._opened if each not in self._loaders]
            for each in built[: max(0, len(built) - MOST_NETWORKS)]:
                del self._opened[each]
        return found

    def _load(self, name: str) -> ExploredNetwork:
        if name in self._loaders:
            return ExploredNetwork(self._loaders[name]())
        if ":" in split_name(name)[0] or "/" in name:
            raise ExplorerError(f"the network {name} is not offered here: choose one of the list, or NAME+MECHANISM")
        try:
            return ExploredNetwork(PretrainedNetwork(name, device=self.device, untrained=True))
        except (ValueError, TypeError) as error:
            raise ExplorerError(" ".join(str(error).split())) from error


def read_photograph(path: str | Path) -> Image.Image:
    """Reads an image file of a user.

    Raises:
        ExplorerError: it is too large, or no image.
    """
    path = Path(path)
    if path.stat().st_size > MOST_BYTES:
        raise ExplorerError(f"the file has more than {MOST_BYTES // 2**20} MB: take a smaller photograph")
    try:
        with Image.open(path) as image:
            width, height = image.size
        if width * height <= MOST_PIXELS:
            return open_rgb(path)
    except Image.DecompressionBombError:
        pass
    except Exception as error:  # Pillow raises exceptions of many types for files that are not images
        raise ExplorerError(f"the file cannot be used: {unreadable(error)}; choose a photograph") from error
    raise ExplorerError(f"the image has more than {MOST_PIXELS // 10**6} million pixels: take a smaller photograph")


def enlarged(picture: Tensor) -> Tensor:
    """Returns a small picture as bytes [3, H, W], enlarged by a whole number."""
    factor = max(1, SHOWN_SIZE // max(picture.shape[1:]))
    return picture.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def as_picture(figure: Figure, dots_per_inch: int = 120) -> Image.Image:
    """Returns a matplotlib figure as an image."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dots_per_inch, format="png")
    return Image.open(buffer).convert("RGB")
