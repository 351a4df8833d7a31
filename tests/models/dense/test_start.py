"""Trained weights of backbones in detectors and segmenters, and the identity start of attached mechanisms."""

import pytest
import torch

import interlayer
from interlayer.models import CheckpointError, ModelError, build_network, save_weights
from interlayer.models.dense.backbone import build_backbone


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The weights of a plain classifier, with running statistics that are not those of a new network."""
    torch.manual_seed(0)
    network = build_network("resnet18", num_classes=7)
    with torch.no_grad():
        network.train()(torch.rand(4, 3, 64, 64))
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_weights(network, path)
    return str(path)


@pytest.mark.parametrize("mechanism", ["mrla_light:channels_per_head=16", "rla"])
def test_an_attached_mechanism_starts_as_the_identity(weights, mechanism):
    image = torch.rand(1, 3, 64, 64)
    plain = interlayer.detector("faster_rcnn", backbone="resnet18", num_classes=2, weights=weights, freeze_stages=1)
    backbone = f"resnet18+{mechanism}"
    attached = interlayer.detector("faster_rcnn", backbone=backbone, num_classes=2, weights=weights, freeze_stages=1)
    assert not any(p.requires_grad for p in attached.backbone.body.network.layer1.parameters())
    assert any(p.requires_grad for p in attached.backbone.body.network.layer2.parameters())
    expected = plain.backbone.body.eval()(image)
    assert expected[0].std() > 0.1
    for found, wanted in zip(attached.backbone.body.eval()(image), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    for name, value in build_network("resnet18", weights=weights).state_dict().items():
        if name.startswith("layer4"):
            assert torch.equal(value, plain.backbone.body.network.state_dict()[name])


def test_a_segmenter_loads_the_weights_of_its_backbone(weights):
    model = interlayer.segmenter("fpn", backbone="resnet18", num_classes=3, channels=8, weights=weights)
    state = build_network("resnet18", weights=weights).state_dict()
    assert torch.equal(model.body.network.state_dict()["layer4.1.bn2.running_var"], state["layer4.1.bn2.running_var"])


def test_norms_of_rest_that_only_detectors_have_keep_their_initialization(tmp_path):
    options = {"model_options": {"depths": (1, 1, 1, 1)}}
    save_weights(build_network("rest_lite", **options), tmp_path / "rest.safetensors")
    body = build_backbone("rest_lite", weights=str(tmp_path / "rest.safetensors"), options=options)
    assert all((norm.weight == 1).all() for norm in body.network.out_norms)


def test_weights_that_do_not_fit_are_named(weights, tmp_path):
    with pytest.raises(CheckpointError, match="does not fit the network"):
        interlayer.detector("retinanet", backbone="resnet34", num_classes=2, weights=weights)
    with pytest.raises(CheckpointError, match="no such file"):
        interlayer.detector(
            "retinanet", backbone="resnet18", num_classes=2, weights=str(tmp_path / "missing.safetensors")
        )
    with pytest.raises(ModelError, match="need its name, got a module"):
        interlayer.segmenter("fpn", backbone=build_network("resnet18"), num_classes=2, weights=weights)


DENSE = [("faster_rcnn", 1), ("mask_rcnn", 1), ("retinanet", 0), ("upernet", None), ("fpn", None)]


@pytest.mark.parametrize(("name", "first_label"), DENSE)
def test_a_step_in_bfloat16_and_channels_last(name, first_label):
    torch.manual_seed(0)
    backbone = "resnet18+mrla_light:channels_per_head=16"
    # On a CPU, torch 2.11 to 2.15 do not write the gradient of those pixels of a convolution in bfloat16 that only see
    # padding, as in the last levels of RetinaNet on small images.
    size = 256 if name == "retinanet" else 64
    images = torch.rand(2, 3, size, size).contiguous(memory_format=torch.channels_last)
    if first_label is None:
        if name == "upernet":
            pytest.importorskip("transformers", reason="transformers is not installed")
        model = interlayer.segmenter(name, backbone=backbone, num_classes=3, channels=16)
    else:
        heads = {} if name == "retinanet" else {"rpn_batch_size_per_image": 16, "box_batch_size_per_image": 8}
        model = interlayer.detector(
            name, backbone=backbone, num_classes=2, pyramid_channels=32, resize=False, detector_options=heads
        )
    model = model.to(memory_format=torch.channels_last).train()
    body = model.body if first_label is None else model.backbone.body
    layouts = []
    body.register_forward_hook(lambda module, args, maps: layouts.extend((x.dtype, x.is_contiguous()) for x in maps))
    with torch.autocast("cpu", torch.bfloat16):
        if first_label is None:
            outputs = model(images)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            labels = torch.randint(3, (2, size, size))
            loss = sum(torch.nn.functional.cross_entropy(x.float(), labels) for x in outputs)
        else:
            masks = torch.zeros(1, size, size, dtype=torch.uint8)
            masks[:, 6:44, 4:40] = 1
            boxes = torch.tensor([[4.0, 6.0, 40.0, 44.0]])
            target = {"boxes": boxes, "labels": torch.tensor([first_label]), "masks": masks}
            loss = sum(model(list(images), [target, target]).values())
    loss.backward()
    assert loss.isfinite()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, grad in trained.items() if grad is None or not grad.isfinite().all()] == []
    assert {dtype for dtype, _ in layouts} == {torch.bfloat16}
    assert not any(contiguous for _, contiguous in layouts)
