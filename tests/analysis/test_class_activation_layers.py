"""Tests that the layer of a class activation map, and the grid of its tokens, follow from a network's structure."""

import pytest
import timm
import torch
from cam_networks import CORNERS, hooks_of
from torch import nn

import interlayer
from interlayer.analysis import capture
from interlayer.analysis.class_activation import class_activation
from interlayer.analysis.class_activation_layers import choose_layer

VIT = {"img_size": (64, 96), "depth": 2}
SWIN = {"img_size": (64, 96), "window_size": 4, "embed_dim": 24, "depths": (2, 2, 2), "num_heads": (1, 2, 4)}
# name+mechanism, options, size of the image, the layer and its resolution
FAMILIES = [
    ("test_resnet", {}, (96, 128), "layer4.0", (3, 4)),
    ("test_resnet+mrla_light", {}, (96, 128), "layer4.0", (3, 4)),
    ("test_resnet+mrla_base", {}, (96, 128), "layer4.0", (3, 4)),
    ("test_resnet+rla", {}, (96, 128), "layer4.0", (3, 4)),
    ("test_convnext", {}, (96, 128), "stages.3.blocks.1", (3, 4)),
    ("test_nfnet", {}, (96, 128), "final_act", (3, 4)),
    ("densenet121", {}, (96, 128), "features.norm5", (3, 4)),
    ("regnetx_002", {}, (192, 256), "s4.b7", (6, 8)),
    ("test_efficientnet", {}, (96, 128), "bn2", (3, 4)),
    ("mobilenetv3_small_050", {}, (192, 256), "blocks.5", (6, 8)),
    ("swin_tiny_patch4_window7_224", SWIN, (64, 96), "norm", (4, 6)),
    ("pvt_v2_b0", {}, (96, 128), "stages.3", (3, 4)),
    ("maxvit_pico_rw_256", {"img_size": (64, 96)}, (64, 96), "norm", (2, 3)),
    ("vit_tiny_patch16_224", VIT, (64, 96), "blocks.1.norm1", (4, 6)),
    ("vit_tiny_patch16_224+mrla_light", {**VIT, "depth": 3}, (64, 96), "blocks.2.norm1", (4, 6)),
    ("vit_tiny_patch16_224+cb", VIT, (64, 96), "blocks.1.norm1", (4, 6)),
    ("vit_tiny_patch16_224", {**VIT, "global_pool": "avg", "reg_tokens": 4}, (64, 96), "blocks.1", (4, 6)),
    ("vit_tiny_patch16_224", {"depth": 2, "dynamic_img_size": True}, (64, 96), "blocks.1.norm1", (4, 6)),
    ("deit_tiny_distilled_patch16_224", VIT, (64, 96), "blocks.1.norm1", (4, 6)),
    ("eva02_tiny_patch14_224", {"img_size": (56, 84), "depth": 2}, (56, 84), "blocks.1", (4, 6)),
    ("xcit_nano_12_p16_224", {}, (64, 96), "blocks.11", (4, 6)),
    ("caformer_s18", {}, (96, 128), "stages.3", (3, 4)),
    ("mixer_s16_224", {"img_size": (64, 96)}, (64, 96), "norm", (4, 6)),
    ("halo_h0", {}, (128, 128), "stages.3.2", (4, 4)),
    ("rest_lite", {}, (96, 128), "norm", (3, 4)),
    ("ceit_tiny", {"img_size": (64, 96)}, (64, 96), "blocks.11.norm1", (4, 6)),
]
IDS = [f"{name}-{'-'.join(options) if len(options) < 3 else 'small'}" for name, options, *_ in FAMILIES]


def build(name, options, size):
    backbone, _, mechanism = name.partition("+")
    model = timm.create_model(backbone, num_classes=5, **options).eval()
    if mechanism:
        model = interlayer.attach(model, mechanism, **({} if mechanism in ("cb", "rla") else {"image_size": size}))
    for parameter in model.parameters():  # classifiers that start at zero give no gradient
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model.eval()


@torch.no_grad()
def corner_effects(model, place, image):
    """Where the map of a layer changes if a corner of the image does: [corners, h, w], less what all corners share."""
    height, width = image.shape[-2] // 4, image.shape[-1] // 4
    generator = torch.Generator().manual_seed(0)
    effects = []
    for row, column in CORNERS:
        top, left = row * (image.shape[-2] - height), column * (image.shape[-1] - width)
        changed = image.clone()
        changed[..., top : top + height, left : left + width] = 1.5 * torch.randn(3, height, width, generator=generator)
        with capture(model, [place.name]) as captured:
            model(image)
            model(changed)
        before, after = (place.of(value) for value in captured[place.name])
        effect = (after - before).abs().sum(1)[0]
        effects.append(effect / effect.sum())
    stacked = torch.stack(effects)
    return stacked - stacked.mean(0)


@pytest.mark.parametrize(("name", "options", "size", "layer", "resolution"), FAMILIES, ids=IDS)
def test_the_layer_and_the_orientation_of_its_map(name, options, size, layer, resolution):
    """A corner of the image changes that corner of the map: a transposed, flipped or shifted map fails."""
    model = build(name, options, size)
    image = torch.randn(1, 3, *size)
    before = hooks_of(model)
    found = class_activation(model, image.repeat(4, 1, 1, 1), targets=range(4))
    assert (found.layer, found.resolution) == (layer, resolution)
    assert found.maps.shape == (4, *size)
    assert found.maps.isfinite().all()
    assert (found.maps.amax((1, 2)) == 1).any(), "some class must have a map that is not blank"
    assert hooks_of(model) == before

    shallow = 1 if name == "rest_lite" else None  # its untrained attention spreads a corner over the image
    place = choose_layer(model, image, lambda image: model(image).max(), shallow)
    rows, columns = (torch.linspace(-1, 1, side) for side in place.resolution)
    for (row, column), effect in zip(CORNERS, corner_effects(model, place, image), strict=True):
        assert bool((effect.sum(1) @ rows) > 0) == bool(row)
        assert bool((effect.sum(0) @ columns) > 0) == bool(column)


def test_the_map_of_an_attached_block_includes_its_mechanism():
    model = build("test_resnet+mrla_light", {}, (64, 64))
    image = torch.randn(1, 3, 64, 64)
    place = choose_layer(model, image, lambda image: model(image).max())
    with torch.no_grad(), capture(model, [place.name]) as captured:
        features = model.forward_features(image)
        with interlayer.switched_off(model):
            model(image)
    with_mechanism, without = (place.of(value) for value in captured[place.name])
    assert torch.equal(with_mechanism, features)
    assert not torch.equal(without, features)


def layer_of(model, layer, size=(96, 128)):
    image = torch.randn(1, 3, *size)
    return choose_layer(model, image, lambda image: model(image).max(), layer).name


def test_stages_are_counted_from_one_or_from_the_end():
    model = timm.create_model("resnet10t").eval()
    for layer in ("stage3", "stage 3", "3", 3, -2, "-2"):
        assert layer_of(model, layer) == "layer3.0"
    assert layer_of(model, "layer3") == "layer3"
    same = class_activation(model, torch.ones(1, 3, 64, 64), layer="layer3").maps
    assert torch.equal(class_activation(model, torch.ones(1, 3, 64, 64), layer=3).maps, same)
    for layer in (0, 5, "stage7", -5):
        with pytest.raises(ValueError, match=r"does not exist: the stages and their last blocks are 1 \(layer1.0\)"):
            layer_of(model, layer)


def test_a_stage_ends_where_the_resolution_changes():
    """Of an EfficientNet, stage 3 and 4 have the strides 16 and 32, as those of a ResNet have."""
    model = timm.create_model("efficientnet_lite0").eval()
    names = [layer_of(model, stage) for stage in (1, 2, 3, 4)]
    assert names == ["blocks.1.1", "blocks.2.1", "blocks.4.2", "blocks.6.0"]
    assert layer_of(model, None) == "bn2"


def test_stages_of_a_plain_transformer():
    """It has three. The patch tokens at the end of the last one do not reach the class, those of the others do."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6).eval()
    names = [layer_of(model, stage, (64, 64)) for stage in (1, 2, 3, -1, None)]
    assert names == ["blocks.1", "blocks.3", "blocks.5.norm1", "blocks.5.norm1", "blocks.5.norm1"]


def test_a_blank_map_is_refused():
    """The patch tokens after the last block reach no class, so that their map would be zero for every image."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    images = torch.randn(1, 3, 64, 64)
    with pytest.raises(ValueError, match=r"the map of blocks.1 does not reach the score of the class"):
        class_activation(model, images, layer="blocks.1")
    assert hooks_of(model) == 0
    assert class_activation(model, images, layer="blocks.0.mlp.fc1").resolution == (4, 4)


def test_layers_without_a_map_are_refused():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, qk_norm=True).eval()
    for layer in ("blocks", "head", "fc_norm", "blocks.0.attn.q_norm"):
        with pytest.raises(ValueError, match=f"{layer} has no spatial structure|blocks") as error:
            class_activation(model, torch.randn(1, 3, 64, 64), layer=layer)
        assert "\n" not in str(error.value)
    small = timm.create_model("test_resnet").eval()
    with pytest.raises(ValueError, match=r"the map of layer4.0 is 1 x 1 and cannot say where: use larger images"):
        class_activation(small, torch.randn(1, 3, 32, 32))


def test_tokens_in_an_unknown_order_are_refused():
    """The tokens of Hiera are not in the order of the image: a map of them would be wrong without a word."""
    model = timm.create_model("hiera_tiny_224", img_size=64).eval()
    with pytest.raises(ValueError, match="tokens whose grid is not known"):
        class_activation(model, torch.randn(1, 3, 64, 64))


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 48}
    vit = transformers.ViTConfig(num_hidden_layers=2, image_size=(64, 96), patch_size=16, **size)
    dino = transformers.Dinov2Config(num_hidden_layers=2, image_size=64, patch_size=16, **size)
    swin = transformers.SwinConfig(
        image_size=(64, 96), window_size=4, embed_dim=12, depths=[2, 2], num_heads=[2, 2], hidden_dropout_prob=0.0
    )
    convnext = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 2])
    cases = [
        (transformers.ViTForImageClassification(vit), (64, 96), (4, 6)),
        (transformers.Dinov2ForImageClassification(dino), (64, 64), (4, 4)),
        (transformers.SwinForImageClassification(swin), (64, 96), (8, 12)),
        (transformers.ConvNextForImageClassification(convnext), (128, 192), (4, 6)),
    ]
    for model, pixels, resolution in cases:
        image, score = torch.randn(1, 3, *pixels), lambda image, model=model: model(image).logits.max()
        found = class_activation(model.eval(), image)
        assert found.resolution == resolution
        assert found.maps.isfinite().all()
        assert hooks_of(model) == 0
        effects = corner_effects(model, choose_layer(model, image, score), image)
        rows, columns = (torch.linspace(-1, 1, side) for side in resolution)
        for (row, column), effect in zip(CORNERS, effects, strict=True):
            assert (bool((effect.sum(1) @ rows) > 0), bool((effect.sum(0) @ columns) > 0)) == (bool(row), bool(column))
