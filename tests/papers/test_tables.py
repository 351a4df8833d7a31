"""Tests of the comparison with the tables of the papers."""

import pytest

from interlayer.papers.row import CountedRow, PaperRow
from interlayer.papers.tables import count_rows


@pytest.fixture(scope="module", params=["mrla", pytest.param("rla", marks=pytest.mark.slow), "halonet", "cb", "rest"])
def counted(request):
    return list(count_rows(request.param))


def test_every_figure_that_should_agree_does(counted):
    assert [(c.row.table, c.row.label, c.unexplained) for c in counted if c.unexplained] == []


def test_rlas_tables_of_small_networks_agree():
    """The ImageNet tables take a minute and are slow tests."""
    counted = list(count_rows("rla", ["1", "6"]))
    assert len(counted) == 15
    assert [(c.row.label, c.unexplained) for c in counted if c.unexplained] == []


def test_the_tables_are_there(counted):
    expected = {  # a model of each paper: its tables, and the number of rows in which all figures agree
        "resnet152_mrla_light": ({"1", "4", "5", "7"}, 22),
        "resnet152_rla": ({"1", "2", "3", "6", "11", "13", "15"}, 61),
        "halo_h7": ({"A2", "4", "5", "6", "C.1"}, 18),
        "deit_base_cb": ({"1", "5", "11"}, 15),
        "rest_large": ({"1", "body"}, 1),
    }
    tables, agreeing = next(expected[c.row.model] for c in counted if c.row.model in expected)
    assert {c.row.table for c in counted} == tables
    assert len([c for c in counted if c.parameters_agree and c.flops_agree]) >= agreeing


def test_what_is_excused_really_differs(counted):
    """A reason given for a figure that agrees would hide a later error."""
    for c in counted:
        assert not (c.row.flops_differ and c.flops_agree), f"{c.row.label}: FLOPs agree and need no excuse"
        assert not (c.row.parameters_differ and c.parameters_agree), f"{c.row.label}: parameters agree"


def test_an_unexplained_difference_is_reported():
    row = PaperRow("1", "x", "resnet18", 11.7, 1.8)
    assert CountedRow(row, 11.69, 1.82, 1.8).unexplained == []
    assert CountedRow(row, 11.64, 1.86, 1.8).unexplained == ["parameters", "FLOPs"]
    with pytest.raises(ValueError, match="unknown paper 'swin', expected one of mrla, rla, halonet, cb, rest"):
        next(count_rows("swin"))


def test_halonets_scaling_is_that_of_its_formulas():
    """Table 1: measured memory and FLOPs equal the formulas on a map of complete blocks."""
    from interlayer.papers.attention_scaling import attention_scaling

    rows = {row.way: row for row in attention_scaling(size=16, channels=8, heads=2, block=4, halo=2)}
    assert list(rows) == ["global", "per pixel windows", "SASA", "blocked local"]
    for row in rows.values():
        assert row.stored == row.elements, row.way
        assert row.counted == row.flops_per_pixel, row.way
    assert rows["blocked local"].elements == 16 * 64 * 8
    assert rows["blocked local"].gathered_bytes > 2 * 4 * rows["blocked local"].elements  # keys and values, float32
