"""Faster R-CNN, RetinaNet and Mask R-CNN of torchvision's detection components on the backbones of this library.

The shapes are those of mmdetection and give the numbers of parameters that MRLA prints. Settings of torchvision's
components that differ from torchvision's own detectors:

- RetinaNet's P6 is computed from the last map of the backbone (torchvision's first version: from P5).
- The box and mask predictors have no output for the background; ``predict_background=True`` has torchvision's.
- Batch norms can keep trainable weights while their statistics are frozen (``frozen_norms="statistics"``);
  torchvision's FrozenBatchNorm2d freezes both.

What remains of torchvision: RoIAlign takes two samples per bin and axis (mmdetection: as many as pixels), and the box
loss of the RoI heads is smooth L1 with beta 1/9 (mmdetection: L1).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from ..errors import ModelError
from .backbone import FeatureMaps, FrozenNorms, build_backbone
from .box_precision import keep_boxes_precise
from .predictors import BoxPredictor, MaskHead, MaskPredictor
from .transform import DetectorTransform

OWN_OPTIONS = {  # arguments of torchvision's classes that `detector` sets itself
    "min_size", "max_size", "image_mean", "image_std", "box_predictor", "mask_predictor",
}  # fmt: skip
NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(math.gcd(32, channels), channels),
}
HEAD_CHANNELS = 1024  # of the two linear layers of torchvision's box head
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PyramidBackbone(nn.Module):
    """Feature maps and torchvision's feature pyramid, as torchvision's detectors take a backbone.

    Args:
        body: the feature maps.
        channels: channels of all maps of the pyramid.
        extra: the levels beyond the last map: "pool" for one that is max pooled, or "p6p7" for two convolutions, of
            which the first takes the last map of the backbone.
        norm: "batch" or "group" for a norm after each convolution of the pyramid, or "none".
    """

    def __init__(self, body: FeatureMaps, *, channels: int, extra: str, norm: str = "none") -> None:
        super().__init__()
        self.body, self.out_channels = body, channels
        inputs = body.channels
        block = LastLevelMaxPool() if extra == "pool" else LastLevelP6P7(inputs[-1], channels)
        self.fpn = FeaturePyramidNetwork(inputs, channels, extra_blocks=block, norm_layer=NORMS[norm])

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.body(images)
        return self.fpn(OrderedDict((str(index), x) for index, x in enumerate(maps)))


def _faster_rcnn(body: FeatureMaps, num_classes: int, predict_background: bool, pyramid: Any, **options: Any) -> Any:
    backbone = PyramidBackbone(body, extra="pool", **pyramid)
    if predict_background:
        return FasterRCNN(backbone, num_classes + 1, **options)
    return FasterRCNN(backbone, box_predictor=BoxPredictor(HEAD_CHANNELS, num_classes), **options)


def _mask_rcnn(body: FeatureMaps, num_classes: int, predict_background: bool, pyramid: Any, **options: Any) -> Any:
    backbone = PyramidBackbone(body, extra="pool", **pyramid)
    if predict_background:
        return MaskRCNN(backbone, num_classes + 1, **options)
    box_predictor, mask_predictor = BoxPredictor(HEAD_CHANNELS, num_classes), MaskPredictor(num_classes)
    if options.get("mask_head") is None:
        options["mask_head"] = MaskHead(backbone.out_channels)
    return MaskRCNN(backbone, box_predictor=box_predictor, mask_predictor=mask_predictor, **options)


def _retinanet(body: FeatureMaps, num_classes: int, predict_background: bool, pyramid: Any, **options: Any) -> Any:
    if predict_background:
        raise ModelError("predict_background is for faster_rcnn and mask_rcnn: retinanet has no background class")
    backbone = PyramidBackbone(body, extra="p6p7", **pyramid)
    sizes = tuple(tuple(int(size * 2 ** (octave / 3)) for octave in range(3)) for size in (32, 64, 128, 256, 512))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    return RetinaNet(backbone, num_classes, **{"anchor_generator": anchors, **options})


CLASSES = {"faster_rcnn": FasterRCNN, "mask_rcnn": MaskRCNN, "retinanet": RetinaNet}
DETECTORS: dict[str, Callable[..., Any]] = {
    "faster_rcnn": _faster_rcnn,
    "mask_rcnn": _mask_rcnn,
    "retinanet": _retinanet,
}


def detector(
    name: str,
    *,
    backbone: str | nn.Module,
    num_classes: int,
    pretrained: bool = False,
    weights: str | None = None,
    freeze_stages: int = 0,
    frozen_norms: FrozenNorms = "none",
    stochastic_depth: bool = False,
    vit_blocks: Sequence[int] | None = None,
    pyramid_channels: int = 256,
    pyramid_norm: str = "none",
    predict_background: bool = False,
    resize: bool = True,
    min_size: int = 800,
    max_size: int = 1333,
    size_divisible: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    backbone_options: Mapping[str, Any] | None = None,
    detector_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Builds a detector of torchvision on a backbone of this library or of timm.

    It is called like torchvision's detectors: with a list of images [3, H, W] in 0 to 1 and, in training, a list of
    targets with "boxes", "labels" and, for mask_rcnn, "masks". The labels of faster_rcnn and mask_rcnn start at 1,
    since 0 is the background; those of retinanet start at 0.

    Args:
        name: "faster_rcnn", "mask_rcnn" or "retinanet".
        backbone: NAME, NAME+MECHANISM:OPTION=VALUE, or a module with ``feature_info``: a timm model, or one created
            with ``features_only=True``.
        num_classes: number of classes, without the background.
        pretrained: whether to load the pretrained weights of a named backbone.
        weights: path of a file of initial weights of a named backbone; see `interlayer.models.weights.start_from`.
        freeze_stages: the number of stages that are frozen with the stem; the papers freeze 1.
        frozen_norms: "none"; "statistics" for batch norms that use their running statistics and train their weights, as
            in the papers; "all" to freeze their weights as well.
        stochastic_depth: whether mechanisms keep their stochastic depth; MRLA switches it off (B.3).
        vit_blocks: the four blocks of a plain ViT that the pyramid reads.
        pyramid_channels: channels of the feature pyramid.
        pyramid_norm: "batch" or "group" for a norm after each convolution of the feature pyramid, which backbones need
            whose maps have large values; "none", as in the papers.
        predict_background: whether the box and mask predictors have an output for the background, as in torchvision.
        resize: whether the detector resizes images. If False, images keep the size that the data gives them.
        min_size: length of the short side of resized images.
        max_size: largest length of the long side of resized images.
        size_divisible: batches are padded to multiples of it; None for the stride of the last map, mostly 32. With 128,
            images of many sizes make batches of few sizes, each of which cuDNN prepares its convolutions for.
        mean: channel means of the images; by default those of the backbone's pretrained weights.
        std: channel standard deviations of the images.
        backbone_options: additional arguments of `build_network`, such as ``image_size`` or ``model_options``.
        detector_options: additional arguments of torchvision's detector, such as ``box_detections_per_img``.

    Raises:
        ModelError: the name, the backbone or an option is not valid.

    >>> interlayer.detector("mask_rcnn", backbone="resnet50_mrla_light", num_classes=80, freeze_stages=1)
    """
    if name not in DETECTORS:
        raise ModelError(f"unknown detector {name!r}: expected one of {', '.join(DETECTORS)}")
    if pyramid_norm not in NORMS:
        raise ModelError(f"pyramid_norm must be one of {', '.join(NORMS)}, got {pyramid_norm!r}")
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
        raise ModelError(f"num_classes must be a positive number, without the background, got {num_classes!r}")
    accepted = set(signature(CLASSES[name]).parameters) - {"backbone", "num_classes", "kwargs", *OWN_OPTIONS}
    unknown = sorted(set(detector_options or {}) - accepted)
    if unknown:  # torchvision ignores them
        raise ModelError(f"{name} has no option {unknown[0]!r}: expected {', '.join(sorted(accepted))}")
    body = build_backbone(
        backbone,
        first_level=1 if name == "retinanet" else 0,
        pretrained=pretrained,
        weights=weights,
        freeze_stages=freeze_stages,
        frozen_norms=frozen_norms,
        stochastic_depth=stochastic_depth,
        vit_blocks=vit_blocks,
        options=backbone_options,
    )
    multiple = body.stride if size_divisible is None else size_divisible
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1 or multiple % body.stride:
        raise ModelError(
            f"size_divisible must be a multiple of {body.stride}, the stride of the last map, got {size_divisible!r}"
        )
    config = getattr(body.network, "pretrained_cfg", None) or {}
    mean = list(mean if mean is not None else config.get("mean") or IMAGENET_MEAN)
    std = list(std if std is not None else config.get("std") or IMAGENET_STD)
    sizes: dict[str, Any] = {"min_size": min_size, "max_size": max_size, "image_mean": mean, "image_std": std}
    given = {**sizes, **(detector_options or {})}
    pyramid = {"channels": pyramid_channels, "norm": pyramid_norm}
    model = DETECTORS[name](body, num_classes, predict_background, pyramid, **given)
    keep_boxes_precise(model)
    model.transform = DetectorTransform(min_size, max_size, mean, std, size_divisible=multiple, resizes=resize)
    return model
