"""The kernels of layer attention in the backbone of a detector with frozen norms."""

import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet

import interlayer
from interlayer.models.dense.backbone import build_backbone

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # in Triton's interpreter


@pytest.mark.parametrize("frozen_norms", ["statistics", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_run_with_frozen_norms_and_not_backwards_in_frozen_stages(frozen_norms, monkeypatch):
    from interlayer.ops._triton import light_layer

    torch.manual_seed(0)
    network = ResNet(BasicBlock, (1, 1, 1, 1), channels=(16, 16, 16, 16), stem_width=16)
    interlayer.attach(network, "mrla_light", channels_per_head=8, stages=[[f"layer{n}.0"] for n in range(1, 5)])
    body = build_backbone(network, frozen_norms=frozen_norms, freeze_stages=1)
    body = body.to(DEVICE, memory_format=torch.channels_last)
    launched = []
    original = light_layer.run_kernel
    monkeypatch.setattr(
        light_layer,
        "run_kernel",
        lambda kernel, *a, **k: (launched.append(kernel.fn.__name__), original(kernel, *a, **k)),
    )
    image = torch.rand(1, 3, 64, 64, device=DEVICE).contiguous(memory_format=torch.channels_last)
    results = []
    for backend in ("reference", "triton"):
        body.zero_grad()
        with interlayer.backend(backend):
            maps = body(image)
            sum(x.square().sum() for x in maps).backward()
        results.append([*maps, *(p.grad for p in body.parameters() if p.requires_grad)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert launched.count("attention_kernel") == 4
    assert launched.count("gradient_kernel") == 3
