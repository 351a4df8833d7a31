"""Segmenters: CB's sizes, logits of the image's size, and an auxiliary head in training."""

import sys

import pytest
import torch

import interlayer
from interlayer.models import ModelError


@pytest.mark.parametrize(
    ("backbone", "printed"), [("deit_tiny_cb", 34.1), ("deit_small_cb", 53.5), ("deit_base_cb", 127.0)]
)
def test_parameters_are_those_that_cb_prints(backbone, printed):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = interlayer.segmenter("upernet", backbone=backbone, num_classes=150)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == printed


@pytest.mark.parametrize("name", ["upernet", "fpn"])
@pytest.mark.parametrize("backbone", ["resnet18+mrla_light:channels_per_head=16", "deit_tiny_cb"])
def test_a_segmenter_trains_at_any_size(name, backbone):
    if name == "upernet":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = interlayer.segmenter(name, backbone=backbone, num_classes=3, channels=16)
    images = torch.rand(2, 3, 72, 100)
    outputs = model(images)
    outputs = outputs if name == "upernet" else (outputs,)
    assert [x.shape for x in outputs] == [(2, 3, 72, 100)] * (2 if name == "upernet" else 1)
    sum(x.square().mean() for x in outputs).backward()
    missing = [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    with torch.no_grad():
        assert model.eval()(images).shape == (2, 3, 72, 100)


def test_a_vit_of_few_blocks_is_read_at_four_places():
    """Of four blocks, the second one is at one half and at two thirds of the depth."""
    options = {"model_options": {"depth": 4}, "image_size": 64}
    model = interlayer.segmenter("fpn", backbone="vit_tiny_patch16_224", num_classes=3, backbone_options=options).eval()
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 3, 64, 64)


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("swinv2_cr_tiny_ns_224", {"depths": [1, 1, 1, 1]}),
        ("swinv2_tiny_window8_256", {"depths": [1, 1, 1, 1]}),
        ("vit_small_patch14_dinov2", {"depth": 4, "patch_size": 16}),
        ("eva02_tiny_patch14_224", {"depth": 4, "patch_size": 16}),
        ("vitamin_small_224", {}),
    ],
)
def test_networks_of_timm_that_check_the_size_of_images_take_any(backbone, options):
    """Which option switches the check off follows from the network, not from its name."""
    model = interlayer.segmenter(
        "fpn", backbone=backbone, num_classes=3, channels=16, backbone_options={"model_options": options}
    )
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, 64, 96)).shape == (1, 3, 64, 96)


@pytest.mark.parametrize("backbone", ["densenet121", "vgg11", "ghostnetv2_100", "efficientvit_b0"])
def test_networks_that_timm_reads_in_other_ways_train_too(backbone):
    """Some return maps only with features_only, and one does not give up its pooling."""
    model = interlayer.segmenter("fpn", backbone=backbone, num_classes=3, channels=16)
    model(torch.rand(2, 3, 64, 96)).square().mean().backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("backbone", ["hiera_tiny_224", "vit_relpos_small_patch16_224"])
def test_a_network_for_images_of_one_size_says_so(backbone):
    model = interlayer.segmenter("fpn", backbone=backbone, num_classes=3, channels=16).eval()
    with torch.no_grad():
        assert model(torch.rand(1, 3, 224, 224)).shape == (1, 3, 224, 224)
        with pytest.raises(ModelError, match=f"expected images of 224 x 224 pixels, for which {backbone} was built"):
            model(torch.rand(1, 3, 64, 96))


def test_patches_for_which_there_is_no_pyramid_have_a_remedy():
    with pytest.raises(ModelError, match="got 14 in vit_small_patch14_dinov2: set patch_size=16 in model_options"):
        interlayer.segmenter("fpn", backbone="vit_small_patch14_dinov2", num_classes=3)


def test_upernet_without_its_auxiliary_head():
    pytest.importorskip("transformers")
    model = interlayer.segmenter("upernet", backbone="resnet18", num_classes=3, channels=16, auxiliary_head=False)
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 3, 64, 64)


def test_the_extra_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"interlayer\[segmentation\]"):
        interlayer.segmenter("upernet", backbone="resnet18", num_classes=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "unet"}, "unknown segmenter 'unet'"),
        ({"num_classes": True}, "num_classes must be a positive number"),
        ({"auxiliary_head": True}, "auxiliary_head is for upernet"),
    ],
)
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ModelError, match=message):
        interlayer.segmenter(**{"name": "fpn", "backbone": "resnet18", "num_classes": 3, **options})
