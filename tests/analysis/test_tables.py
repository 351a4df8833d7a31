"""Were these wrong, a difference from the paper would go unnoticed."""

import pytest

from interlayer.analysis.tables import CountedRow, PaperRow, count_rows


@pytest.fixture(scope="module")
def counted():
    return list(count_rows("mrla"))


def test_every_figure_that_should_agree_does(counted):
    assert [(c.row.table, c.row.label, c.unexplained) for c in counted if c.unexplained] == []


def test_tables_1_4_5_and_7_are_there(counted):
    assert {c.row.table for c in counted} == {"1", "4", "5", "7"}
    agreeing = [c for c in counted if c.parameters_agree and c.flops_agree]
    assert len(agreeing) >= 22
    names = {c.row.model for c in counted}
    assert {"resnet152_mrla_light", "deit_base_mrla_light", "ceit_small_mrla_light", "pvt_v2_b1_mrla_light"} <= names


def test_what_is_excused_really_differs(counted):
    """An excuse for a figure that agrees would hide a later mistake."""
    for c in counted:
        assert not (c.row.flops_differ and c.flops_agree), f"{c.row.label}: FLOPs agree and need no excuse"
        assert not (c.row.parameters_differ and c.parameters_agree), f"{c.row.label}: parameters agree"


def test_an_unexplained_difference_is_reported():
    row = PaperRow("1", "x", "resnet18", 11.7, 1.8)
    assert CountedRow(row, 11.69, 1.82, 1.8).unexplained == []
    assert CountedRow(row, 11.64, 1.86, 1.8).unexplained == ["parameters", "FLOPs"]
    with pytest.raises(ValueError, match="unknown paper 'rest', expected one of mrla"):
        next(count_rows("rest"))
