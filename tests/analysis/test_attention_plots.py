"""Tests that plots of attention show what was measured, and that a query is found and drawn where it is."""

import math

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import (
    AttentionRow,
    BroadcastScale,
    HeadSimilarity,
    LayerDistance,
    LayerEntropy,
    LayerJacobian,
    attention_maps,
    plot_attention_distance,
    plot_attention_entropy,
    plot_attention_jacobian,
    plot_broadcast_scales,
    plot_emsa_heads,
    plot_query_attention,
    query_attention,
)

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
PICTURE = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def entropies(values, class_token=True, bound=None):
    bound = math.log(17) if bound is None else bound
    return [
        LayerEntropy(
            f"blocks.{i}.attn", value, value - 0.5, value + 0.25, value / 2 if class_token else None, bound, 3, 8
        )
        for i, value in enumerate(values)
    ]


def curves(axes):
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}


def test_entropy_has_curves_bands_and_the_bound():
    figure = plot_attention_entropy({"plain": entropies([2.0, 2.5]), "cb": entropies([1.0, 1.5])})
    every, of_class = figure.axes
    assert curves(every) == {"plain": [2.0, 2.5], "cb": [1.0, 1.5]}
    edges = every.collections[0].get_paths()[0].vertices[:, 1]
    assert edges.min() == 1.5, "the 15th percentile"
    assert edges.max() == 2.75, "the 85th percentile"
    assert next(list(line.get_ydata()) for line in of_class.lines if len(line.get_xdata()) == 2) == [1.0, 1.25]
    assert any(text.get_text() == "uniform attention: log 17 = 2.83" for text in every.texts)
    assert "15th to 85th percentile" in every.get_title()
    assert "8 images, 3 heads per layer" in figure.get_suptitle()


def test_networks_without_a_class_token_have_one_panel_and_bounds_of_their_own():
    layers = {"plain": entropies([1.0, 1.5]), "windows": entropies([2.0] * 50, class_token=False, bound=math.log(49))}
    figure = plot_attention_entropy(layers)
    assert len(figure.axes) == 2
    assert sum(line.get_linestyle() == ":" for line in figure.axes[0].lines) == 2
    assert sum(line.get_linestyle() == ":" for line in figure.axes[1].lines) == 1, "only of networks with a class token"
    assert len(figure.axes[0].get_xticks()) <= 16, "fifty layers are not all labeled"
    assert len(plot_attention_entropy({"windows": layers["windows"]}).axes) == 1
    with pytest.raises(ValueError, match="no networks"):
        plot_attention_entropy({})


def test_distance_shows_heads_and_uniform_attention():
    layers = [LayerDistance("a", 0.3, (0.2, 0.4), 0.5, 6), LayerDistance("b", 0.2, (0.1, 0.3), 0.5, 6)]
    figure = plot_attention_distance({"plain": layers}, per_query=True)
    (axes,) = figure.axes
    assert curves(axes)["plain"] == [0.3, 0.2]
    assert curves(axes)["uniform attention to the same keys"] == [0.5, 0.5]
    points = [value for line in axes.lines if line.get_marker() == "." for value in line.get_ydata()]
    assert points == [0.2, 0.4, 0.1, 0.3]
    assert "mean over 6 images" in figure.get_suptitle()
    assert "mean over queries" in axes.get_ylabel()
    assert "over pairs" in plot_attention_distance({"plain": layers}).axes[0].get_ylabel()


def test_jacobian_has_the_two_scores_of_the_paper_and_one_panel_for_each_network():
    values = torch.linspace(0.1, 0.9, 7).numpy()
    layers = [LayerJacobian("a", 0.5, 1.0, values, 2 * values, 17, 3, 1)]
    figure = plot_attention_jacobian({"plain": layers, "cb": layers * 3})
    two_scores, plain, cb, bar = figure.axes
    assert max(two_scores.lines[0].get_ydata()) == pytest.approx(0.5), "at equal weights"
    assert (plain.get_title(), cb.get_title()) == ("plain", "cb")
    assert plain.collections[-1].get_offsets().tolist() == [[1.0, 0.5]]
    assert bar.get_ylabel() == "attention layer"
    bound = plain.lines[0]
    assert bound.get_ydata()[-1] == pytest.approx(1 - 1 / 17)


def test_scales_are_drawn_by_component_and_zeros_are_said():
    layers = [BroadcastScale("blocks.2.mlp", 0.3, -0.1, 8), BroadcastScale("blocks.3.mlp", 0.5, 0.2, 8)]
    ratio, mean = plot_broadcast_scales({"cb": layers}).axes
    assert curves(ratio)["cb"] == [0.3, 0.5]
    assert list(mean.lines[0].get_ydata()) == [-0.1, 0.2]
    assert [label.get_text() for label in ratio.get_xticklabels()] == ["blocks.2.mlp", "blocks.3.mlp"]
    untrained = plot_broadcast_scales({"cb": [BroadcastScale("blocks.2.mlp", math.nan, 0.0, 8)]})
    assert "all scales are zero" in untrained.axes[0].texts[0].get_text()


def test_heads_of_emsa_have_one_scale():
    one, other = torch.eye(2), torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    figure = plot_emsa_heads({"rest": HeadSimilarity("stages.3.1.attn", one, other, one, 4)})
    matrices = [axes for axes in figure.axes if axes.images]
    assert [axes.images[0].get_clim() for axes in matrices] == [(-1, 1)] * 3
    assert "mean of two heads 0.50" in matrices[1].get_title()
    assert "mean over 4 images" in figure.get_suptitle()


def vit(**options):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=5, **options).eval()


def test_a_query_is_a_row_of_the_attention():
    model = vit()
    maps = attention_maps(model, IMAGES)
    last = query_attention(model, IMAGES)
    assert (last.layer, last.number, last.layers, last.query) == ("blocks.1.attn", 2, 2, (2, 2)), "the center of 4 x 4"
    assert torch.equal(last.maps, maps[1].from_query((2, 2)))
    assert last.box == (0.5, 0.5, 0.25, 0.25)
    for layer in (0, -2, "blocks.0", "blocks.0.attn"):
        first = query_attention(model, IMAGES, layer=layer, query="class")
        assert torch.equal(first.maps, maps[0].from_query("class"))
        assert first.box is None
    assert query_attention(model, IMAGES, at=(0.99, 0.3)).query == (1, 3), "from the left, and from the top"
    assert query_attention(model, IMAGES, at=(1.0, 1.0)).query == (3, 3)


def test_queries_and_layers_that_do_not_exist_are_refused():
    model = vit()
    with pytest.raises(ValueError, match=r"has 2 attentions, blocks.0.attn to blocks.1.attn"):
        query_attention(model, IMAGES, layer=2)
    with pytest.raises(ValueError, match=r"no attention in 'blocks.7': expected one of blocks.0.attn, blocks.1.attn"):
        query_attention(model, IMAGES, layer="blocks.7")
    with pytest.raises(ValueError, match="from 0% to 100%, got 120%,50%"):
        query_attention(model, IMAGES, at=(1.2, 0.5))
    with pytest.raises(ValueError, match="given twice"):
        query_attention(model, IMAGES, at=(0.5, 0.5), query="class")


def test_layers_with_class_attention_alone_show_the_class_token():
    torch.manual_seed(0)
    cait = timm.create_model("cait_xxs24_224", img_size=64, depth=1, num_classes=5).eval()
    assert query_attention(cait, IMAGES).query == "class"
    with pytest.raises(ValueError, match="has no queries in the image, only the class token"):
        query_attention(cait, IMAGES, at=(0.5, 0.5))


def test_a_segmenter_shows_the_image_without_its_padding():
    """An image of 48 x 80 pixels is padded to 64 x 96, of which a grid of 4 x 6 patches covers 3 x 5."""
    torch.manual_seed(0)
    model = interlayer.segmenter(
        "fpn", backbone=timm.create_model("vit_tiny_patch16_224", img_size=64, depth=6, dynamic_img_size=True),
        num_classes=3,
    ).eval()  # fmt: skip
    found = query_attention(model, torch.randn(1, 3, 48, 80), at=(0.99, 0.99))
    assert found.layer == "body.network.blocks.5.attn"
    assert query_attention(model, torch.randn(1, 3, 48, 80), layer="blocks.1").number == 2, "wherever the network is"
    assert found.grid == (4, 6)
    assert found.frame == pytest.approx((48 / 64, 80 / 96))
    assert found.query == (2, 4), "the last patch of the image, not of the padding"
    assert found.box == pytest.approx((2 / 3, 4 / 5, 1 / 3, 1 / 5))
    picture = torch.zeros(3, 48, 80, dtype=torch.uint8)
    axes = plot_query_attention([AttentionRow("fpn", picture, found)]).axes[1]
    assert axes.images[1].get_extent() == pytest.approx([0, 96, 64, 0]), "the map covers the padded image"
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 80), (48, 0)), "of which the image is seen"


def test_a_detector_shows_the_image_that_it_was_given():
    """It resizes the image to a short side of 96 and pads it to 96 x 160 pixels."""
    torch.manual_seed(0)
    model = interlayer.detector(
        "retinanet", backbone=timm.create_model("pvt_v2_b0"), num_classes=2, min_size=96, max_size=200
    ).eval()
    found = query_attention(model, [torch.rand(3, 48, 72)])
    assert found.layers == 8
    assert found.frame == pytest.approx((1, 144 / 160))


def test_pictures_have_a_box_and_one_scale():
    model = vit()
    rows = [AttentionRow(name, PICTURE, query_attention(model, IMAGES[:1], query=(1, 2))) for name in ("one", "two")]
    figure = plot_query_attention(rows)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 2 * (1 + 3), "a photograph and three heads in each row"
    box = panels[0].patches[0]
    assert (box.get_xy(), box.get_width(), box.get_height()) == ((32, 16), 16, 16)
    maps = rows[0].attention.maps
    assert {axes.images[1].get_clim() for axes in panels if len(axes.images) == 2} == {
        (float(maps.min()), float(maps.max()))
    }
    assert "blocks.1.attn (attention 2 of 2), query in row 1, column 2 of 4 x 4" in figure.get_suptitle()
    own = plot_query_attention(rows, scale="own", heads=[2])
    limits = [axes.images[1].get_clim() for axes in own.axes if len(axes.images) == 2]
    assert limits == [(float(maps[0, 2].min()), float(maps[0, 2].max()))] * 2
    assert [axes.get_title() for axes in own.axes if axes.images] == ["image", "head 2", "", "head 2"]
    mean = plot_query_attention(rows[:1], heads="mean").axes[1]
    torch.testing.assert_close(torch.as_tensor(mean.images[1].get_array()), maps[0].mean(0), check_dtype=False)
    with pytest.raises(ValueError, match=r"one: blocks\.1\.attn has heads from 0 to 2, got 3"):
        plot_query_attention(rows, heads=[3])
    with pytest.raises(ValueError, match="attention of one image in each row, got 2"):
        plot_query_attention([AttentionRow("one", PICTURE, query_attention(model, IMAGES))])


def test_many_heads_are_shown_in_part():
    maps = torch.rand(1, 24, 4, 4)
    attention = interlayer.analysis.QueryAttention("attn", 1, 1, maps, (0, 0), (4, 4))
    figure = plot_query_attention([AttentionRow("swin", PICTURE, attention)])
    titles = [axes.get_title() for axes in figure.axes if axes.images]
    assert titles == ["image", *(f"head {head}" for head in (0, 3, 7, 10, 13, 16, 20, 23))]
    assert "8 of 24 heads" in figure.get_suptitle()
