"""Class activation maps: where in an image a network sees a class.

Every method reads the map A [C, h, w] of a layer and, most of them, the gradient of the class score with respect to it.
The layer and the conversion of tokens to maps follow from the structure of the network (`class_activation_layers.py`).

Methods of pytorch-grad-cam (the extra ``cam``) get these two arrays and return a map; the network is run here, so that
nothing of it is changed. Score-CAM and Group-CAM run the network on masked images: `score_cam.py` and `group_cam.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..hosts import evaluating
from ..hosts.finding.feature_maps import FeatureMap
from .capture import capture, eagerly
from .class_activation_layers import choose_layer
from .class_targets import ClassTarget, choose_targets, logits_of
from .group_cam import GROUPS, group_cam
from .score_cam import score_cam

BATCH = 16  # number of images that run at a time

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CAMMethod:
    """A method.

    Args:
        title: its usual name.
        gradients: whether it needs the gradient of the class score.
        package_class: the class of pytorch-grad-cam that computes it; None if it is computed here.
        eigenvector: whether its map is the projection onto a principal component, whose sign is arbitrary.
    """

    title: str
    gradients: bool = True
    package_class: str | None = None
    eigenvector: bool = False


METHODS = {
    "grad_cam": CAMMethod("Grad-CAM", package_class="GradCAM"),
    "grad_cam_plusplus": CAMMethod("Grad-CAM++", package_class="GradCAMPlusPlus"),
    "xgrad_cam": CAMMethod("XGrad-CAM", package_class="XGradCAM"),
    "hires_cam": CAMMethod("HiResCAM", package_class="HiResCAM"),
    "layer_cam": CAMMethod("LayerCAM", package_class="LayerCAM"),
    "eigen_cam": CAMMethod("Eigen-CAM", gradients=False, package_class="EigenCAM", eigenvector=True),
    "eigen_grad_cam": CAMMethod("Eigen-Grad-CAM", package_class="EigenGradCAM", eigenvector=True),
    "score_cam": CAMMethod("Score-CAM", gradients=False),
    "group_cam": CAMMethod("Group-CAM"),
}


@dataclass(frozen=True)
class ClassActivation:
    """Class activation maps of a batch of images.

    Args:
        maps: [B, H, W] from 0 to 1, at the size of the images. It is zero everywhere if nothing speaks for the class.
        method: the method.
        layer: the name of the module whose output they are of.
        resolution: height and width of the map of that layer.
        targets: the class of each image.
        probabilities: the probability of that class; for a segmenter, its mean over the pixels predicted as the class.
    """

    maps: Tensor
    method: str
    layer: str
    resolution: tuple[int, int]
    targets: list[int]
    probabilities: list[float]


def class_activation(
    model: nn.Module,
    images: Tensor,
    *,
    method: str = "grad_cam",
    targets: int | Sequence[int] | Tensor | None = None,
    layer: int | str | None = None,
    groups: int | None = None,
    channels: int | None = None,
    batch_size: int = BATCH,
    progress: Progress | None = None,
) -> ClassActivation:
    """Computes where in images a network sees a class, as heatmaps.

    The model can be any classifier: of timm or transformers, with mechanisms attached or not; or a segmenter, where the
    score of a class is the sum of its logits over the pixels that are predicted as the class. It runs in eval mode, and
    eagerly if it is compiled, and is left as it was: its modes, hooks, parameters and their gradients.

    Args:
        model: the network, which returns logits [B, classes], or [B, classes, H, W].
        images: preprocessed images, [B, C, H, W]. They are moved to the device of the model.
        method: "grad_cam", "grad_cam_plusplus", "xgrad_cam", "hires_cam", "layer_cam", "eigen_cam", "eigen_grad_cam",
            which need `pip install "interlayer[cam]"`, "score_cam" (as in MRLA's Figure 6) or "group_cam" (as in ResT's
            Figure 2). The map of "eigen_cam" does not depend on the class.
        targets: the class to explain, or one for each image; the predicted ones if None.
        layer: the layer whose map is used. By default the last map before the pooling: the end of the last stage, after
            an attached mechanism, or a last convolution or norm that follows it; in a transformer with a class token
            the norm before the last attention, because patch tokens after it do not reach the class. A number or
            "stage3" is the end of that stage, counted from 1 or backwards from -1: stages differ in resolution, and a
            network of one resolution has three. Otherwise the name of a module.
        groups: number of groups of "group_cam", 32 by default.
        channels: number of channels that "score_cam" uses, those with the largest variance; all by default. It needs
            one forward pass for each channel.
        batch_size: number of images, whole or masked, that run at a time.
        progress: a function that is called with the number of images that have been run, and of those to run.

    Returns:
        The ``maps`` [B, H, W] from 0 to 1 at the size of the images, the ``layer`` that they are of, the ``targets``
        and their ``probabilities``.

    Raises:
        ValueError: the method, layer or a target does not exist, or the model is no classifier or segmenter.
        ImportError: the method needs pytorch-grad-cam, which is not installed.

    >>> found = interlayer.class_activation(model, images, method="group_cam", layer="stage3")
    >>> found.maps.shape, found.layer
    """
    _check(images, method, groups, channels, batch_size)
    computed_by = _package_class(method)
    network: nn.Module = getattr(model, "_orig_mod", model)  # names of modules without those of torch.compile's wrapper
    reference = next((p for p in network.parameters() if p.is_floating_point()), images)
    with _undisturbed(network):
        images = images.detach().to(reference, copy=True)  # a normal tensor, also if it was made in inference mode
        logits = torch.cat([_run(network, batch) for batch in images.split(batch_size)])
        chosen = choose_targets(logits, targets)
        place = choose_layer(network, images[:1], lambda image: chosen[0].score(_run(network, image)).sum(), layer)
        cams = _Cams(network, place, method, computed_by, groups or GROUPS, channels, batch_size, progress)
        maps = cams.compute(images, chosen)
    return ClassActivation(
        maps=_scaled(maps),
        method=method,
        layer=place.name,
        resolution=place.resolution,
        targets=[target.label for target in chosen],
        probabilities=[
            float(target.probability(each[None])) for target, each in zip(chosen, logits, strict=True)
        ],
    )  # fmt: skip


class _Cams:
    """Runs a network for one method and counts the images that it runs."""

    def __init__(
        self,
        network: nn.Module,
        place: FeatureMap,
        method: str,
        computed_by: Any,
        groups: int,
        channels: int | None,
        batch_size: int,
        progress: Progress | None,
    ) -> None:
        self.network, self.place, self.method = network, place, method
        self.computed_by, self.groups, self.channels = computed_by, groups, channels
        self.batch_size, self.progress = batch_size, progress
        self.done = self.total = 0

    def compute(self, images: Tensor, targets: list[ClassTarget]) -> Tensor:
        """Returns the maps before they are scaled, [B, H, W]."""
        maps: list[Tensor] = []
        for start in range(0, len(images), self.batch_size):
            batch, of_batch = images[start : start + self.batch_size], targets[start : start + self.batch_size]
            activations, gradients = self._values(batch, of_batch)
            if not start:
                self.total = len(images) * (1 + self._masked(activations.shape[1]))
            self._advance(len(batch))
            if self.computed_by is not None:
                found = self._by_package(batch, activations, gradients)
            else:
                found = torch.stack([
                    self._by_masks(image, target, activations[index], None if gradients is None else gradients[index])
                    for index, (image, target) in enumerate(zip(batch, of_batch, strict=True))
                ])  # fmt: skip
            maps.append(_enlarged(found, images.shape[-2:]).cpu())
        return torch.cat(maps)

    def _masked(self, channels: int) -> int:
        """Returns how many masked versions of an image are run."""
        if self.method == "score_cam":
            return min(self.channels or channels, channels)
        return min(self.groups, channels) + 1 if self.method == "group_cam" else 0

    def _advance(self, images: int) -> None:
        self.done += images
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _values(self, images: Tensor, targets: list[ClassTarget]) -> tuple[Tensor, Tensor | None]:
        """Returns the maps of the layer and the gradients of the class scores with respect to them, [B, C, h, w]."""
        name, needs_gradients = self.place.name, METHODS[self.method].gradients
        with capture(self.network, [name], detach=not needs_gradients) as captured:
            if not needs_gradients:
                _run(self.network, images)
                return self.place.of(captured[name][0]).float(), None
            with torch.enable_grad():
                logits = _run(self.network, images.requires_grad_().clone())
                scores = [target.score(each[None]) for target, each in zip(targets, logits, strict=True)]
                value = captured[name][0]
                output: Tensor = value[0] if isinstance(value, (tuple, list)) else value
                reached = output.requires_grad
                (gradient,) = (
                    torch.autograd.grad(torch.cat(scores).sum(), output, allow_unused=True) if reached else (None,)
                )
        images.requires_grad_(False)
        if gradient is None or (gradient.any() and not self.place.of(gradient).any()):
            raise ValueError(
                f"the map of {name} does not reach the score of the class, so that its gradient is zero: leave out "
                f"layer= or name an earlier layer"
            )
        return self.place.of(output.detach()).float(), self.place.of(gradient).float()

    def _by_package(self, images: Tensor, activations: Tensor, gradients: Tensor | None) -> Tensor:
        """Returns the maps by a class of pytorch-grad-cam, [B, h, w]. It gets no layer and so adds no hooks."""
        arrays = [None if each is None else each.cpu().numpy() for each in (activations, gradients)]
        maps = self.computed_by(self.network, []).get_cam_image(images, None, None, *arrays, False)
        maps = torch.as_tensor(maps, dtype=torch.float32)
        if METHODS[self.method].eigenvector:
            maps = maps * _sign(maps, None if gradients is None else (activations * gradients).sum(1).cpu())
        return maps.relu()

    def _by_masks(self, image: Tensor, target: ClassTarget, activations: Tensor, gradients: Tensor | None) -> Tensor:
        """Returns the map of one image by runs of the network on masked images, [h, w] or [H, W]."""
        options: Any = {"batch_size": self.batch_size, "advance": self._advance}
        if gradients is None:
            score = lambda masked: target.score(_run(self.network, masked))  # noqa: E731
            return score_cam(activations, image, score, channels=self.channels, **options)
        probability = lambda masked: target.probability(_run(self.network, masked))  # noqa: E731
        return group_cam(activations, gradients, image, probability, groups=self.groups, **options)


def _check(images: Any, method: str, groups: int | None, channels: int | None, batch_size: int) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")
    if not isinstance(images, Tensor) or images.dim() != 4 or not len(images) or not images.is_floating_point():
        shape = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"expected preprocessed images [B, C, H, W] of floating-point numbers, got {shape}")
    for option, value, owner in (("groups", groups, "group_cam"), ("channels", channels, "score_cam")):
        if value is not None and method != owner:
            raise ValueError(f"{option} is for {owner}: {method} has none")
        if value is not None and value < 1:
            raise ValueError(f"{option} must be a positive number, got {value}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be a positive number of images, got {batch_size}")


def _package_class(method: str) -> Any:
    name = METHODS[method].package_class
    if name is None:
        return None
    try:
        import pytorch_grad_cam
    except ImportError as error:
        raise ImportError(
            f'{METHODS[method].title} is computed by pytorch-grad-cam: install it with pip install "interlayer[cam]"; '
            f"score_cam and group_cam do without it"
        ) from error
    return getattr(pytorch_grad_cam, name)


@contextmanager
def _undisturbed(network: nn.Module) -> Iterator[None]:
    """Runs a network eagerly in eval mode, without gradients except where they are enabled, and also if the caller is
    in inference mode, in which they could not be.
    """
    with torch.inference_mode(False), torch.no_grad(), eagerly(network), evaluating(network):
        yield


def _run(network: nn.Module, images: Tensor) -> Tensor:
    return logits_of(network, network(images), len(images))


def _sign(maps: Tensor, evidence: Tensor | None) -> Tensor:
    """Returns the sign of each projection, [B, 1, 1]: a principal component has none of its own.

    It is that of the correlation with the evidence for the class, or without gradients that of the largest value, as in
    Seg-Eigen-CAM (Chung and Ying, 2025, Eq. 13).

    Args:
        maps: [B, h, w].
        evidence: the sum over channels of the gradient times the map, [B, h, w]; None without gradients.
    """
    if evidence is None:
        positive = maps.amax((1, 2)) >= -maps.amin((1, 2))
    else:
        centered = evidence - evidence.mean((1, 2), keepdim=True)
        positive = (maps * centered).sum((1, 2)) >= 0
    return torch.where(positive, 1.0, -1.0)[:, None, None]


def _enlarged(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Returns maps [B, h, w] at the size of the images, [B, H, W]."""
    return F.interpolate(maps[:, None], size=tuple(size), mode="bilinear", align_corners=False)[:, 0]


def _scaled(maps: Tensor) -> Tensor:
    """Returns each map scaled to 0 ... 1; one without contrast is zero everywhere."""
    lowest, highest = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    contrast = highest - lowest
    return torch.where(contrast > 0, (maps - lowest) / contrast.where(contrast > 0, 1), 0)
