"""Were these wrong, the context would be broadcast in other places, or a network would not come back as it was."""

import copy

import pytest
import timm
import torch

import interlayer
from interlayer.mechanisms import ContextBroadcast

VIT = {"img_size": 32, "patch_size": 8, "depth": 4, "num_classes": 5}


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **VIT)


def places(model):
    return [name.removesuffix(".cb") for name, m in model.named_modules() if isinstance(m, ContextBroadcast)]


def test_the_module_is_equation_1():
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ContextBroadcast()(x), 0.5 * x + 0.5 * x.mean(dim=1, keepdim=True))
    scaled = ContextBroadcast(8, scaled=True)
    torch.testing.assert_close(scaled(x), x, msg="Λ starts at zero")
    torch.nn.init.normal_(scaled.scale)
    torch.testing.assert_close(scaled(x), x + scaled.scale * x.mean(dim=1, keepdim=True))
    grid = torch.randn(2, 3, 4, 8)
    torch.testing.assert_close(ContextBroadcast()(grid).flatten(1, 2), ContextBroadcast()(grid.flatten(1, 2)))
    assert list(ContextBroadcast().parameters()) == []
    with pytest.raises(ValueError, match="give channels="):
        ContextBroadcast(scaled=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["blocks.2.mlp", "blocks.3.mlp"]),
        ({"blocks": "all"}, [f"blocks.{i}.mlp" for i in range(4)]),
        ({"where": "middle"}, ["blocks.2.mlp.act", "blocks.3.mlp.act"]),
        ({"where": "front"}, ["blocks.2.mlp", "blocks.3.mlp"]),
        ({"where": "attention"}, ["blocks.2.attn", "blocks.3.attn"]),
        ({"where": "both"}, ["blocks.2.attn", "blocks.2.mlp", "blocks.3.attn", "blocks.3.mlp"]),
    ],
)
def test_where_it_goes(options, expected):
    """Tables 2 and 4, against the part run by hand."""
    plain = vit().eval()
    model = interlayer.attach(copy.deepcopy(plain), "cb", **options).eval()
    assert places(model) == expected
    x = torch.randn(2, 17, 192)
    part, own = model.get_submodule(expected[0]), plain.get_submodule(expected[0])
    if "act" in expected[0]:
        x = torch.randn(2, 17, 768)
    broadcast = ContextBroadcast()
    by_hand = own(broadcast(x)) if options.get("where") == "front" else broadcast(own(x))
    torch.testing.assert_close(part(x), by_hand)
    image = torch.randn(1, 3, 32, 32)
    assert not torch.allclose(model(image), plain(image))
    torch.testing.assert_close(interlayer.detach(model)(image), plain(image))
    assert type(model) is type(plain)


@pytest.mark.parametrize(
    "name", ["mixer_s32_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0", "pit_ti_224", "deit_tiny_patch16_224"]
)
def test_timms_transformers_and_mixers(name):
    if name == "pvt_v2_b0":
        with pytest.raises(interlayer.AttachError, match="convolves"):
            interlayer.attach(timm.create_model(name), "cb")
        return
    with torch.device("meta"):
        model = interlayer.attach(timm.create_model(name), "cb", scaled=True)
    blocks = len(places(model))
    assert blocks == {"mixer_s32_224": 4, "pit_ti_224": 6}.get(name, 6)
    added = sum(p.numel() for n, p in model.named_parameters() if n.endswith("cb.scale"))
    assert added > 0


def test_a_pyramid_can_be_spared():
    """Section 4.4: blocks whose features go to a pyramid keep their tokens apart."""
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2)
    interlayer.attach(model, "cb", blocks="all", spare_pyramid=True, image_size=64)
    assert "layers.0.blocks.1.mlp" not in places(model)
    assert "layers.0.blocks.0.mlp" in places(model)


def test_it_composes_with_layer_attention_in_both_orders(tmp_path):
    models = []
    for order in (("cb", "mrla_light"), ("mrla_light", "cb")):
        model = vit()
        for mechanism in order:
            interlayer.attach(model, mechanism)
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
        models.append(model.eval())
    models[1].load_state_dict(models[0].state_dict())
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(models[0](image), models[1](image))
    interlayer.save_weights(models[0], tmp_path / "a.safetensors")
    interlayer.load_weights(models[1], tmp_path / "a.safetensors")
    compiled = torch.compile(models[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(image), models[0](image))


def test_what_is_no_transformer_is_refused():
    with pytest.raises(interlayer.AttachError, match="context broadcasting is for transformers and mixers"):
        interlayer.attach(timm.create_model("resnet18"), "cb")
    with pytest.raises(ValueError, match="where must be"):
        interlayer.attach(vit(), "cb", where="tail")
    model = interlayer.attach(vit(), "cb")
    with pytest.raises(interlayer.AttachError, match="already has context broadcasting"):
        interlayer.attach(model, "cb")
