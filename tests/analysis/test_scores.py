"""Tests that the scores between layers describe the computation of the network."""

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import capture_scores
from interlayer.hosts import attached_mechanisms

IMAGES = torch.randn(2, 3, 64, 64)


def make(mechanism, name="resnet26", **options):
    extra = {} if name.startswith("res") else {"img_size": 64, "depth": 6}
    return interlayer.attach(timm.create_model(name, num_classes=5, **extra), mechanism, image_size=64, **options)


@pytest.mark.parametrize("mechanism", ["mrla_base", "mla", "mrla_linear"])
@pytest.mark.parametrize("name", ["resnet26", "vit_tiny_patch16_224"])
def test_rows_are_attention_weights(mechanism, name):
    stages = interlayer.layer_scores(make(mechanism, name), IMAGES)
    assert len(stages) == (4 if name == "resnet26" else 3)
    for stage in stages:
        size = len(stage.blocks)
        assert stage.scores.shape[0] == 2
        assert stage.scores.shape[2:] == (size, size)
        torch.testing.assert_close(stage.scores.sum(-1), torch.ones(stage.scores.shape[:-1]), atol=1e-4, rtol=0)
        assert torch.equal(stage.scores, stage.scores.tril()), "no layer reads a later one"
    assert stages[0].name == ("layer1.0 to layer1.1" if name == "resnet26" else "blocks.0 to blocks.1")


def test_light_scores_rebuild_its_output():
    """With one channel per head, the matrix times the values of the stage equals the result of the recurrence."""
    model = make("crla").eval()
    stage = interlayer.layer_scores(model, IMAGES)[0]
    seen = []
    for block in model.layer1:
        block.mrla.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    outputs = []
    model.layer1[1].mrla.norm.register_forward_pre_hook(lambda m, args: outputs.append(args[0]))
    model(IMAGES)
    values = [block.mrla.value(x) for block, x in zip(model.layer1, seen, strict=True)]
    weights = stage.scores[:, :, 1, :, None, None]  # [B, C, 2, 1, 1]: heads are channels
    rebuilt = weights[:, :, 0] * values[0] + weights[:, :, 1] * values[1]
    torch.testing.assert_close(rebuilt, outputs[0], atol=1e-4, rtol=1e-4)


def test_published_light_reads_its_own_layer_and_the_shortcut():
    model = make("mrla_light", reading="published")
    scores = interlayer.layer_scores(model, IMAGES)[0].scores
    mean_decay = model.layer1[1].mrla.decay.unflatten(0, (-1, 32)).mean(-1)
    torch.testing.assert_close(scores[0, :, 1, 0], mean_decay)
    assert (scores.diagonal(dim1=2, dim2=3) > 0).all()


def test_capture_leaves_nothing_behind():
    model = make("mrla_base")
    with capture_scores(model) as captured:
        model(IMAGES)
    assert captured.keys() == attached_mechanisms(model).keys()
    with pytest.raises(RuntimeError, match="channels"), capture_scores(model):
        model(IMAGES[:, :1])
    assert not any(m._forward_hooks for m in model.modules())


def test_mode_is_restored_and_nothing_is_trained():
    model = make("mrla_base").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    interlayer.layer_scores(model, IMAGES)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_models_without_scores_say_so():
    with pytest.raises(ValueError, match="has no layer attention attached"):
        interlayer.layer_scores(timm.create_model("resnet18"), IMAGES)
    with pytest.raises(ValueError, match=r"layer1.0 gives no scores: attention=False has none"):
        interlayer.layer_scores(make("mrla_light", attention=False), IMAGES)


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
def test_heatmaps(mechanism, tmp_path):
    stages = interlayer.layer_scores(make(mechanism), IMAGES)
    figure = interlayer.plot_layer_scores(stages)
    heatmaps = [axes for axes in figure.axes if axes.images]
    assert len(heatmaps) == 4
    shown = heatmaps[0].images[0].get_array()
    assert shown.mask[0, 1], "what a layer cannot read is left blank"
    assert float(shown[1, 0]) == pytest.approx(float(stages[0].scores.mean((0, 1))[1, 0]), rel=1e-4)
    one_head = interlayer.plot_layer_scores(stages, head=1).axes[0].images[0].get_array()
    assert float(one_head[1, 0]) == pytest.approx(float(stages[0].scores.mean(0)[1, 1, 0]), rel=1e-4)
    figure.savefig(tmp_path / "scores.png")
    assert (tmp_path / "scores.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="head must be from 0 to 7, got 8"):
        interlayer.plot_layer_scores(stages, head=8)


def test_weights_of_both_signs_do_not_cancel():
    """Half of lambda is +1 and half -1: the mean is zero, although every channel reads the layer before."""
    model = make("mrla_light", reading="published")
    decay = model.layer1[1].mrla.decay
    torch.nn.init.ones_(decay)
    with torch.no_grad():
        decay[::2] = -1
    stage = interlayer.layer_scores(model, IMAGES)[0]
    torch.testing.assert_close(stage.scores[:, :, 1, 0], torch.zeros(2, 8))
    torch.testing.assert_close(stage.magnitudes[:, :, 1, 0], torch.ones(2, 8))
    positive, negative = stage.parts()
    assert float(positive[1, 0]) == float(negative[1, 0]) == 0.5
    axes = next(axes for axes in interlayer.plot_layer_scores([stage]).axes if axes.images)
    halves = {patch.get_facecolor() for patch in axes.patches}
    assert len(halves) == 2, "the cell is divided into a positive and a negative half of different colors"
    assert [text.get_text() for text in axes.texts][1:3] == ["0.50", "-0.50"]


def test_attention_weights_are_their_own_magnitudes():
    stage = interlayer.layer_scores(make("mrla_base"), IMAGES)[0]
    positive, negative = stage.parts(head=1)
    torch.testing.assert_close(positive, stage.scores.mean(0)[1])
    assert not negative.any()


def test_all_stages_share_one_scale_and_name_their_blocks():
    """Two colors in one picture can be compared only if they mean the same."""
    model = make("mrla_light")
    stages = interlayer.layer_scores(model, IMAGES)
    figure = interlayer.plot_layer_scores(stages, note="mrla_light changes the outputs of its blocks by 3%")
    heatmaps = [axes for axes in figure.axes if axes.images]
    assert len({axes.images[0].get_clim() for axes in heatmaps}) == 1
    low, high = heatmaps[0].images[0].get_clim()
    assert low == -high, "white is zero"
    assert len(figure.axes) == len(heatmaps) + 1, "one color bar"
    assert [label.get_text() for label in heatmaps[2].get_yticklabels()] == ["layer3.0", "layer3.1"]
    assert "by 3%" in figure.get_suptitle()
    few = interlayer.attach(timm.create_model("efficientnet_lite0"), "mrla_base", image_size=64)
    stages = interlayer.layer_scores(few, IMAGES)
    shown = [axes for axes in interlayer.plot_layer_scores(stages).axes if axes.images]
    assert 0 < len(shown) == sum(len(stage.blocks) > 1 for stage in stages) < len(stages)


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
def test_every_head_has_a_heatmap_of_its_own_scores(mechanism):
    """The corner pixels of a cell are the means of its positive and of its negative weights."""
    stages = interlayer.layer_scores(make(mechanism), IMAGES)[:2]
    figure = interlayer.plot_layer_scores(stages, head="all")
    heatmaps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in heatmaps[6:10]] == ["head 6", "head 7", "head 0", "head 1"]
    assert heatmaps[8].get_ylabel().startswith("layer2.0 to layer2.1")
    assert len(heatmaps) == sum(stage.scores.shape[1] for stage in stages) == 8 + 16
    assert len({axes.images[0].get_clim() for axes in heatmaps}) == 1, "one scale"
    positive, negative = stages[1].parts(head=3)
    shown = heatmaps[8 + 3].images[0].get_array()
    cell = shown.shape[0] // 2
    corners = float(shown[cell, 0]), float(shown[-1, cell - 1])  # of the second layer that reads the first
    divided = mechanism == "mrla_light"
    expected = (positive[1, 0], -negative[1, 0]) if divided else (positive[1, 0], positive[1, 0])
    assert corners == pytest.approx([float(value) for value in expected], rel=1e-5)
    assert shown.mask[0, -1], "what a layer cannot read is left blank"
