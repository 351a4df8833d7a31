"""Tests of context broadcasting in transformers: where it is placed, and that it can be removed."""

import copy

import pytest
import timm
import torch

import interlayer
from interlayer.mechanisms import ContextBroadcast, UniformHeadAttention
from interlayer.models.weights import start_from

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
    """Tables 2 and 4, compared with the component run directly."""
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
    """Section 4.4: blocks with features that a pyramid reads have no broadcasting."""
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2)
    interlayer.attach(model, "cb", blocks="all", spare_pyramid=True, image_size=64)
    assert "layers.0.blocks.1.mlp" not in places(model)
    assert "layers.0.blocks.0.mlp" in places(model)


@pytest.mark.parametrize(
    ("depth", "given", "expected"),
    [(12, True, [3, 5, 7, 11]), (24, True, [7, 11, 15, 23]), (12, (2, 5, 11), [2, 5, 11]), (12, [0], [0])],
)
def test_a_plain_transformer_spares_every_block_that_the_pyramid_reads(depth, given, expected):
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **{**VIT, "depth": depth})
    interlayer.attach(model, "cb", blocks="all", spare_pyramid=given)
    spared = [number for number in range(depth) if f"blocks.{number}.mlp" not in places(model)]
    assert spared == expected


@pytest.mark.parametrize("given", [3, "3", [], [3.0], [True], [-1]])
def test_a_pyramid_is_given_by_the_numbers_of_blocks(given):
    with pytest.raises(ValueError, match="spare_pyramid must be true, false or the numbers of blocks from 0 such as"):
        interlayer.attach(vit(), "cb", spare_pyramid=given)


def test_a_block_that_does_not_exist_cannot_be_spared():
    with pytest.raises(interlayer.AttachError, match=r"has the blocks 0 to 3, got spare_pyramid=\[2, 4\]"):
        interlayer.attach(vit(), "cb", spare_pyramid=[2, 4])
    with pytest.raises(interlayer.AttachError, match=r"no blocks left .* spare_pyramid leaves out \[2, 3\]"):
        interlayer.attach(vit(), "cb", spare_pyramid=[2, 3])


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


def test_gradients_go_through_it_as_tokens_do():
    """Eq. 1 is its own transpose. The explicit backward pass, also of second order, must agree with autograd."""
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ContextBroadcast(), (x,))
    assert torch.autograd.gradgradcheck(ContextBroadcast(), (x,))
    compiled = torch.compile(ContextBroadcast(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), 0.5 * x + 0.5 * x.mean(1, keepdim=True))


def test_the_half_folds_into_the_last_linear_layer():
    """With halved weights, broadcasting adds the mean, which is the same function."""
    mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = ContextBroadcast()(mlp(x))
    with torch.no_grad():
        mlp[-1].weight.mul_(0.5)
        mlp[-1].bias.mul_(0.5)
    torch.testing.assert_close(mlp(x) + mlp(x).mean(1, keepdim=True), expected)


@pytest.mark.parametrize("where", ["head", "wide_head", "extra_head"])
def test_a_uniform_head(where):
    """Table 1, compared with attention computed explicitly per head from the trained weights that are kept."""
    plain = vit().eval()
    model = interlayer.attach(copy.deepcopy(plain), "cb", where=where, blocks="all").eval()
    layers = [m for m in model.modules() if isinstance(m, UniformHeadAttention)]
    assert len(layers) == 4
    old = plain.blocks[0].attn  # 3 heads of 64 channels
    x = torch.randn(2, 17, 192)
    q, k, v = old.qkv(x).reshape(2, 17, 3, 3, 64).permute(2, 0, 3, 1, 4)
    outputs = [torch.softmax(q[:, h] @ k[:, h].transpose(1, 2) / 8, -1) @ v[:, h] for h in range(3)]
    if where != "extra_head":
        outputs[2] = v[:, 2].mean(1, keepdim=True).expand(-1, 17, -1)
    torch.testing.assert_close(layers[0](x), old.proj(torch.cat(outputs, -1)))  # an extra head starts as nothing
    added = sum(p.numel() for p in layers[0].parameters()) - sum(p.numel() for p in old.parameters())
    assert added == {"head": -2 * 193 * 64, "wide_head": 0, "extra_head": 2 * 192 * 64 + 64}[where]
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad is not None for p in layers[-1].parameters())
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(interlayer.detach(model)(image), plain(image))


def test_a_wide_head_scales_scores_by_the_channels_of_its_keys():
    """Trained from scratch, q · k of 96 channels is divided by sqrt(96), not by the sqrt(64) of the heads replaced."""
    layer = UniformHeadAttention(192, 3, "wide_head")
    x = torch.randn(2, 5, 192)
    q, k = layer.qk(x).reshape(2, 5, 2, 2, 96).permute(2, 0, 3, 1, 4)
    v = layer.v(x).reshape(2, 5, 3, 64).transpose(1, 2)
    heads = [torch.softmax(q[:, h] @ k[:, h].transpose(1, 2) / 96**0.5, -1) @ v[:, h] for h in range(2)]
    heads.append(v[:, 2].mean(1, keepdim=True).expand(-1, 5, -1))
    torch.testing.assert_close(layer(x), layer.proj(torch.cat(heads, -1)))


def test_a_wide_head_of_an_earlier_file_computes_what_it_computed(tmp_path, monkeypatch):
    """Earlier versions divided by sqrt(64), and their files do not describe the scale."""
    model = interlayer.attach(vit(), "cb", where="wide_head").eval()
    for layer in (earlier := [m for m in model.modules() if isinstance(m, UniformHeadAttention)]):
        layer.scale = 64**-0.5
    image = torch.randn(1, 3, 32, 32)
    expected = model(image)
    with monkeypatch.context() as patch:
        describe = UniformHeadAttention.describe
        patch.setattr(
            UniformHeadAttention, "describe", lambda self: {k: v for k, v in describe(self).items() if k != "scale"}
        )
        interlayer.save_weights(model, tmp_path / "earlier.safetensors")
        state_dict = model.state_dict()
    assert earlier
    for load in (
        lambda other: interlayer.load_weights(other, tmp_path / "earlier.safetensors"),
        lambda other: start_from(other, tmp_path / "earlier.safetensors"),
        lambda other: other.load_state_dict(state_dict),
    ):
        other = interlayer.attach(vit(), "cb", where="wide_head").eval()
        load(other)
        torch.testing.assert_close(other(image), expected)
    interlayer.save_weights(other, tmp_path / "now.safetensors")
    again = interlayer.attach(vit(), "cb", where="wide_head").eval()
    interlayer.load_weights(again, tmp_path / "now.safetensors")
    torch.testing.assert_close(again(image), expected)


def test_uniform_heads_are_refused_where_they_do_not_fit():
    with pytest.raises(interlayer.AttachError, match="no scaled form"):
        interlayer.attach(vit(), "cb", where="head", scaled=True)
    with pytest.raises(interlayer.AttachError, match="where timm's plain Attention was expected"):
        interlayer.attach(timm.create_model("mixer_s32_224", img_size=64), "cb", where="head")
    with pytest.raises(interlayer.AttachError, match="norms, a gate or dropout"):
        interlayer.attach(timm.create_model("vit_tiny_patch16_224", **VIT, qk_norm=True), "cb", where="extra_head")


def test_an_extra_head_starts_as_nothing_without_biases_too():
    plain = timm.create_model("vit_tiny_patch16_224", **VIT, qkv_bias=False, proj_bias=False).eval()
    model = interlayer.attach(copy.deepcopy(plain), "cb", where="extra_head")
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model(image), plain(image))
    assert model.blocks[3].attn.proj.bias is None


@pytest.mark.parametrize("name", ["coatnet_pico_rw_224", "swin_tiny_patch4_window7_224"])
def test_attention_over_something_else_than_an_images_tokens_is_refused(name):
    """CoAtNet's attention returns [B, C, H, W] and Swin's returns windows, so a mean would not be over the image."""
    model = timm.create_model(name)
    with pytest.raises(interlayer.AttachError, match="their mean would not be over the image"):
        interlayer.attach(model, "cb", where="attention")


def test_flat_input_is_refused():
    with pytest.raises(ValueError, match=r"expected tokens of \[B, N, C\]"):
        ContextBroadcast()(torch.randn(2, 3))
    both = torch.randn(4, 2, 5, 3)
    torch.testing.assert_close(torch.func.vmap(ContextBroadcast())(both)[1], ContextBroadcast()(both[1]))


@pytest.mark.parametrize("other", [{"blocks": "all"}, {"where": "front"}, {"where": "attention"}, None])
def test_weights_of_other_places_are_refused(other, tmp_path):
    """Without parameters, only the saved description distinguishes networks with different functions."""
    saved = interlayer.attach(vit(), "cb")
    interlayer.save_weights(saved, tmp_path / "cb.safetensors")
    interlayer.load_weights(interlayer.attach(vit(), "cb"), tmp_path / "cb.safetensors")
    model = vit() if other is None else interlayer.attach(vit(), "cb", **other)
    with pytest.raises(ValueError, match=r"context broadcasting at blocks\.\d|was saved with before=False"):
        interlayer.load_weights(model, tmp_path / "cb.safetensors")


def test_plain_weights_start_a_network_that_broadcasts(tmp_path):
    interlayer.save_weights(vit(), tmp_path / "plain.safetensors")
    interlayer.load_weights(interlayer.attach(vit(), "cb"), tmp_path / "plain.safetensors")


@pytest.mark.parametrize("scaled", ["maybe", "no", 1])
def test_a_flag_is_a_flag(scaled):
    with pytest.raises(ValueError, match="scaled must be true or false"):
        interlayer.attach(vit(), "cb", scaled=scaled)
