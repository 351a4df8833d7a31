"""Dense prediction: what detection and segmentation have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from ..models.build import ModelError
from .padded import PaddedTargets, pad_together, sizes_of
from .task import NETWORK_KEYS, Task, TaskError

OWN_KEYS = {  # options of `interlayer.detector` and `interlayer.segmenter` that are keys of recipes
    "pretrained", "weights", "freeze_stages", "frozen_norms",
}  # fmt: skip
SET_HERE = {"backbone", "num_classes", "resize", "min_size", "max_size", "mean", "std", "backbone_options"}


class DenseTask(Task):
    """Base class of tasks whose network is a head on the feature maps of the recipe's model.

    Images keep their aspect ratio. Training images are resized once, by the data; images of an evaluation are resized
    once, on the device, and predictions are in pixels of the original image.
    """

    @classmethod
    def unsupported_reason(cls, values: Mapping[str, Any]) -> str:
        unused = [key for key in ("mixup", "cutmix", "erasing", "auto_augment", "zero_head") if values[key]]
        if unused:
            return f"task={cls.name} does not support {unused[0]}: leave it out"
        if values["repeated_augmentation"] > 1:
            return f"task={cls.name} does not repeat images: set repeated_augmentation=1"
        if values["crop"] not in ("none", "scaled", "jittered"):
            return (
                f"task={cls.name} takes crop=none (the resized image), crop=scaled or crop=jittered (a window of "
                f"image_size pixels), not crop={values['crop']}: set one, or start from --recipe {cls.recipe_name()}"
            )
        if values["crop"] != "none" and not values["image_size"]:
            return f"crop={values['crop']} needs image_size, the height and width of the window in pixels"
        if max(values["shorter_side"]) > values["longer_side"]:
            return f"shorter_side={values['shorter_side']} is more than longer_side={values['longer_side']}"
        return ""

    @property
    @abstractmethod
    def head_name(self) -> str:
        """The name of the detector or segmenter."""

    @classmethod
    @abstractmethod
    def recipe_name(cls) -> str:
        """Returns the name of a recipe for this task."""

    @property
    def evaluated_sides(self) -> tuple[int, int]:
        """The shorter side to which images are resized in evaluation, and the limit of their longer side."""
        shorter = self.values["eval_shorter_side"] or round(max(self.values["shorter_side"]))
        return shorter, max(shorter, self.values["longer_side"])

    @property
    def image_size(self) -> int:
        return self.evaluated_sides[0] if self.values["crop"] == "none" else self.values["image_size"]

    new_modules = "the head"

    def shown_size(self, size: int) -> str:
        low, high = (round(side) for side in self.values["shorter_side"])
        shorter, longer = self.evaluated_sides
        sides = f"shorter side {low}" if low == high else f"shorter side {low} to {high}"
        trained = {
            "none": f"{sides} in training",
            "scaled": f"windows of {size} x {size} of {sides} in training",
            "jittered": f"windows of {size} x {size} in training",
        }[self.values["crop"]]
        return f"{self.head_name}, {trained} and {shorter} in evaluation, longer side at most {longer}"

    @property
    def fixed_size(self) -> bool:
        return False

    def build_dense(self, build: Any, name: str, others: str | None = None, **options: Any) -> Any:
        """Builds a detector or segmenter on the recipe's model.

        Args:
            build: `interlayer.models.dense.detector` or `segmenter`.
            name: the name of the detector or segmenter.
            others: the argument of ``build`` that takes options which it does not have itself.
            options: further options of ``build``.
        """
        values = self.values
        if not values["model"]:
            raise TaskError("the recipe names no model: give --model NAME, or NAME+MECHANISM to attach one")
        known = {key for key, entry in signature(build).parameters.items() if entry.kind is Parameter.KEYWORD_ONLY}
        own: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for key, value in values["head_options"].items():
            if key in OWN_KEYS | SET_HERE or key == others:
                where = f"set the key {key}" if key in OWN_KEYS else "the recipe determines it"
                raise TaskError(f"head_options.{key}: {where} instead")
            if key not in known and others is None:
                valid = ", ".join(sorted(known - OWN_KEYS - SET_HERE))
                raise TaskError(f"{name} has no option {key!r}: expected {valid}")
            (own if key in known else rest)[key] = value
        skipped = ("image_size", "zero_head", "pretrained")
        backbone_options = {key: values[key] for key in NETWORK_KEYS if key in values and key not in skipped}
        if others is not None:
            own[others] = {**options.pop(others, {}), **rest}
        try:
            model = build(
                name, backbone=values["model"], num_classes=len(self.classes),
                pretrained=values["pretrained"] and not values["weights"], freeze_stages=values["freeze_stages"],
                frozen_norms=values["frozen_norms"], backbone_options=backbone_options, **options, **own,
            )  # fmt: skip
        except TypeError as error:
            raise ModelError(f"the options of {name} do not fit: {error}") from error
        self._check_sizes(self.backbone(model))
        return model

    def _check_sizes(self, backbone: Any) -> None:
        """Raises a `TaskError` if images are resized to sizes that the backbone does not take."""
        size = backbone.only_size
        if size is not None and (self.evaluated_sides != (size, size) or self.image_size != size):
            raise TaskError(
                f"{self.values['model']} takes only images of {size} x {size} pixels, and task={self.name} resizes "
                f"images to others: choose a backbone for any size, such as a CNN, a ViT or Swin"
            )

    def collate(self, samples: Sequence[tuple[Tensor, Any]]) -> tuple[Tensor, PaddedTargets]:
        """Pads images [3, H, W] of different sizes with zeros at the right and at the bottom."""
        images = [image for image, _ in samples]
        targets = [self.target_of(target, image) for image, target in samples]
        return pad_together(images), PaddedTargets([(image.shape[1], image.shape[2]) for image in images], targets)

    def image_sizes(self, images: Tensor, targets: Any) -> list[tuple[int, int]]:
        return sizes_of(images, targets)

    @abstractmethod
    def target_of(self, target: Any, image: Tensor) -> Any:
        """Returns the target of an image as plain tensors; that of an image without annotations if it is no target."""


def plain(tensor: Tensor) -> Tensor:
    """Returns a tensor without torchvision's subclass."""
    return tensor.as_subclass(torch.Tensor)
