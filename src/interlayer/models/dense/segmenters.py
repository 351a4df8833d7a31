"""Semantic segmentation: UPerNet with an auxiliary head, and a light head on a feature pyramid.

UPerNet's heads are those of transformers (the extra ``segmentation``): pyramid pooling at 1, 2, 3 and 6 bins, 512
channels, and an auxiliary head of one convolution with 256 channels on the map of stride 16. On DeiT-T, S and B with a
`SimplePyramid` they give the sizes that CB prints (34.1, 53.5 and 127.0M). segmentation_models_pytorch does not: its
encoders reject plain ViTs, whose maps all have one stride, and its UPerNet has no auxiliary head.

The light head sums the maps of torchvision's FeaturePyramidNetwork at stride 4, each after a convolution.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork

from ..errors import ModelError
from .backbone import FeatureMaps, FrozenNorms, build_backbone

AUXILIARY_LEVEL = 2  # the map of stride 16


class PyramidHead(nn.Module):
    """A light head: logits [B, num_classes, H / 4, W / 4] of the summed maps of a feature pyramid.

    Args:
        in_channels: channels of the maps, from the finest to the coarsest.
        num_classes: number of classes.
        channels: channels of the pyramid.
    """

    def __init__(self, in_channels: list[int], num_classes: int, channels: int) -> None:
        super().__init__()
        self.fpn = FeaturePyramidNetwork(in_channels, channels)
        self.convs = nn.ModuleList(Conv2dNormActivation(channels, channels, 3) for _ in in_channels)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        levels = self.fpn(OrderedDict((str(index), x) for index, x in enumerate(maps))).values()
        first, *others = [conv(x) for conv, x in zip(self.convs, levels, strict=True)]
        for x in others:
            first = first + F.interpolate(x, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.classifier(first)


class Segmenter(nn.Module):
    """Logits [B, num_classes, H, W] of images [B, 3, H, W].

    In training, a segmenter with an auxiliary head returns the logits of both heads as a tuple. Images are padded with
    zeros at the right and at the bottom to multiples of the largest stride, and the logits are cropped to the images.

    Args:
        body: the feature maps.
        head: computes logits from the maps.
        auxiliary: computes logits from the maps in training.
    """

    def __init__(self, body: FeatureMaps, head: nn.Module, auxiliary: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head, self.auxiliary = body, head, auxiliary

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % self.body.stride, 0, -height % self.body.stride))

        def enlarge(logits: Tensor) -> Tensor:
            logits = F.interpolate(logits, size=padded.shape[-2:], mode="bilinear", align_corners=False)
            return logits[..., :height, :width]

        maps = self.body(padded)
        logits = enlarge(self.head(maps))
        if self.auxiliary is None or not self.training:
            return logits
        return logits, enlarge(self.auxiliary(maps))


def _upernet(body: FeatureMaps, num_classes: int, channels: int | None, auxiliary: bool) -> Segmenter:
    try:
        from transformers import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead
    except ImportError as error:
        raise ModelError(
            "upernet needs transformers: install the extra with pip install 'interlayer[segmentation]'"
        ) from error
    config = UperNetConfig(hidden_size=channels or 512, auxiliary_in_channels=body.channels[AUXILIARY_LEVEL])
    config.num_labels = num_classes
    head = UperNetHead(config, in_channels=body.channels)
    if not auxiliary:
        return Segmenter(body, head)
    return Segmenter(body, head, UperNetFCNHead(config, in_channels=body.channels, in_index=AUXILIARY_LEVEL))


def _fpn(body: FeatureMaps, num_classes: int, channels: int | None, auxiliary: bool) -> Segmenter:
    return Segmenter(body, PyramidHead(body.channels, num_classes, channels or 128))


SEGMENTERS: dict[str, Callable[..., Segmenter]] = {"upernet": _upernet, "fpn": _fpn}


def segmenter(
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
    channels: int | None = None,
    auxiliary_head: bool | None = None,
    backbone_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Builds a network for semantic segmentation on a backbone of this library or of timm.

    It takes normalized images [B, 3, H, W] and returns logits [B, num_classes, H, W]; in training, a tuple with the
    logits of the auxiliary head as the second entry, if it has one.

    Args:
        name: "upernet", or "fpn" for a light head on a feature pyramid.
        backbone: NAME, NAME+MECHANISM:OPTION=VALUE, or a module with ``feature_info``.
        num_classes: number of classes.
        pretrained: whether to load the pretrained weights of a named backbone.
        weights: path of a file of initial weights of a named backbone; see `interlayer.models.weights.start_from`.
        freeze_stages: the number of stages that are frozen with the stem.
        frozen_norms: "none", "statistics" or "all"; see `interlayer.detector`.
        stochastic_depth: whether mechanisms keep their stochastic depth.
        vit_blocks: the four blocks of a plain ViT that the pyramid reads.
        channels: channels of the head; 512 for upernet and 128 for fpn by default.
        auxiliary_head: whether upernet has an auxiliary head, which it has by default; fpn has none.
        backbone_options: additional arguments of `build_network`, such as ``image_size`` or ``model_options``.

    Raises:
        ModelError: the name, the backbone or an option is not valid.

    >>> interlayer.segmenter("upernet", backbone="deit_small_cb", num_classes=150)
    """
    if name not in SEGMENTERS:
        raise ModelError(f"unknown segmenter {name!r}: expected one of {', '.join(SEGMENTERS)}")
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
        raise ModelError(f"num_classes must be a positive number of classes, got {num_classes!r}")
    if name == "fpn" and auxiliary_head:
        raise ModelError("auxiliary_head is for upernet: fpn has none")
    body = build_backbone(
        backbone,
        pretrained=pretrained,
        weights=weights,
        freeze_stages=freeze_stages,
        frozen_norms=frozen_norms,
        stochastic_depth=stochastic_depth,
        vit_blocks=vit_blocks,
        options=backbone_options,
    )
    return SEGMENTERS[name](body, num_classes, channels, auxiliary_head is not False)
