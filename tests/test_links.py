"""Every link of the documents leads to a file and a heading. Links to other servers are not followed."""

from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, anchor, headings, links, name_of, site_anchor


def problems(path: Path, text: str) -> list[str]:
    """Returns the links of a document to files or headings that do not exist."""
    found = []
    for target in links(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, wanted = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        if not other.is_relative_to(ROOT) or not other.exists():
            found.append(f"{target}: no such file")
        elif wanted:
            names = headings(text if other == path else other.read_text())
            if wanted not in map(anchor, names):
                found.append(f"{target}: no such heading")
            elif wanted not in map(site_anchor, names):
                found.append(f"{target}: the heading has another anchor in the site, #{site_anchor(wanted)}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path):
    assert problems(path, path.read_text()) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_headings_of_a_document_have_different_anchors(path):
    """A second heading of the same name would have an anchor that GitHub and the site number differently."""
    linked = {target.partition("#")[2] for document in DOCUMENTS for target in links(document.read_text())}
    anchors = [anchor(heading) for heading in headings(path.read_text())]
    assert [name for name in linked if anchors.count(name) > 1] == []


def test_what_is_broken_is_found():
    text = (
        "# A title\n[a](docs/missing.md) [b](docs/api.md#nothing) [c](#a-title) [d](#b) ![e](docs/images/report.png)\n"
        "`[f](no-link)`\n```\n# no heading\n[g](no-link)\n```\n[h](https://example.org/x) [i](docs/api.md#scores)"
    )
    assert problems(ROOT / "README.md", text) == [
        "docs/missing.md: no such file",
        "docs/api.md#nothing: no such heading",
        "#b: no such heading",
    ]
