"""Tests of time and memory by depth."""

import math

import pytest
import torch

from interlayer.analysis import (
    DepthCost,
    Setting,
    depth_costs,
    depth_curves,
    depth_exponents,
    one_stage_network,
    plot_depth,
)
from interlayer.hosts import attached_mechanisms


def test_the_network_has_one_stage_of_so_many_blocks():
    model = one_stage_network(3, 32, "mrla_base:reading=published,channels_per_head=16", map_size=4)
    mechanisms = list(attached_mechanisms(model).values())
    assert [type(mechanism).__name__ for mechanism in mechanisms] == ["MRLABase"] * 3
    assert {(mechanism.reading, mechanism.heads, mechanism.channels) for mechanism in mechanisms} == {
        ("published", 2, 32)
    }
    maps = []
    model.layer1.register_forward_hook(lambda module, args, output: maps.append(output.shape))
    model(torch.randn(2, 3, 16, 16))
    assert maps == [(2, 32, 4, 4)]
    assert not attached_mechanisms(one_stage_network(2, 32))
    with pytest.raises(ValueError, match="at least two blocks, got 1"):
        one_stage_network(1, 32)
    with pytest.raises(ValueError, match="multiple of 4, got 30"):
        one_stage_network(2, 30)


def test_memory_grows_with_depth():
    """Every further block saves its maps for the backward pass; a smaller peak would not be that of the network."""
    told = []
    networks = {"plain": None, "light": "mrla_light"}
    setting = Setting(2, steps=1)
    costs = list(depth_costs(networks, [2, 8], setting, channels=32, map_size=8, progress=lambda *at: told.append(at)))
    assert told == [(cost.name, cost.blocks) for cost in costs]
    assert [cost.blocks for cost in costs] == [2, 2, 8, 8]
    curves = depth_curves(costs)
    assert list(curves) == ["plain", "light"]
    for curve in curves.values():
        first, last = (cost.memory for cost in curve)
        one_map = 2 * 32 * 8 * 8 * 4
        assert last - first > 6 * 2 * one_map
        assert all(cost.seconds > 0 for cost in curve)
    assert all(light.memory > plain.memory for plain, light in zip(curves["plain"], curves["light"], strict=True))
    with pytest.raises(ValueError, match="unknown mechanism 'mrla_lite'"):
        list(depth_costs({"x": "mrla_lite"}, [2], setting, channels=32))


def rows(name, *points):
    return [DepthCost(name, *point) for point in points]


def test_exponents_by_hand():
    curve = rows("a", (2, 4.0, 20.0), (4, 16.0, 40.0), (8, 64.0, 80.0))
    assert depth_exponents(curve) == pytest.approx((2.0, 1.0))
    assert all(math.isnan(value) for value in depth_exponents(curve[:1]))


def test_what_did_not_fit_is_left_out_of_the_curves():
    costs = [*rows("b", (8, 4.0, 20.0), (2, 1.0, 5.0), (16, math.nan, math.nan)), *rows("a", (2, math.nan, math.nan))]
    assert {name: [cost.blocks for cost in curve] for name, curve in depth_curves(costs).items()} == {"b": [2, 8]}
    with pytest.raises(ValueError, match="no measurements"):
        plot_depth(rows("a", (2, math.nan, math.nan)))


def test_the_figure_has_memory_and_the_time_of_one_block():
    figure = plot_depth(rows("a", (2, 0.004, 2**20), (4, 0.016, 2**21)))
    memory, seconds = figure.axes
    assert list(memory.lines[0].get_ydata()) == pytest.approx([1, 2])
    assert list(seconds.lines[0].get_ydata()) == pytest.approx([2, 4])
    assert "MiB" in memory.get_ylabel()
    assert memory.get_legend().get_texts()[0].get_text() == "a, $T^{1.00}$"
    assert seconds.get_legend().get_texts()[0].get_text() == "a, $T^{2.00}$"
