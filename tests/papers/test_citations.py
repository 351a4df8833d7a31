"""The papers can be cited: every mechanism of a paper has its entry, and the documentation shows all of them."""

from pathlib import Path

import pytest

from interlayer.hosts import MECHANISMS
from interlayer.papers.citations import CITATIONS, PAPER_OF_MECHANISM, citations_of
from interlayer.papers.tables import TABLES

ROOT = Path(__file__).parents[2]
WITHOUT_PAPER = {"se", "eca", "cbam", "gc", "nl", "a2", "dia", "bridge", "aa"}  # methods that the papers compare with


def test_every_paper_and_every_mechanism_has_an_entry():
    assert CITATIONS.keys() == TABLES.keys()
    own = {name for name, row in MECHANISMS.items() if row.options.__module__.startswith("interlayer.hosts")}
    assert PAPER_OF_MECHANISM.keys() == own - WITHOUT_PAPER  # other tests register mechanisms from outside


@pytest.mark.parametrize("paper", CITATIONS)
def test_the_documentation_shows_the_entry(paper):
    assert CITATIONS[paper] in (ROOT / "docs" / "citing.md").read_text()
    for field in ("title", "author", "booktitle", "year", "url"):
        assert f"{field}={{" in CITATIONS[paper]


def test_a_network_is_cited_with_its_mechanisms():
    assert citations_of("rest_lite", ["cb", "se"]) == [CITATIONS["rest"], CITATIONS["cb"]]
    assert citations_of("resnet50", ["mrla_light", "mrla_base"]) == [CITATIONS["mrla"]]
    assert citations_of("resnet50", []) == []
