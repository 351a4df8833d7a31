"""The rules of the house: imports go one way, and the documents are true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import interlayer

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "interlayer"
COMMANDS = ROOT / "src" / "interlayer_cli"
# A folder may import those of lower rank, and itself.
RANKS = {
    "ops": 0, "mechanisms": 1, "hosts": 2, "models": 3, "tasks": 4, "analysis": 5, "papers": 6, "training": 6,
    "experiments": 7, "pages": 8, "interlayer_cli": 9,
}  # fmt: skip
LONGEST = 400
WORDS = {  # the field's usual word instead
    r"\bobjections?\b": "unsupported_reason",
    r"\bonlookers?\b": "tracing",
    r"\bunittest\b": "another project's modules are not patched",
}


def imports_of(path: Path):
    """Top-level folders of the package that a file imports from."""
    package = path.relative_to(SOURCE.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            for name in (node.module or "").split(".") if node.module else [alias.name for alias in node.names]:
                yield (*base, name)[1] if len((*base, name)) > 1 else None
                if node.module:
                    break
        elif isinstance(node, ast.ImportFrom) and node.module == "interlayer":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interlayer."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interlayer_cli"):
            yield "interlayer_cli"
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("interlayer."))


FILES = sorted([*SOURCE.rglob("*.py"), *COMMANDS.rglob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE.parent)))
def test_imports_go_one_way(path):
    parts = path.relative_to(SOURCE.parent).parts
    folder = "interlayer_cli" if parts[0] == "interlayer_cli" else parts[1]
    if folder not in RANKS:
        assert len(parts) == 2, f"{path} is in a folder that has no rank"
        return
    above = [name for name in imports_of(path) if RANKS.get(name or "", -1) >= RANKS[folder] and name != folder]
    assert above == []


def test_the_check_sees_relative_and_absolute_imports(tmp_path):
    assert set(imports_of(SOURCE / "hosts" / "attach.py")) >= {"mechanisms", "hosts"}
    assert "hosts" in set(imports_of(SOURCE / "analysis" / "scores.py"))
    assert {"training", "pages"} <= set(imports_of(COMMANDS / "train.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE.parent)))
def test_files_can_be_read_in_one_sitting(path):
    is_kernel = path.parent.name == "_triton"
    assert is_kernel or len(path.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE.parent)))
def test_words_are_the_fields(path):
    text = path.read_text()
    for pattern, instead in WORDS.items():
        assert not re.search(pattern, text), f"{path}: {pattern} is said as: {instead}"


def test_an_operation_its_kernel_and_its_test_have_one_name():
    shared = {"__init__", "runtime", "batch_norm", "own_gradients"}
    shared |= {"map_shape", "light_layer_parts", "light_layer_forward", "light_layer_gradients", "base_layer_gradients"}
    shared |= {"base_layer_values", "base_layer_operator", "light_tokens_kernels"}
    kernels = {path.stem for path in (SOURCE / "ops" / "_triton").glob("*.py")} - shared
    assert kernels <= {path.stem for path in (SOURCE / "ops").glob("*.py")}
    assert {f"test_{name}" for name in kernels} <= {path.stem for path in (ROOT / "tests" / "ops").glob("*.py")}


def test_help_comes_at_once():
    """--help and the names of the commands must not import torch."""
    code = "import sys; import interlayer_cli.app; print('torch' in sys.modules or 'interlayer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


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
    from interlayer.papers.tables import TABLES

    text = " ".join((ROOT / "docs" / "deviations.md").read_text().split())
    rows = [row for paper in TABLES.values() for row in paper()]
    for reason in {reason for row in rows for reason in (row.parameters_differ, row.flops_differ) if reason}:
        assert reason in text, f"docs/deviations.md does not explain: {reason}"
