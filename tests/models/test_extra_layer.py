"""The vision transformers of eight layers with one more layer of self-attention or one more MLP."""

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import count_flops, count_parameters

SMALL = {"img_size": 32, "embed_dim": 24, "num_heads": 2, "num_classes": 5}


def test_both_layers_add_nearly_as_much() -> None:
    """CB 3.1 compares them at nearly equal parameters and FLOPs. An MLP of the usual width would add twice as much."""
    with torch.device("meta"):
        plain, msa, mlp = (timm.create_model(name) for name in ("vit_small_8", "vit_small_8_msa", "vit_small_8_mlp"))
    assert len(plain.blocks) == 8
    more = [count_parameters(model) - count_parameters(plain) for model in (msa, mlp)]
    assert more == [592_128, 591_744]
    flops = [count_flops(model) - count_flops(plain) for model in (msa, mlp)]
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize("kind", ["msa", "mlp"])
def test_the_layer_has_a_shortcut_and_trains(kind: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(f"vit_small_8_{kind}", **SMALL)
    layer, tokens = model.blocks[-1], torch.randn(2, 5, 24)
    inner = layer.attn if kind == "msa" else layer.mlp
    torch.testing.assert_close(layer(tokens), tokens + inner(layer.norm(tokens)))
    images = torch.randn(2, 3, 32, 32)
    model(images).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    features = timm.create_model(f"vit_small_8_{kind}", features_only=True, out_indices=(8,), **SMALL)
    assert features(images)[0].shape == (2, 24, 2, 2)
    expected = model.eval()(images)
    interlayer.attach(model, "mrla_light", init="identity")
    assert torch.equal(model(images), expected)
