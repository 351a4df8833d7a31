"""Tests of local attention as a replacement of convolutions, and of its resized position tables."""

import pytest
import torch

from interlayer.mechanisms import HaloAttention2d, resize_halo


@pytest.mark.parametrize("size", [(12, 12), (7, 9), (1, 1), (16, 5)])
@pytest.mark.parametrize("stride", [1, 2])
def test_it_takes_the_place_of_a_convolution(size, stride):
    """The output has the shape of a 3x3 convolution with padding, for any stride and size."""
    layer = HaloAttention2d(16, 24, heads=2, block=4, halo=1, stride=stride)
    convolution = torch.nn.Conv2d(16, 24, 3, stride, 1)
    x = torch.randn(2, 16, *size)
    assert layer(x).shape == convolution(x).shape


def test_a_strided_layer_is_the_full_one_at_every_second_pixel():
    full = HaloAttention2d(16, heads=2, block=4, halo=2)
    strided = HaloAttention2d(16, heads=2, block=4, halo=2, stride=2)
    torch.nn.Module.load_state_dict(strided, dict(full.state_dict()))
    x = torch.randn(1, 16, 11, 10)
    torch.testing.assert_close(strided(x), full(x)[:, :, ::2, ::2])


@pytest.mark.parametrize("size", [(12, 12), (7, 9), (11, 10), (1, 1)])
@pytest.mark.parametrize("centered", [False, True])
def test_sasa_pools_after_the_attention_of_all_pixels(size, centered):
    """Section 2.2: attention followed by strided average pooling, where HaloNet strides the queries."""
    full = HaloAttention2d(16, 24, heads=2, block=4, halo=1, centered=centered)
    pooled = HaloAttention2d(16, 24, heads=2, block=4, halo=1, centered=centered, stride=2, downsampling="pooling")
    torch.nn.Module.load_state_dict(pooled, dict(full.state_dict()))
    x = torch.randn(2, 16, *size)
    attended, result = full(x), pooled(x)
    assert result.shape == torch.nn.Conv2d(16, 24, 3, 2, 1)(x).shape
    for row in range(size[0] // 2):
        for column in range(size[1] // 2):
            window = attended[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            torch.testing.assert_close(result[:, :, row, column], window.mean((2, 3)))
    if size[0] % 2:  # the last row is averaged over the pixels that exist
        torch.testing.assert_close(result[:, :, -1, 0], attended[:, :, -1:, :2].mean((2, 3)))


def test_pooling_and_strided_queries_are_told_apart():
    queries = HaloAttention2d(8, heads=2, block=4, halo=1, stride=2)
    pooling = HaloAttention2d(8, heads=2, block=4, halo=1, stride=2, downsampling="pooling")
    with pytest.raises(RuntimeError, match="was saved with downsampling=queries, this model has downsampling=pooling"):
        pooling.load_state_dict(queries.state_dict())
    with pytest.raises(ValueError, match="downsampling must be 'queries' or 'pooling', got 'max'"):
        HaloAttention2d(8, heads=2, downsampling="max")


@pytest.mark.parametrize(
    "options", [{}, {"position": "none"}, {"position": "absolute", "size": (6, 5)}, {"centered": True}]
)
def test_every_parameter_gets_a_gradient(options):
    layer = HaloAttention2d(8, 12, heads=2, qk_channels=4, block=4, halo=1, **options)
    layer(torch.randn(2, 8, 6, 5)).square().sum().backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []


def test_absolute_positions_are_added_before_and_interpolated():
    """Appendix F: encodings of row and column are added to the map, and interpolated for other sizes."""
    layer = HaloAttention2d(8, heads=2, block=4, halo=1, position="absolute", size=(6, 5))
    plain = HaloAttention2d(8, heads=2, block=4, halo=1, position="none")
    weights = {name: value for name, value in layer.state_dict().items() if not name.startswith("abs_")}
    torch.nn.Module.load_state_dict(plain, weights)
    x = torch.randn(1, 8, 6, 5)
    torch.testing.assert_close(layer(x), plain(x + layer.abs_rows[:, :, None] + layer.abs_cols[:, None, :]))
    assert layer(torch.randn(1, 8, 9, 11)).shape == (1, 8, 9, 11)


def test_resizing_to_the_same_size_changes_nothing():
    """Appendix E: tables are interpolated linearly with aligned corners, and unchanged for the same size."""
    layer = HaloAttention2d(8, heads=2, block=4, halo=1)
    before = layer.rel_rows.detach().clone()
    layer.resize(4, 1)
    assert torch.equal(layer.rel_rows, before)
    resize_halo(torch.nn.Sequential(layer), block=8, halo=2)
    assert layer.rel_rows.shape == (23, 2)
    torch.testing.assert_close(layer.rel_rows[[0, 11, 22]], before[[0, 5, 10]])
    assert layer(torch.randn(1, 8, 9, 9)).shape == (1, 8, 9, 9)
    with pytest.raises(ValueError, match="has no HaloAttention2d"):
        resize_halo(torch.nn.Conv2d(1, 1, 1), block=8, halo=1)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="qk_channels divisible by twice the heads"):
        HaloAttention2d(12, heads=4, qk_channels=12)
    with pytest.raises(ValueError, match=r"give size=\(height, width\)"):
        HaloAttention2d(8, heads=2, position="absolute")
    strided = HaloAttention2d(8, heads=2, block=4, halo=1, stride=2)
    with pytest.raises(ValueError, match="divisible by the stride 2"):
        strided.resize(5, 1)


def test_a_state_dict_tells_block_and_halo():
    """b = 4, h = 2 and b = 6, h = 1 have tables of the same size, but compute different functions."""
    one, other = HaloAttention2d(8, heads=2, block=4, halo=2), HaloAttention2d(8, heads=2, block=6, halo=1)
    with pytest.raises(RuntimeError, match="was saved with block=4, this model has block=6"):
        other.load_state_dict(one.state_dict())


def test_frozen_tables_stay_frozen_when_resized():
    layer = HaloAttention2d(16, heads=2, block=4, halo=1)
    layer.rel_rows.requires_grad_(False)
    layer.resize(8, 2)
    assert [layer.rel_rows.requires_grad, layer.rel_cols.requires_grad] == [False, True]


def test_heads_must_be_there():
    with pytest.raises(ValueError, match="divisible by heads=0"):
        HaloAttention2d(16, heads=0)
