"""Tests of the thin Xception for small images: its downsampling."""

import pytest
import timm
import torch
import torch.nn.functional as F

import interlayer

POOLING_BLOCKS = ("stages.0.2", "stages.1.8")


def network(**options):
    torch.manual_seed(0)
    return timm.create_model("xception_cifar", **{"num_classes": 3, **options}).eval()


@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_stages_end_with_the_pooling_of_the_paper_or_of_the_original(pooling):
    """RLA, appendix B.1: average pooling instead of max pooling for downsampling."""
    block = network(**({} if pooling == "avg" else {"pooling": pooling})).get_submodule(POOLING_BLOCKS[0])
    x = torch.randn(2, 128, 8, 8)
    y = block.separable[1](block.separable[0](x))
    windows = F.unfold(F.pad(y, (1, 1, 1, 1), value=float("nan")), 3, stride=2).reshape(2, 256, 9, 4, 4)
    pooled = windows.nanmean(2) if pooling == "avg" else windows.nan_to_num(nan=-torch.inf).amax(2)
    torch.testing.assert_close(block(x), pooled + block.shortcut(x))


def test_the_pooling_changes_the_logits_and_an_unknown_one_is_named():
    image = torch.randn(2, 3, 16, 16)
    assert not torch.allclose(network()(image), network(pooling="max")(image), atol=1e-6)
    with pytest.raises(ValueError, match="pooling must be 'avg' or 'max', got 'mean'"):
        network(pooling="mean")


def test_weights_of_earlier_versions_keep_their_max_pooling(tmp_path):
    """They do not record average pooling, with which they would compute another function without a word."""
    earlier, path, image = network(pooling="max"), tmp_path / "earlier.safetensors", torch.randn(2, 3, 16, 16)
    assert not any("average_pooling" in name for name in earlier.state_dict())
    interlayer.save_weights(earlier, path)
    model, attached = network(), interlayer.attach(network(), "rla", init="identity", state_channels=4).eval()
    interlayer.load_weights(model, path)
    interlayer.load_backbone(attached, earlier.state_dict())
    for loaded in (model, attached):
        torch.testing.assert_close(loaded(image), earlier(image))


def test_weights_that_do_not_fit_leave_the_pooling_as_it_is(tmp_path):
    """An error says that nothing was loaded, so the network must compute what it computed before."""
    path, image = tmp_path / "earlier.safetensors", torch.randn(2, 3, 16, 16)
    earlier = network(pooling="max", num_classes=7)
    interlayer.save_weights(earlier, path)
    model, attached = network(), interlayer.attach(network(), "rla", init="identity", state_channels=4).eval()
    expected = [loaded(image) for loaded in (model, attached)]
    with pytest.raises(ValueError, match="does not fit the model"):
        interlayer.load_weights(model, path)
    with pytest.raises(ValueError, match="nothing was loaded"):
        interlayer.load_backbone(attached, earlier.state_dict())
    for loaded, before in zip((model, attached), expected, strict=True):
        assert torch.equal(loaded(image), before)
