"""Tests that captured attention is what the network computes with, that its tokens are where they are said to be, and
that capturing leaves the network as it was."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.models.swin_transformer import window_partition
from torch import nn
from torch.overrides import TorchFunctionMode

import interlayer
from interlayer import ops
from interlayer.analysis import attention_maps, capture, capture_attention
from interlayer.analysis.attention_tokens import Movements
from interlayer.analysis.attention_watch import attention_weights

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
NETWORKS = {  # name: options, number of attentions, prefix tokens of the keys of the first and the last attention
    "vit_tiny_patch16_224": ({"img_size": 64, "depth": 2}, 2, (1, 1)),
    "deit_tiny_distilled_patch16_224": ({"img_size": 64, "depth": 2}, 2, (2, 2)),
    "vit_small_patch14_reg4_dinov2": ({"img_size": 56, "depth": 2}, 2, (5, 5)),
    "eva02_tiny_patch14_224": ({"img_size": 56, "depth": 2}, 2, (1, 1)),
    "swin_tiny_patch4_window7_224": ({"img_size": 64, "window_size": 4, "depths": (2, 2, 1, 1)}, 6, (0, 0)),
    "pvt_v2_b0": ({"depths": (1, 1, 1, 1)}, 4, (0, 0)),
    "cait_xxs24_224": ({"img_size": 64, "depth": 2}, 4, (0, 1)),
    "xcit_nano_12_p16_224": ({"img_size": 64, "depth": 2}, 2, (1, 1)),  # only its class attention is spatial
    "ceit_tiny": ({"img_size": 64, "depth": 2}, 2, (1, 1)),  # its attention between class tokens of layers is not
    "rest_lite": ({"depths": (1, 1, 1, 1)}, 4, (0, 0)),
    "maxvit_rmlp_pico_rw_256": ({"img_size": 64, "depths": (1, 1, 1, 1)}, 8, (0, 0)),
}


def make(name, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **{**NETWORKS.get(name, ({},))[0], **options}).eval()
    return fuse(model, True)


def fuse(model, fused):
    """Chooses between timm's two implementations of attention, where a module has both."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def images_for(name):
    size = NETWORKS.get(name, ({},))[0].get("img_size", 64)
    return IMAGES[:, :, :size, :size]


class FusedCalls(TorchFunctionMode):
    """Records the values and the results of fused attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.calls.append((args[2], result))
        return result


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_times_values_are_what_the_attention_returns(name):
    """The known answer of a fused attention is its own result; of others, the rows sum to one and the next test."""
    model = make(name)
    with FusedCalls() as fused:
        maps = attention_maps(model, images_for(name))
    _, count, prefixes = NETWORKS[name]
    assert len(maps) == count
    assert (maps[0].keys.prefix, maps[-1].keys.prefix) == prefixes
    names = dict(model.named_modules())
    for each in maps:
        assert each.name in names
        assert each.weights.dtype == torch.float32
        torch.testing.assert_close(each.weights.sum(-1), torch.ones_like(each.weights[..., 0]))
        keys = each.weights.shape[-1]
        assert each.keys.grid is not None
        if not each.in_windows:
            assert each.keys.prefix + each.keys.grid[0] * each.keys.grid[1] == keys
    calls = [(v, result) for v, result in fused.calls if v.shape[-2] in {each.weights.shape[-1] for each in maps}]
    fused_count = {"rest_lite": 0, "cait_xxs24_224": 2}.get(name, count)  # of CaiT, class attention alone is fused
    assert len(calls) == fused_count
    for each, (v, result) in zip(maps[count - fused_count :], calls, strict=True):
        weights = each.weights.flatten(0, 1) if each.in_windows else each.weights
        torch.testing.assert_close(weights @ v, result, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0", "xcit_nano_12_p16_224"]
)
def test_fused_and_plain_attention_have_the_same_weights(name):
    model, images = make(name), images_for(name)
    fused = attention_maps(model, images)
    plain = attention_maps(fuse(model, False), images)
    assert [each.name for each in plain] == [each.name for each in fused]
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one.weights, other.weights, atol=1e-6, rtol=1e-4)
        assert (one.queries.prefix, one.queries.grid) == (other.queries.prefix, other.queries.grid)


@pytest.mark.parametrize("case", ["plain", "bool", "float", "causal", "scale", "grouped", "masked row", "half"])
def test_weights_of_every_argument_of_fused_attention(case):
    """With the unit matrix as values, torch's attention returns its weights."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, generator=generator), torch.randn(2, 4, 6, 8, generator=generator)
    kwargs = {}
    if case == "bool":
        kwargs["attn_mask"] = torch.rand(2, 1, 5, 6, generator=generator) > 0.3
    elif case == "masked row":
        kwargs["attn_mask"] = torch.ones(5, 6, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    elif case == "float":
        kwargs["attn_mask"] = torch.randn(5, 6, generator=generator)
    elif case == "causal":
        kwargs["is_causal"] = True
    elif case == "scale":
        kwargs["scale"] = 0.7
    elif case == "grouped":
        k, kwargs["enable_gqa"] = k[:, :2], True
    elif case == "half":
        q, k = q.bfloat16(), k.bfloat16()
    v = torch.eye(6, dtype=q.dtype).expand(2, k.shape[1], 6, 6)
    expected = F.scaled_dot_product_attention(q, k, v, **kwargs)
    tolerance = 1e-2 if case == "half" else 1e-6
    weights = attention_weights(q, k, v, **kwargs)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [(64, 64), (72, 88)])
def test_windows_of_swin_are_shifted_and_padded_as_its_own(size):
    """timm's own functions, applied to the numbers of the patches, say where every token of a window is."""
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=size, window_size=4, depths=(2, 2, 2, 2), num_classes=0
    ).eval()
    maps = attention_maps(model, torch.randn(1, 3, *size))
    blocks = [block for layer in model.layers for block in layer.blocks]
    assert len(maps) == len(blocks) == 8
    for index, (each, block) in enumerate(zip(maps, blocks, strict=True)):
        height, width = (-(-side // (4 * 2 ** (index // 2))) for side in size)  # half of it, rounded up, in every stage
        numbers = torch.arange(1, height * width + 1).view(1, height, width, 1)
        shifted = torch.roll(numbers, tuple(-shift for shift in block.shift_size), (1, 2))
        rows, columns = block.window_size
        padded = F.pad(shifted, (0, 0, 0, -width % columns, 0, -height % rows))
        expected = window_partition(padded, block.window_size).flatten(1) - 1
        assert each.keys.grid == (height, width)
        if each.in_windows:
            assert torch.equal(each.keys.windows, expected)
            assert torch.equal(each.queries.windows, expected)
        else:
            assert expected.tolist() == [list(range(height * width))]


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_values_are_followed_through_what_only_moves_them(mode):
    """A shift, a padding and a division into windows are followed; another padding, and sums, are not."""

    def moved_by(network):
        movements, x = Movements(), torch.randn(1, 2, 4, 4, requires_grad=True)

        class Follow(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                movements.follow(func, result, args, kwargs or {})
                return result

        movements.start(x)
        with Follow():
            y = network(x)
        return x, y, movements.moved(y)

    x, y, moved = moved_by(lambda x: F.pad(x.roll(1, 3), (0, 2, 0, 0), mode).permute(0, 2, 3, 1).unflatten(2, (3, 2)))
    if mode == "reflect":
        assert moved is None
        return
    assert moved.source == x.shape
    expected = torch.where(moved.places < 0, torch.zeros(()), x.flatten()[moved.places.clamp_min(0)])
    assert torch.equal(y, expected), "every value is where it is said to be"
    assert moved_by(lambda x: (x.roll(1, 3) + 1).flatten(2))[2] is None


def test_attention_of_a_query_in_a_window_is_scattered_over_the_map():
    each = attention_maps(make("swin_tiny_patch4_window7_224"), IMAGES)[1]  # shifted windows
    shown = each.from_query((5, 6))
    assert shown.shape == (2, 3, 16, 16)
    torch.testing.assert_close(shown.sum((2, 3)), torch.ones(2, 3))
    window, token = (each.queries.windows == 5 * 16 + 6).nonzero()[0].tolist()
    for position, weight in zip(each.keys.windows[window].tolist(), each.weights[1, window, 2, token], strict=True):
        assert shown[1, 2, position // 16, position % 16] == weight
    assert (shown > 0).sum() <= 2 * 3 * 16, "nothing outside the window"


def test_windows_of_halo_attention_rebuild_its_output():
    """Weights and positions of queries and keys give the output of the layer from its values, also with a stride."""
    torch.manual_seed(0)
    for stride in (1, 2):
        layer = interlayer.mechanisms.HaloAttention2d(8, heads=2, block=4, halo=1, stride=stride)
        x = torch.randn(2, 8, 10, 12)
        with capture(layer, ["value"]) as values:
            (each,) = attention_maps(layer, x)
        v = values["value"][0].unflatten(1, (2, 4)).flatten(3)  # [B, heads, d, H W]
        expected = layer(x).detach()
        result = torch.zeros_like(expected).unflatten(1, (2, 4)).flatten(3)
        for window, (queries, keys) in enumerate(zip(each.queries.windows, each.keys.windows, strict=True)):
            there, inside = queries >= 0, keys >= 0
            weights = each.weights[:, window][:, :, there][..., inside]
            result[..., queries[there]] = (weights @ v[..., keys[inside]].transpose(2, 3)).transpose(2, 3)
        torch.testing.assert_close(result.flatten(1, 2).view(expected.shape), expected, atol=1e-5, rtol=1e-5)
    network = timm.create_model("halo_h0", num_classes=5)
    maps = attention_maps(network, IMAGES[:, :, :32, :32])
    assert len(maps) == sum(isinstance(m, interlayer.mechanisms.HaloAttention2d) for m in network.modules())


def test_emsa_has_the_weights_of_the_operation():
    model = make("rest_lite")
    layer = model.get_submodule("stages.3.0.attn")
    with capture(model, ["stages.3.0.attn.q", "stages.3.0.attn.kv"]) as captured:
        each = attention_maps(model, IMAGES)[3]
    q, k = captured["stages.3.0.attn.q"][0], captured["stages.3.0.attn.kv"][0].chunk(2, -1)[0]
    maps = ops.mixed_attention_maps(q, k, layer.mix.weight.flatten(1), layer.mix.bias, heads=8, scale=layer.scale)
    assert each.name == "stages.3.0.attn"
    torch.testing.assert_close(each.weights, maps.weights)


def test_torchvision_gives_the_weights_of_its_own_modules():
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(64, 16, 2, 2, 32, 64).eval()
    name = "encoder.layers.encoder_layer_1.self_attention"
    with capture(model, [name], of="input") as inputs:
        maps = attention_maps(model, IMAGES)
    x = inputs[name][0]
    with torch.no_grad():
        _, weights = model.get_submodule(name)(x, x, x, need_weights=True, average_attn_weights=False)
    assert [each.name for each in maps][1] == name
    torch.testing.assert_close(maps[1].weights, weights)
    assert (maps[1].keys.prefix, maps[1].keys.grid) == (1, (4, 4))


def test_transformers_gives_the_weights_that_it_returns():
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**options, image_size=64, attn_implementation="eager")
    eager = transformers.ViTForImageClassification(config).eval()
    config = transformers.ViTConfig(**options, image_size=64, attn_implementation="sdpa")
    fused = transformers.ViTForImageClassification(config).eval()
    fused.load_state_dict(eager.state_dict())
    expected = eager(IMAGES, output_attentions=True).attentions
    for model in (eager, fused):
        maps = attention_maps(model, IMAGES)
        assert len(maps) == 2
        for each, weights in zip(maps, expected, strict=True):
            torch.testing.assert_close(each.weights, weights.detach(), atol=1e-6, rtol=1e-4)
            assert (each.keys.prefix, each.keys.grid) == (1, (4, 4))


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base", "mla", "cb", "cb:scaled=true"])
def test_mechanisms_do_not_hide_attention_nor_add_any(mechanism):
    from interlayer.models.build import build_network

    options = {"model_options": {"img_size": 64, "depth": 4}, "num_classes": 5, "image_size": 64}
    model = build_network(f"vit_tiny_patch16_224+{mechanism}", **options)
    maps = attention_maps(model, IMAGES)
    assert [each.name for each in maps] == [f"blocks.{block}.attn" for block in range(4)]
    if mechanism.startswith("mrla"):
        with interlayer.switched_off(model):
            plain = attention_maps(model, IMAGES)
        torch.testing.assert_close(maps[0].weights, plain[0].weights)
        assert not torch.allclose(maps[3].weights, plain[3].weights), "the mechanism has run"


def state_of(model):
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    modes = [m.training for m in model.modules()]
    return hooks, modes, torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state().tolist()


def test_the_network_is_left_as_it_was():
    """Hooks, modes, flags and random numbers are as before, also after an error; outputs are not changed."""
    model = make("vit_tiny_patch16_224").train()
    model.blocks[1].eval()
    before = state_of(model)
    attention_maps(model, IMAGES)
    assert state_of(model) == before
    random_state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="channels"), capture_attention(model):
        model(IMAGES[:, :1])
    torch.set_rng_state(random_state)  # the network was in training mode
    assert state_of(model) == before
    model.eval()
    expected = model(IMAGES)
    with capture_attention(model):
        assert torch.equal(model(IMAGES), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("part", ["forward_features", "forward_intermediates"])
def test_a_part_of_a_network_has_the_weights_of_the_whole(part):
    """Its modules run one after another, and tokens [B, N, C] must not be taken for a list of images."""
    model = make("vit_tiny_patch16_224")
    expected = attention_maps(model, IMAGES)
    found = attention_maps(model, IMAGES, forward=lambda m, images: getattr(m, part)(images))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.queries.prefix, ours.queries.grid) == (theirs.queries.prefix, theirs.queries.grid) == (1, (4, 4))
        torch.testing.assert_close(ours.weights, theirs.weights)


def test_capturing_dropout_changes_nothing_and_gives_the_weights_before_it():
    model = torchvision.models.VisionTransformer(64, 16, 1, 2, 16, 32, attention_dropout=0.5, num_classes=5).train()

    def run():
        torch.manual_seed(1)
        return model(IMAGES)

    expected = run()
    with capture_attention(model) as found:
        torch.testing.assert_close(run(), expected)
    torch.testing.assert_close(found[0].weights.sum(-1), torch.ones(2, 2, 17))
    assert not found[0].weights.requires_grad


def test_weights_that_the_network_changes_in_place_are_kept():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv = nn.Conv2d(3, 8, 16, 16), nn.Linear(8, 24)

        def forward(self, images):
            q, k, v = self.qkv(self.embed(images).flatten(2).transpose(1, 2)).chunk(3, -1)
            weights = (q[:, None] @ k[:, None].transpose(-2, -1)).softmax(-1)
            weights *= 0.5
            return weights @ v[:, None]

    (found,) = attention_maps(Halved().eval(), IMAGES)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(2, 1, 16))


def test_a_few_patches_are_no_class_tokens():
    """The last stage of Hiera has four patches, whose places are not known."""
    model = timm.create_model("hiera_tiny_224", img_size=64, num_classes=5).eval()
    assert attention_maps(model, IMAGES)[-1].queries.prefix == 0


def test_queries_with_a_stride_are_where_their_pixels_are():
    layer = interlayer.mechanisms.HaloAttention2d(8, heads=1, block=4, halo=1, stride=2)
    (each,) = attention_maps(layer, torch.randn(2, 8, 8, 8))
    queries, keys = each.queries.positions(), each.keys.positions()
    torch.testing.assert_close(queries.view(4, 4, 2), keys.view(8, 8, 2)[::2, ::2])


def test_capture_follows_several_passes_and_reduces_each_attention():
    model = make("vit_tiny_patch16_224")
    with torch.no_grad(), capture_attention(model, reduce=lambda each: each.weights.mean()) as found:
        model(IMAGES)
        model(IMAGES[:1])
    assert len(found) == 4
    for mean in found:
        assert float(mean) == pytest.approx(1 / 17)
    with torch.no_grad(), capture_attention(model) as found:
        with pytest.raises(RuntimeError):
            model(IMAGES[:, :1])
        model(IMAGES)
    assert [each.name for each in found] == ["blocks.0.attn", "blocks.1.attn"], "after an error inside the block"


def test_compiled_networks_have_the_same_weights():
    model = make("vit_tiny_patch16_224")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IMAGES)
    for one, other in zip(attention_maps(model, IMAGES), attention_maps(compiled, IMAGES), strict=True):
        assert one.name == other.name
        torch.testing.assert_close(one.weights, other.weights)


def test_networks_without_spatial_attention_are_refused():
    with pytest.raises(ValueError, match="ResNet has no spatial attention: expected a network that computes a softmax"):
        attention_maps(timm.create_model("resnet10t", num_classes=5), IMAGES)
    with pytest.raises(ValueError, match=r"no spatial attention \(its attention is between channels\)"):
        attention_maps(timm.create_model("edgenext_xx_small", depths=(1, 1, 1, 1), num_classes=5), IMAGES)


@pytest.mark.parametrize("mechanism", ["nl", "aa"])
def test_attention_that_was_attached_to_a_cnn_is_found(mechanism):
    model = interlayer.attach(timm.create_model("resnet26", num_classes=5), mechanism, image_size=64)
    for each in attention_maps(model, IMAGES):
        assert each.queries.grid == each.keys.grid
        assert each.weights.shape[2:] == (each.keys.grid[0] * each.keys.grid[1],) * 2


def test_a_classifier_and_a_gate_are_no_attention():
    """A softmax over classes, or over the pixels of a map that no product of queries and keys gave, is left out."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 4, 16, stride=16), nn.Linear(4, 5)

        def forward(self, x):
            x = self.stem(x).flatten(2)  # [B, C, N]
            pooled = (x * x.softmax(-1)).sum(-1)
            scores = x.transpose(1, 2)[:, None] @ x[:, None]
            return self.head(pooled).softmax(-1) + scores.softmax(-1).sum() * 0

    (each,) = attention_maps(Network(), IMAGES)
    assert each.weights.shape == (2, 1, 16, 16)
    assert each.keys.grid == (4, 4)


def test_queries_are_named_by_row_and_column():
    each = attention_maps(make("vit_tiny_patch16_224"), IMAGES)[0]
    assert torch.equal(each.from_query("class"), each.weights[:, :, 0, 1:].unflatten(-1, (4, 4)))
    assert torch.equal(each.from_query((2, 1)), each.weights[:, :, 1 + 9, 1:].unflatten(-1, (4, 4)))
    with pytest.raises(ValueError, match=r"blocks.0.attn has queries in 4 rows and 4 columns, got 4, 0"):
        each.from_query((4, 0))
    swin = attention_maps(make("swin_tiny_patch4_window7_224"), IMAGES)[0]
    with pytest.raises(ValueError, match="has no class token"):
        swin.from_query("class")
    class_attention = attention_maps(make("cait_xxs24_224"), IMAGES)[-1]
    with pytest.raises(ValueError, match="has no queries in the image"):
        class_attention.from_query((0, 0))
