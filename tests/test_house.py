"""The rules of the house: imports go one way, and the documents are true."""

import ast
import re
from pathlib import Path

import pytest

import interlayer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "interlayer"
LAYERS = [
    "ops",
    "mechanisms",
    "hosts",
    "models",
    "tasks",
    "analysis",
    "training",
    "experiments",
    "pages",
]  # each may import those before it


def imports_of(path: Path):
    """Top-level folders of the package that a file imports from."""
    package = path.relative_to(SOURCE.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for name in (node.module or "").split(".") if node.module else [alias.name for alias in node.names]:
                yield (*base, name)[1] if len((*base, name)) > 1 else None
                break
        elif isinstance(node, ast.ImportFrom) and node.module == "interlayer":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interlayer."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("interlayer."))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    folder = path.relative_to(SOURCE).parts[0]
    if folder not in LAYERS:
        return
    allowed = LAYERS[: LAYERS.index(folder) + 1]
    assert [name for name in imports_of(path) if name in LAYERS and name not in allowed] == []


def test_the_check_sees_relative_and_absolute_imports(tmp_path):
    assert set(imports_of(SOURCE / "hosts" / "attach.py")) >= {"mechanisms", "hosts"}
    assert "hosts" in set(imports_of(SOURCE / "analysis" / "scores.py"))


def test_public_names_exist_and_are_documented():
    api = (ROOT / "docs" / "api.md").read_text()
    for name in interlayer.__all__:
        assert getattr(interlayer, name).__doc__, name
        assert f"`interlayer.{name}`" in api, f"docs/api.md does not mention {name}"


def test_readme_names_the_two_commands_and_they_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("run", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme):
        assert (ROOT / picture).is_file(), picture


def test_every_excused_difference_is_explained():
    from interlayer.analysis.tables import TABLES

    text = " ".join((ROOT / "docs" / "deviations.md").read_text().split())
    rows = [row for paper in TABLES.values() for row in paper()]
    for reason in {reason for row in rows for reason in (row.parameters_differ, row.flops_differ) if reason}:
        assert reason in text, f"docs/deviations.md does not explain: {reason}"
