"""Backbones of dense prediction: the feature maps of a network at strides 4, 8, 16 and 32.

The networks follow the papers:

- Stochastic depth of mechanisms is off (MRLA, B.3).
- The state of recurrent layer aggregation is not part of the maps (RLA, section 4.3).
- Context broadcasting leaves out the blocks that the pyramid reads (CB, section 4.4).
- ResT has a LayerNorm on the output of each stage (ResT, A.3).
- A plain ViT, in which all maps have one stride, goes through a `SimplePyramid`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn

from ... import hosts
from ...hosts.finding.probe import reason
from ...hosts.stochastic_depth import is_drop_path
from ..build import build_network, split_name
from ..errors import ModelError
from ..networks.rest import MODELS as REST_MODELS
from ..registry import backbone_of
from ..rows import ROWS
from .pyramid import SimplePyramid

STRIDES = (4, 8, 16, 32)
FrozenNorms = Literal["none", "statistics", "all"]


class FeatureMaps(nn.Module):
    """Maps of a network, [B, C, H / stride, W / stride] each, from the finest to the coarsest.

    Args:
        network: a timm model with `forward_intermediates`, or a model created with ``features_only=True``.
        indices: the entries of ``feature_info`` to return.
        neck: brings the maps of a plain ViT to their strides.
        frozen_norms: "statistics" keeps the batch norms of the network in eval mode; "all" also freezes their weights.

    Attributes:
        only_size: height and width of the images for which the network was built, if it does not take any size.
    """

    def __init__(
        self,
        network: nn.Module,
        indices: Sequence[int],
        *,
        neck: SimplePyramid | None = None,
        frozen_norms: FrozenNorms = "none",
    ) -> None:
        super().__init__()
        infos = _infos(network)
        self.reads_list = not hasattr(network, "forward_intermediates")
        self.indices = list(indices)
        self.channels = [infos[index]["num_chs"] for index in indices]
        self.stride = max(max(info["reduction"] for info in infos), STRIDES[-1])  # sizes of images are multiples of it
        if not self.reads_list:
            _prune(network, sorted(set(indices)))
        self.network = network
        self.neck = neck
        self.frozen_norms = frozen_norms
        self.only_size: int | None = None
        if frozen_norms == "all":
            for norm in _batch_norms(network):
                for parameter in norm.parameters():
                    parameter.requires_grad_(False)

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """timm's configuration of the network: the mean and std of its images, among others."""
        return getattr(self.network, "pretrained_cfg", None) or {}  # type: ignore[return-value]

    def forward(self, images: Tensor) -> list[Tensor]:
        if self.only_size is None:
            return self._maps(images)
        try:  # some of these networks take multiples of their size, so that only they know whether this one fits
            return self._maps(images)
        except (RuntimeError, AssertionError) as error:
            (height, width), size = images.shape[-2:], self.only_size
            if height == width == size:
                raise
            name = self.pretrained_cfg.get("architecture") or type(self.network).__name__
            raise ModelError(
                f"expected images of {size} x {size} pixels, for which {name} was built, got {height} x {width}: "
                f"{reason(error)}"
            ) from error

    def _maps(self, images: Tensor) -> list[Tensor]:
        network: Any = self.network
        if self.reads_list:
            maps = network(images)
            maps = [maps[index] for index in self.indices]
        else:
            blocks = sorted(set(self.indices))  # of a ViT of few blocks, one block is read twice
            read = network.forward_intermediates(
                images, indices=blocks, norm=False, output_fmt="NCHW", intermediates_only=True
            )
            maps = [read[blocks.index(index)] for index in self.indices]
        return self.neck(maps) if self.neck is not None else list(maps)

    def drop_levels(self, count: int) -> None:
        """Leaves out the finest maps, and the layers that compute only these."""
        self.indices, self.channels = self.indices[count:], self.channels[count:]
        if self.neck is not None:
            self.neck.levels = self.neck.levels[count:]

    def train(self, mode: bool = True) -> FeatureMaps:
        super().train(mode)
        for norm in _batch_norms(self.network):  # a norm that is not trained does not update its statistics either
            frozen = norm.weight is not None and not norm.weight.requires_grad
            if frozen or self.frozen_norms != "none":
                norm.eval()
        return self


def build_backbone(
    backbone: str | nn.Module,
    *,
    first_level: int = 0,
    pretrained: bool = False,
    weights: str | None = None,
    freeze_stages: int = 0,
    frozen_norms: FrozenNorms = "none",
    stochastic_depth: bool = False,
    vit_blocks: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> FeatureMaps:
    """Builds the feature maps of a backbone at strides 4, 8, 16 and 32.

    A module that is given as backbone is changed: its classifier is removed and unused parameters are frozen.

    Args:
        backbone: NAME, NAME+MECHANISM:OPTION=VALUE, or a module with ``feature_info``.
        first_level: the first map to return: 0 for stride 4, 1 for stride 8.
        pretrained: whether to load the pretrained weights of a named backbone.
        weights: path of a file of initial weights of a named backbone; see `interlayer.models.weights.start_from`.
        freeze_stages: the number of stages, from the first, that are frozen with the stem: every parameter on which the
            map of the last of them depends. Their batch norms use their running statistics.
        frozen_norms: "none", "statistics" to use the running statistics of all batch norms without updating them, or
            "all" to also freeze their weights and biases.
        stochastic_depth: whether mechanisms keep their stochastic depth.
        vit_blocks: the four blocks of a plain ViT that the pyramid reads, from 0; by default those at one third, one
            half, two thirds and the end of its depth. Four times the last block is the pyramid of ViTDet.
        options: additional arguments of `build_network`, for a named backbone.

    Raises:
        ModelError: the backbone has no maps at these strides, or an option is not valid.
    """
    if frozen_norms not in ("none", "statistics", "all"):
        raise ModelError(f"frozen_norms must be 'none', 'statistics' or 'all', got {frozen_norms!r}")
    if isinstance(freeze_stages, bool) or not isinstance(freeze_stages, int) or not 0 <= freeze_stages <= 4:
        raise ModelError(f"freeze_stages must be a number of stages from 0 to 4, got {freeze_stages!r}")
    if isinstance(backbone, str):
        given = dict(options or {}) | ({"weights": weights} if weights else {})
        network = _build(backbone, pretrained, vit_blocks, given)
    elif pretrained or weights or options:
        raise ModelError("pretrained, weights and the options of a backbone need its name, got a module")
    else:
        network = backbone
    name = backbone if isinstance(backbone, str) else type(backbone).__name__
    infos = _infos(network)
    strides = [info["reduction"] for info in infos]
    if not stochastic_depth:
        for mechanism in hosts.attached_mechanisms(network).values():
            for layer in filter(is_drop_path, mechanism.modules()):
                layer.drop_prob = 0.0  # type: ignore[assignment]
    neck = None
    if len(set(strides)) == 1 and len(strides) > 1:
        indices = _vit_blocks(vit_blocks, len(strides), name)
        if freeze_stages:
            raise ModelError(f"{name} has no stages, so freeze_stages must be 0, got {freeze_stages}")
        if strides[0] not in (4, 8, 16, 32):
            raise ModelError(
                f"expected patches of 4, 8, 16 or 32 pixels, got {strides[0]} in {name}: set patch_size=16 in "
                f"model_options, for which timm resamples pretrained weights"
            )
        neck = SimplePyramid(infos[indices[0]]["num_chs"], strides[0], STRIDES)
    else:
        if vit_blocks is not None:
            raise ModelError(f"vit_blocks is for plain ViTs, and {name} has maps at the strides {strides}")
        missing = [stride for stride in STRIDES if stride not in strides]
        if missing:
            raise ModelError(f"expected maps at the strides 4, 8, 16 and 32, got {strides} in {name}")
        indices = [len(strides) - 1 - strides[::-1].index(stride) for stride in STRIDES]
    maps = FeatureMaps(network, indices, neck=neck, frozen_norms=frozen_norms)
    _freeze(maps, freeze_stages, first_level, name, (options or {}).get("image_size"))
    maps.drop_levels(first_level)
    return maps.train()


def _build(name: str, pretrained: bool, vit_blocks: Sequence[int] | None, options: dict[str, Any]) -> nn.Module:
    """Builds a named backbone with the papers' settings for dense prediction."""
    plain, mechanisms = split_name(name)
    model_options = dict(options.pop("model_options", None) or {})
    attach_options = dict(options.pop("attach_options", None) or {})
    if plain in REST_MODELS:
        model_options.setdefault("out_norms", True)
    networks = _timm_networks(backbone_of(plain))
    if networks and not any(hasattr(each, "forward_intermediates") for each in networks) and plain == name:
        model_options.setdefault("features_only", True)
    accepted = {argument for network in networks for argument in signature(network).parameters}
    if "dynamic_img_size" in accepted and not options.get("image_size"):
        model_options.setdefault("dynamic_img_size", True)
    elif "strict_img_size" in accepted:
        model_options.setdefault("strict_img_size", False)
    if plain in ROWS and ROWS[plain].mechanism == "cb":
        blocks = True if vit_blocks is None else list(vit_blocks)
        model_options["attach_options"] = {"spare_pyramid": blocks, **(model_options.get("attach_options") or {})}
    if "spare_pyramid" not in attach_options:
        text = "true" if vit_blocks is None else str(list(vit_blocks)).replace(" ", "")
        for mechanism, given in mechanisms:
            if mechanism == "cb" and "spare_pyramid" not in given:
                name = re.sub(r"\+cb(:|(?=\+|$))", lambda m: f"+cb:spare_pyramid={text}" + "," * bool(m[1]), name)
    return build_network(
        name, pretrained=pretrained, model_options=model_options, attach_options=attach_options, **options
    )


def _timm_networks(name: str) -> list[type]:
    """Returns the classes of networks in the module of timm that builds a named network."""
    if not timm.is_model(name):
        return []
    members = vars(sys.modules[timm.models.model_entrypoint(name).__module__]).values()
    return [each for each in members if isinstance(each, type) and hasattr(each, "forward_features")]


def _prune(network: Any, indices: Sequence[int]) -> None:
    """Removes the layers behind the last map, and the classifier."""
    try:
        network.prune_intermediate_layers(indices, prune_norm=True, prune_head=True)
    except AssertionError:  # the head of EfficientViT keeps its pooling
        network.prune_intermediate_layers(indices, prune_norm=True, prune_head=False)
        network.reset_classifier(0)


def _infos(network: nn.Module) -> list[dict[str, Any]]:
    infos = getattr(network, "feature_info", None)
    if not infos:
        raise ModelError(
            f"{type(network).__name__} has no feature_info: expected a timm model, or one made with features_only=True"
        )
    listed = getattr(network, "forward_intermediates", None) is None
    if listed and not callable(getattr(infos, "get_dicts", None)):
        raise ModelError(
            f"{type(network).__name__} does not return feature maps: create it with features_only=True, or give a "
            f"model with forward_intermediates"
        )
    return infos.get_dicts() if callable(getattr(infos, "get_dicts", None)) else list(infos)  # type: ignore[arg-type]


def _vit_blocks(given: Sequence[int] | None, depth: int, name: str) -> list[int]:
    if given is None:  # the blocks that `spare_pyramid=True` leaves out
        return [max(end, 1) - 1 for end in (depth // 3, depth // 2, 2 * depth // 3, depth)]
    blocks = list(given)
    if len(blocks) != len(STRIDES) or not all(isinstance(block, int) and 0 <= block < depth for block in blocks):
        raise ModelError(f"vit_blocks must be four blocks of {name} from 0 to {depth - 1}, got {blocks}")
    return blocks


def _batch_norms(network: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def _freeze(maps: FeatureMaps, stages: int, first_level: int, name: str, image_size: int | None) -> None:
    """Freezes the first stages, and parameters that no map depends on.

    The parameters of a stage are found through the gradients of its map, because mechanisms may register them outside
    the stage. Parameters without an effect are those of the last state of recurrent layer aggregation, which only a
    classifier reads; distributed training expects a gradient for every parameter that is not frozen.
    """
    parameters = [parameter for parameter in maps.parameters() if parameter.requires_grad]
    if not parameters:
        return
    config: Any = getattr(maps.network, "pretrained_cfg", None) or {}
    sizes = [image_size] if image_size else [64, config.get("input_size", (3, 224, 224))[-1]]
    for size in sizes:
        image = torch.zeros(1, 3, size, size, device=parameters[0].device, dtype=parameters[0].dtype)
        try:
            with hosts.evaluating(maps), torch.enable_grad():
                outputs = maps(image)
        except (RuntimeError, AssertionError, ValueError) as error:
            if size == sizes[-1]:
                raise ModelError(f"{name} does not take images of {size} x {size}: {reason(error)}") from error
            maps.only_size = sizes[-1]
            continue
        break

    def reached(maps: Sequence[Tensor]) -> list[bool]:
        with torch.enable_grad():
            total = torch.stack([x.sum() for x in maps if x.requires_grad]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
        return [grad is not None for grad in grads]

    used = reached(outputs[first_level:])
    frozen = reached(outputs[:stages]) if stages else [False] * len(parameters)
    for parameter, is_used, is_frozen in zip(parameters, used, frozen, strict=True):
        if is_frozen or not is_used:
            parameter.requires_grad_(False)
