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
