"""Our models inside the detectors and segmenters of other packages: each trains a step."""

import pytest
import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN

from interlayer.models import build_network
from interlayer.models.dense.backbone import build_backbone
from interlayer.models.dense.detectors import PyramidBackbone

SIZE = 64


def train_step(model: nn.Module, loss: torch.Tensor, mechanism: str) -> None:
    """Takes a step of SGD, which must change the parameters of the mechanism."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and mechanism in name}
    assert named, f"no parameter of {mechanism}"
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    assert loss.isfinite()
    optimizer.step()
    assert any(not torch.equal(before[name], p) for name, p in named.items())


@pytest.mark.parametrize(
    ("backbone", "mechanism"),
    [("resnet18_mrla_light", "mrla"), pytest.param("resnet50_rla", "rla", marks=pytest.mark.slow)],
)
def test_upernet_of_segmentation_models_pytorch(backbone, mechanism):
    smp = pytest.importorskip("segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed")
    torch.manual_seed(0)
    model = smp.UPerNet(f"tu-{backbone}", encoder_weights=None, decoder_channels=16, classes=3)
    logits = model(torch.rand(2, 3, SIZE, SIZE))
    assert logits.shape == (2, 3, SIZE, SIZE)
    train_step(model, nn.functional.cross_entropy(logits, torch.randint(3, (2, SIZE, SIZE))), mechanism)


@pytest.mark.parametrize("backbone", ["deit_tiny_mrla_light", "deit_tiny_cb_scaled"])
def test_dpt_of_segmentation_models_pytorch(backbone):
    smp = pytest.importorskip("segmentation_models_pytorch", reason="segmentation_models_pytorch is not installed")
    torch.manual_seed(0)
    model = smp.DPT(
        f"tu-{backbone}",
        encoder_weights=None,
        decoder_intermediate_channels=(8, 8, 8, 8),
        decoder_fusion_channels=8,
        classes=3,
        dynamic_img_size=True,
    )
    logits = model(torch.rand(2, 3, SIZE, SIZE))
    assert logits.shape == (2, 3, SIZE, SIZE)
    loss = nn.functional.cross_entropy(logits, torch.randint(3, (2, SIZE, SIZE)))
    train_step(model, loss, "mrla" if "mrla" in backbone else "cb")


def test_detr_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    backbone = transformers.TimmBackboneConfig(
        backbone="resnet18_mrla_light", use_pretrained_backbone=False, out_indices=[4]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
    )
    model = transformers.DetrForObjectDetection(config).train()
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.4, 0.3]])} for _ in range(2)]
    outputs = model(torch.rand(2, 3, SIZE, SIZE), labels=labels)
    train_step(model, outputs.loss, "mrla")


def torchvision_backbone(name: str) -> nn.Module:
    network = build_network(name)
    layers = {f"layer{stage}": str(stage - 1) for stage in range(1, 5)}
    return BackboneWithFPN(network, layers, [64, 128, 256, 512], 16)


def own_backbone(name: str) -> nn.Module:
    # torchvision's pyramid keeps the stages of a network, not the modules of RLA, which all stages share
    return PyramidBackbone(build_backbone(name), channels=16, extra="pool")


@pytest.mark.parametrize(
    ("make", "name", "mechanism"),
    [
        (torchvision_backbone, "resnet18+mrla_light:channels_per_head=16", "mrla"),
        (own_backbone, "resnet18+rla", "rla"),
    ],
)
def test_faster_rcnn_of_torchvision(make, name, mechanism):
    torch.manual_seed(0)
    sampled = {"rpn_batch_size_per_image": 16, "box_batch_size_per_image": 8}
    model = FasterRCNN(make(name), 3, min_size=SIZE, max_size=SIZE, **sampled)
    targets = [{"boxes": torch.tensor([[4.0, 6.0, 40.0, 44.0]]), "labels": torch.tensor([1])} for _ in range(2)]
    losses = model([torch.rand(3, SIZE, SIZE) for _ in range(2)], targets)
    train_step(model, sum(losses.values()), mechanism)
