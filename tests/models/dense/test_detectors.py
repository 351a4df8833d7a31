"""Detectors: MRLA's numbers of parameters, a training step, and the options of the backbone."""

import pytest
import timm
import torch
from torch import nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn

import interlayer
from interlayer.models import ModelError, build_network
from interlayer.models.dense.backbone import build_backbone

PRINTED = {  # trainable parameters in millions, MRLA's detection tables
    "retinanet": {"resnet50": 37.74, "resnet50_mrla_light": 37.92, "resnet101": 56.74, "resnet101_mrla_light": 57.12},
    "faster_rcnn": {"resnet50": 41.53, "resnet50_mrla_light": 41.70, "resnet101": 60.52, "resnet101_mrla_light": 60.90},
    "mask_rcnn": {"resnet50": 44.18, "resnet50_mrla_light": 44.34, "resnet101": 63.17, "resnet101_mrla_light": 63.54},
}


def targets(count: int, first_label: int, size: int = 64):
    boxes = torch.tensor([[4.0, 6.0, 40.0, 44.0], [20.0, 10.0, 60.0, 30.0]])
    masks = torch.zeros(2, size, size, dtype=torch.uint8)
    masks[0, 6:44, 4:40] = 1
    masks[1, 10:30, 20:60] = 1
    labels = torch.tensor([first_label, first_label + 1])
    return [{"boxes": boxes, "labels": labels, "masks": masks} for _ in range(count)]


def trainable(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("backbone", PRINTED["retinanet"])
def test_parameters_are_those_that_mrla_prints(backbone):
    for name, printed in PRINTED.items():
        background = name == "mask_rcnn" and "mrla" not in backbone  # the heads of this baseline have 81 outputs
        options = {"num_classes": 80, "freeze_stages": 1, "predict_background": background}
        with torch.device("meta"):
            model = interlayer.detector(name, backbone=backbone, **options)
        assert round(trainable(model) / 1e6, 2) == printed[backbone], name


@pytest.mark.parametrize(
    ("name", "first_label", "backbone"),
    [
        ("faster_rcnn", 1, "resnet18+rla"),
        ("mask_rcnn", 1, "resnet18+mrla_light:channels_per_head=16"),
        ("retinanet", 0, "deit_tiny_cb"),
    ],
)
def test_a_detector_trains_and_predicts(name, first_label, backbone):
    torch.manual_seed(0)
    model = interlayer.detector(name, backbone=backbone, num_classes=2, resize=False)
    losses = model([torch.rand(3, 64, 64), torch.rand(3, 64, 64)], targets(2, first_label))
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    missing = [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    with torch.no_grad():
        (found,) = model.eval()([torch.rand(3, 48, 80)])
    assert found["boxes"].shape == (len(found["scores"]), 4)
    if name == "mask_rcnn":
        assert found["masks"].shape[1:] == (1, 48, 80)


def test_the_state_of_rla_is_not_handed_to_the_pyramid():
    plain, rla = (build_backbone(name) for name in ("resnet18", "resnet18+rla"))
    image = torch.rand(1, 3, 64, 64)
    assert [x.shape for x in rla(image)] == [x.shape for x in plain(image)]


def test_stochastic_depth_is_off_unless_asked_for():
    def rates(**options):
        body = build_backbone("resnet18_mrla_light", **options)
        return {layer.drop_prob for layer in body.modules() if type(layer).__name__ == "DropPath"}

    assert rates() == {0.0}
    assert max(rates(stochastic_depth=True)) > 0


def test_frozen_stages_and_norms():
    body = build_backbone("resnet18+rla", freeze_stages=1)
    frozen = {name.split(".")[0] for name, p in body.network.named_parameters() if not p.requires_grad}
    assert {"conv1", "bn1", "layer1"} <= frozen
    assert not frozen & {"layer2", "layer3", "layer4"}
    assert all(not p.requires_grad for p in body.network.layer1.parameters())
    assert not body.network.bn1.training
    assert body.network.layer2[0].bn1.training
    statistics = build_backbone("resnet18", frozen_norms="statistics")
    before = statistics.network.bn1.running_mean.clone()
    statistics(torch.rand(2, 3, 64, 64))
    assert torch.equal(before, statistics.network.bn1.running_mean)
    assert statistics.network.bn1.weight.requires_grad
    assert not build_backbone("resnet18", frozen_norms="all").network.bn1.weight.requires_grad


def test_context_broadcasting_leaves_out_the_blocks_that_the_pyramid_reads():
    def holders(name, **options):
        body = build_backbone(name, **options)
        return sorted({int(key.split(".")[1]) for key in interlayer.hosts.attached_mechanisms(body.network)})

    assert holders("deit_tiny_cb") == [6, 8, 9, 10]
    assert holders("deit_tiny_patch16_224+cb") == [6, 8, 9, 10]
    assert holders("deit_tiny_patch16_224+cb:blocks=all", vit_blocks=[2, 4, 6, 11]) == [0, 1, 3, 5, 7, 8, 9, 10]
    assert holders("deit_tiny_patch16_224+cb:spare_pyramid=false") == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("name", ["deit_tiny_cb", "rest_lite", "tf_efficientnet_lite0+mrla_light", "halo_h0"])
def test_maps_have_the_strides_of_the_pyramid(name):
    body = build_backbone(name).eval()
    with torch.no_grad():
        maps = body(torch.rand(1, 3, 64, 96))
    assert [tuple(x.shape[-2:]) for x in maps] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert [x.shape[1] for x in maps] == body.channels
    if name == "rest_lite":
        assert len(body.network.out_norms) == 4


def test_a_module_is_a_backbone():
    listed = build_backbone(timm.create_model("resnet18", features_only=True)).eval()
    whole = build_backbone(build_network("resnet18")).eval()
    whole.network.load_state_dict(listed.network.state_dict())
    image = torch.rand(1, 3, 64, 64)
    for a, b in zip(listed(image), whole(image), strict=True):
        torch.testing.assert_close(a, b)


def test_images_are_resized_once_at_most():
    kept = interlayer.detector("faster_rcnn", backbone="resnet18", num_classes=2, resize=False)
    resized = interlayer.detector("faster_rcnn", backbone="resnet18", num_classes=2, min_size=64, max_size=100)
    image = [torch.rand(3, 40, 50)]
    assert kept.transform(image)[0].image_sizes == [(40, 50)]
    assert resized.transform(image)[0].image_sizes == [(64, 80)]


def test_batches_are_padded_to_multiples():
    options = {"backbone": "resnet18", "num_classes": 2, "min_size": 64, "max_size": 100}
    images = [torch.rand(3, 64, 80), torch.rand(3, 64, 70)]
    sizes = [
        tuple(interlayer.detector("faster_rcnn", **options, size_divisible=multiple).transform(images)[0].tensors.shape)
        for multiple in (None, 128)
    ]
    assert sizes == [(2, 3, 64, 96), (2, 3, 128, 128)]


def test_the_detector_of_torchvision_is_reproduced():
    torch.manual_seed(0)
    sizes = {"min_size": 64, "max_size": 96}
    theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=4, **sizes)
    ours = interlayer.detector("faster_rcnn", backbone="resnet50", num_classes=3, predict_background=True, **sizes)
    weights = theirs.state_dict()
    ours.load_state_dict({k.replace("backbone.body.", "backbone.body.network."): v for k, v in weights.items()})
    image, losses = torch.rand(3, 48, 72), []
    for model in (theirs, ours):
        torch.manual_seed(0)  # torchvision samples anchors and proposals
        losses.append(model.train()([image], targets(1, 1, size=48)))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "yolo"}, "unknown detector 'yolo'"),
        ({"backbone": "resnet81"}, "unknown model 'resnet81'"),
        ({"backbone": "preresnet20_cifar"}, "expected maps at the strides 4, 8, 16 and 32"),
        ({"backbone": nn.Linear(2, 2)}, "Linear has no feature_info"),
        ({"num_classes": 0}, "num_classes must be a positive number"),
        ({"freeze_stages": 5}, "freeze_stages must be a number of stages from 0 to 4"),
        ({"frozen_norms": "yes"}, "frozen_norms must be"),
        ({"size_divisible": 48}, "size_divisible must be a multiple of 32, the stride of the last map, got 48"),
        ({"size_divisible": 0}, "size_divisible must be a multiple of 32"),
        ({"vit_blocks": [1, 2, 3, 4]}, "vit_blocks is for plain ViTs"),
        ({"backbone": "deit_tiny_patch16_224", "vit_blocks": [1, 12, 3, 4]}, "vit_blocks must be four blocks"),
        ({"backbone": "deit_tiny_patch16_224", "freeze_stages": 1}, "has no stages"),
        ({"detector_options": {"colour": 1}}, "faster_rcnn has no option 'colour'"),
    ],
)
def test_errors_say_what_was_expected(options, message):
    with pytest.raises(ModelError, match=message):
        interlayer.detector(**{"name": "faster_rcnn", "backbone": "resnet18", "num_classes": 2, **options})
