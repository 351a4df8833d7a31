"""Tests of the similarity of the queries of consecutive layers."""

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.analysis import plot_query_similarity, query_similarities, query_similarity, random_similarity
from interlayer.analysis.capture import hooked
from interlayer.analysis.queries import keep_queries
from interlayer.analysis.scores import attention_stages

IMAGES = torch.randn(3, 3, 64, 64)
MECHANISMS = ["mrla_light", "mrla_base", "mla", "mrla_linear"]


def make(mechanism, name="cnn", layers=(2, 2, 1, 2), **options):
    """A small network: a ResNet with 2, 2, 1 and 2 blocks, or a transformer with three stages of two blocks."""
    if name == "cnn":
        model = timm.create_model("resnet10t", layers=layers, channels=(32, 64, 64, 64), num_classes=5)
    else:
        model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, embed_dim=64, num_heads=2)
    return interlayer.attach(model, mechanism, image_size=64, **options)


def test_cosines_by_hand():
    """The sign does not count, nor does the length, and a query of zero is similar to nothing."""
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    second = torch.tensor([[-2.0, 0.0], [0.0, 1.0], [4.0, 3.0], [1.0, 1.0]])
    torch.testing.assert_close(query_similarity([first, second])[:, 0], torch.tensor([1.0, 0.0, 0.96, 0.0]))
    assert query_similarity([first, second, first]).shape == (4, 2)
    with pytest.raises(ValueError, match="at least two layers, got 1"):
        query_similarity([first])


@pytest.mark.parametrize("channels", [1, 2, 32])
def test_random_directions(channels):
    """The dashed line of the figure: what queries without any relation would have."""
    first, second = torch.randn(2, 200_000, channels)
    found = float(nn.functional.cosine_similarity(first, second, dim=-1).abs().mean())
    assert random_similarity(channels) == pytest.approx(found, abs=3e-3)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_queries_are_those_of_the_scores(mechanism, name):
    """Queries that the attention does not use would say nothing about it. Keys come from the same function."""
    model = make(mechanism, name).eval()
    queries, keys = {}, {}

    def keep(module, args, kwargs):
        keep_queries(queries)(module, args, kwargs)
        keys[module] = module.queries_and_keys(args[0], token_grid=args[6] if len(args) > 6 else None)[1]

    stage = attention_stages(model)[1]
    scores = interlayer.layer_scores(model, IMAGES)[1].scores
    with torch.no_grad(), hooked(model, before={mechanism: keep for _, mechanism in stage}):
        model(IMAGES)
    (_, first), (_, second) = stage
    if mechanism == "mla":  # every layer derives the keys itself
        own = second.project(torch.stack([_pooled(model, layer, IMAGES) for layer in (first, second)]).flatten(0, 1))[1]
        pair = own.unflatten(0, (2, -1)).unflatten(-1, (second.heads, -1))
    else:
        pair = torch.stack([keys[first], keys[second]])
    query = queries[second]
    if mechanism == "mrla_linear":
        kernel = [(_phi(query) * _phi(key)).sum(-1) for key in pair]
        expected = torch.stack(kernel, -1) / (sum(kernel)[..., None] + 1e-6)
    else:
        expected = torch.stack([(query * key).sum(-1) for key in pair], -1) * query.shape[-1] ** -0.5
        expected = expected[..., 1].sigmoid() if mechanism == "mrla_light" else expected.softmax(-1)
    found = scores[:, :, 1, 1] if mechanism == "mrla_light" else scores[:, :, 1, :2]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert found.std() > 5e-4, "scores that are all alike would agree with any query"


def _phi(x):
    return nn.functional.elu(x) + 1


def _pooled(model, layer, images):
    """The average of the normalized map of a layer."""
    from interlayer.mechanisms.layer_attention import layer_norm_of_map

    kept = []
    with torch.no_grad(), hooked(model, before={layer: lambda module, args, kwargs: kept.append(args[0])}):
        model(images)
    return layer_norm_of_map(layer.norm_in, kept[0]).mean((2, 3))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_layers_after_the_first_of_each_stage_are_measured_and_the_model_is_left_as_it_was(mechanism):
    model = make(mechanism).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stages = query_similarities(model, [IMAGES[:2], IMAGES[2:]])
    assert [stage.blocks for stage in stages] == [("layer1.1",), ("layer2.1",), ("layer4.1",)]
    for stage, width in zip(stages, (32, 64, 64), strict=True):
        assert stage.similarities.shape == (3, width // 32, 1)
        assert stage.channels == 32
        assert ((stage.similarities >= 0) & (stage.similarities <= 1)).all()
    whole = query_similarities(model, IMAGES)
    torch.testing.assert_close(whole[0].similarities, stages[0].similarities, atol=1e-4, rtol=0)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_outputs_do_not_change_while_queries_are_kept():
    model = make("mrla_light").eval()
    plain = model(IMAGES)
    keep = {mechanism: keep_queries({}) for layers in attention_stages(model) for _, mechanism in layers}
    with hooked(model, before=keep):
        assert torch.equal(model(IMAGES), plain)


@pytest.mark.parametrize("mechanism", ["mrla_light", pytest.param("mrla_base", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_kernels_compute_with_the_same_queries(mechanism, name):
    """A kernel may compute the end of a block with the attention: its input is then not the output of the block."""
    model = make(mechanism, name).eval().to(memory_format=torch.channels_last)
    images = IMAGES[:1].contiguous(memory_format=torch.channels_last)
    expected = query_similarities(model, images)
    open_ends = []
    layers = [mechanism for layers in attention_stages(model) for _, mechanism in layers]
    note = dict.fromkeys(layers, lambda module, args, kwargs: open_ends.append(len(args) > 5 and args[5] is not None))
    with interlayer.backend("triton"), hooked(model, before=note):
        found = query_similarities(model, images)
    assert all(open_ends) if name == "cnn" else not any(open_ends)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.similarities, other.similarities, atol=1e-4, rtol=0)


def test_layers_with_equal_maps_and_weights_have_similarity_one():
    """Blocks that add nothing return what they get, so that equal projections give equal queries."""
    model = make("mrla_light", init="identity")
    first, second = model.layer1[0].mrla, model.layer1[1].mrla
    with torch.no_grad():
        model.layer1[1].bn2.weight.zero_()
        model.layer1[1].bn2.bias.zero_()
        second.query.weight.copy_(-2 * first.query.weight)
    similarities = query_similarities(model, IMAGES)[0].similarities
    torch.testing.assert_close(similarities, torch.ones_like(similarities))


def test_models_without_queries_say_so():
    with pytest.raises(ValueError, match="has no layer attention attached"):
        query_similarities(timm.create_model("resnet10t"), IMAGES)
    with pytest.raises(ValueError, match="no stage of ResNet has two layers"):
        query_similarities(make("mrla_base", layers=(1, 1, 1, 1)), IMAGES)
    with pytest.raises(ValueError, match=r"layer1.0 has no queries: attention=False"):
        query_similarities(make("mrla_light", attention=False), IMAGES)
    with pytest.raises(ValueError, match="no images"):
        query_similarities(make("mrla_base"), [])


def test_the_histogram_counts_every_query_once_and_layers_have_their_means():
    stages = query_similarities(make("mrla_base"), IMAGES)
    figure = plot_query_similarity({"a": stages, "b": stages[:1]})
    histogram, by_layer = figure.axes[:2]
    assert sum(patch.get_height() for patch in histogram.patches) == pytest.approx(100)
    shown = [float(y) for container in by_layer.containers for y in container.lines[0].get_ydata()]
    assert shown == pytest.approx([float(stage.means[0]) for stage in stages], abs=1e-6)
    assert [label.get_text() for label in by_layer.get_xticklabels()] == [stage.blocks[0] for stage in stages]
    assert len(figure.axes) == 4
    with pytest.raises(ValueError, match="no networks"):
        plot_query_similarity({})
