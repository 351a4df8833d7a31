"""Tests of the comparison with the tables of the papers."""

import pytest
import timm
import torch

from interlayer.papers.halonet import halonet_rows
from interlayer.papers.mrla import mrla_rows
from interlayer.papers.row import CountedRow, PaperRow, Units
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
        "resnet152_mrla_light": ({"1", "4", "5", "6", "7", "12"}, 50),
        "resnet50_rla_unshared": ({"1", "2", "3", "6", "11", "13", "15"}, 61),
        "halo_h7": ({"A2", "4", "5", "6", "C.1"}, 18),
        "deit_base_cb": ({"1", "3b", "Fig. 3", "5", "11"}, 21),
        "rest_large": ({"1", "body"}, 1),
    }
    tables, agreeing = next(expected[c.row.model] for c in counted if c.row.model in expected)
    assert {c.row.table for c in counted} == tables
    assert len([c for c in counted if c.parameters_agree and c.flops_agree]) >= agreeing


def test_figures_that_a_paper_does_not_print_are_not_given_as_its_own():
    """HaloNet's Table 5 and appendix C.1 print no parameters: a figure of ours would appear in the paper's column."""
    rows = [row for row in halonet_rows() if row.table in ("5", "C.1")]
    assert {row.model for row in rows} == {"halo_resnet50_b8", "halo_resnet50_b32", "halo_resnet101_b8", "halo_50"}
    assert all(row.parameters is None and row.flops is None for row in rows)


PEERS = {  # of MRLA's Tables 1, 5, 6 and 12: printed parameters and FLOPs
    "1": {
        "ResNet-50 + SE": (28.1, 4.1), "ResNet-50 + CBAM": (28.1, 4.2), "ResNet-50 + A²": (34.6, 7.0),
        "ResNet-50 + AA": (27.1, 4.5), "ResNet-50 + 1 NL": (29.0, 4.4), "ResNet-50 + 1 GC": (26.9, 4.1),
        "ResNet-50 + all GC": (29.4, 4.2), "ResNet-50 + ECA": (25.6, 4.1), "ResNet-50 + DIA": (28.4, None),
        "ResNet-50 + RLA_g": (25.9, 4.5), "ResNet-101 + SE": (49.3, 7.8), "ResNet-101 + CBAM": (49.3, 7.9),
        "ResNet-101 + AA": (47.6, 8.6), "ResNet-101 + ECA": (44.5, 7.8), "ResNet-101 + RLA_g": (45.0, 8.4),
        "ResNet-152 + SE": (66.8, 11.6), "ResNet-152 + ECA": (60.2, 11.6), "ResNet-152 + RLA_g": (60.8, 12.3),
    },
    "5": {
        "ResNet-50 + DIA": (28.4, None), "ResNet-50 + RLA_g": (25.9, 4.5), "ResNet-101 + RLA_g": (45.0, 8.4),
        "DenseNet-161 (k = 48)": (27.4, 7.9), "DenseNet-264 (k = 32)": (31.8, 5.9),
    },
    "6": {"BA-Net-50": (28.7, 4.2), "BA-Net-50, its setting": (28.7, 4.2)},
    "12": {
        "(a) depthwise conv alone": (25.7, 4.2), "(a) with stochastic depth": (25.7, 4.2),
        "(c) ECA": (25.6, 4.1), "(c) with stochastic depth": (25.6, 4.1),
    },
}  # fmt: skip


def test_every_peer_of_mrlas_tables_is_built_and_agrees():
    """A peer that is not built, or whose parameters differ, would be compared with layer attention under its name."""
    rows = mrla_rows()
    for table, peers in PEERS.items():
        of_table = {row.label: row for row in rows if row.table == table}
        for label, printed in peers.items():
            row = of_table[label]
            assert (row.parameters, row.flops) == printed, f"table {table}, {label}"
            assert row.model, f"table {table}, {label}: no network"
            assert not row.parameters_differ, f"table {table}, {label}: every peer's parameters agree"


def test_quoted_figures_are_converted_as_the_paper_did():
    """Table 1 prints GC's 25.69M as 26.9M; a row without the mark would agree with a wrong network."""
    quoted = {row.label for row in mrla_rows() if row.units.quoted}
    assert quoted == {
        "ResNet-50 + A²", "ResNet-50 + AA", "ResNet-50 + 1 NL", "ResNet-50 + 1 GC", "ResNet-50 + all GC",
        "ResNet-101 + AA",
    }  # fmt: skip
    units = Units(quoted_decimals=2)
    assert units.in_parameters(25_690_345) == pytest.approx(25.69 * 1.048576)
    assert units.in_flops(3_858_000_000) == pytest.approx(3.86 * 1.073741824)
    assert Units().in_parameters(25_690_345) == 25.690345


def test_depthwise_convolutions_of_table_12_differ_by_stochastic_depth():
    """Table 12 (a), and 4 (g) with it, is without stochastic depth, which the named model has."""
    rates = []
    for row in mrla_rows():
        if row.attention.get("attention") is False:
            with torch.device("meta"):
                model = timm.create_model(row.model, attach_options=dict(row.attention))
            drop = model.layer1[0].mrla.drop_path
            rates.append((row.table, row.top1, getattr(drop, "drop_prob", 0.0)))
    assert rates == [("4", 76.6, 0.0), ("12", 76.6, 0.0), ("12", 76.9, 0.2)]


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
