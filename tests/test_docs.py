"""The Python examples of README.md and docs/ run as they are printed.

An example may use timm, torch and interlayer without importing them, as the pages do, and what GIVEN prepares for it.
Pretrained weights are not loaded: `pretrained=True` is read as `pretrained=False`. Examples that need more are in
PARSED, with the reason; of these, every name of the library must exist.
"""

import ast
import doctest
import importlib
import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from digit_images import SMALL, save_digits
from documents import BLOCKS, DOCUMENTS, name_of

import interlayer
from interlayer.hosts import MECHANISMS, attached_mechanisms
from interlayer.training import train
from interlayer.training.recipe import from_values

LANGUAGES = {"", "python", "bibtex"}  # without a language: commands, or a session of Python; bibtex: test_citations.py
PARSED = {  # examples that are not run, and why
    "docs/attaching.md#models-of-transformers": "downloads a model of the Hugging Face Hub",
    "docs/attaching.md#context-broadcasting": "downloads a model of the Hugging Face Hub",
    "docs/detection.md#trained-weights": "needs the weights of the reader",
    "docs/export.md#models-in-a-folder-or-on-the-hub:3": "downloads a model of the Hugging Face Hub",
    "docs/training.md#python": "trains on CIFAR-10 for hours",
}


EXPORT = "docs/export.md#files-that-run-without-this-library:2"
READ_EXPORTED = "docs/export.md#files-that-run-without-this-library:3"
LOAD_A_RUN = "docs/training.md#loading-a-run"
OWN_LOOP = "docs/training.md#your-own-loop"
DETECTOR = "docs/detection.md#detection-and-segmentation"
ROBUSTNESS = {"docs/robustness.md#in-python", "docs/robustness.md#in-python:2"}
LOOKED_AT = {EXPORT, READ_EXPORTED, LOAD_A_RUN, OWN_LOOP, DETECTOR, *ROBUSTNESS}  # run by tests of their own


def small_network() -> torch.nn.Module:
    return interlayer.attach(
        timm.create_model("preresnet20_cifar", blocks=1, widths=[8, 8, 16]), "mrla_light", channels_per_head=8
    )


def a_network_and_images() -> dict[str, Any]:
    return {"model": small_network(), "images": torch.randn(2, 3, 32, 32)}


def exported_files() -> dict[str, Any]:
    import onnxruntime

    names = executed(EXPORT)
    interlayer.export_model(names["model"], "model.pt2", images=names["images"])
    return {"images": names["images"], "onnxruntime": onnxruntime, "json": json}


def a_run_and_a_photograph() -> dict[str, Any]:
    train(from_values({**SMALL, "epochs": 1}), Path("runs/mine"))
    save_digits(Path("digits"), 1)
    next(Path("digits/7").iterdir()).rename("photo.jpg")
    return {}


def a_loader() -> dict[str, Any]:
    batch = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    return {"loader": [batch, batch]}


GIVEN = {  # what an example needs: the function writes files to the working folder and returns names
    EXPORT: a_network_and_images,
    READ_EXPORTED: exported_files,
    LOAD_A_RUN: a_run_and_a_photograph,
    OWN_LOOP: a_loader,
}
PYTHON = [name for name, block in BLOCKS.items() if block.language == "python"]
SESSIONS = [name for name, block in BLOCKS.items() if block.text.startswith(">>>")]


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _without_mechanisms_of_examples():
    before = set(MECHANISMS)
    yield
    for name in set(MECHANISMS) - before:
        del MECHANISMS[name]


def executed(name: str) -> dict[str, Any]:
    """Runs an example with the names that it is given, and returns all names afterwards."""
    names = {"timm": timm, "torch": torch, "interlayer": interlayer} | GIVEN.get(name, dict)()
    code = BLOCKS[name].text.replace("pretrained=True", "pretrained=False")
    exec(compile(code, name, "exec"), names)
    return names


@pytest.mark.parametrize("name", [name for name in PYTHON if name not in {*PARSED, *LOOKED_AT}])
def test_examples_run(name):
    executed(name)


@pytest.mark.parametrize("name", [name for name in PYTHON if name in {*PARSED, EXPORT}])
def test_examples_that_are_not_run_name_what_exists(name):
    assert missing_names(BLOCKS[name].text) == []


def missing_names(code: str) -> list[str]:
    """Returns the names of this library in the code that do not exist."""
    wanted = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "interlayer":
            wanted += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("interlayer."):
            wanted.append(ast.unparse(node))
    return [name for name in wanted if "(" not in name and not _exists(name)]


def _exists(name: str) -> bool:
    found: Any = interlayer
    path = ["interlayer"]
    for word in name.split(".")[1:]:
        path.append(word)
        if not hasattr(found, word):
            try:
                importlib.import_module(".".join(path))
            except ImportError:
                return False
        found = getattr(found, word)
    return True


def test_a_missing_name_is_found():
    code = "interlayer.attach(model)\ninterlayer.nothing\nfrom interlayer.training import train, nobody"
    assert missing_names(code) == ["interlayer.training.nobody", "interlayer.nothing"]


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions_print_what_they_show(name):
    names = {"timm": timm, "torch": torch, "interlayer": interlayer}
    session = doctest.DocTestParser().get_doctest(BLOCKS[name].text, names, name, None, None)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(session).failed == 0


def test_the_lists_of_examples_are_up_to_date():
    present = set(map(name_of, DOCUMENTS))
    named = {name for name in {*PARSED, *GIVEN, *LOOKED_AT} if name.partition("#")[0] in present}
    assert named <= set(PYTHON), f"no such example: {named - set(PYTHON)}"
    assert {block.language for block in BLOCKS.values()} <= LANGUAGES, "a test must run blocks of a new language"


def test_a_run_is_loaded_in_three_lines(capsys):
    executed(LOAD_A_RUN)
    assert capsys.readouterr().out.split()[0] in {str(label) for label in range(10)}


def test_a_loop_of_ones_own_trains_an_attached_network():
    names = executed(OWN_LOOP)
    assert Path("mine.safetensors").is_file()
    attached = attached_mechanisms(names["model"]).values()
    assert attached
    assert all(parameter.grad is not None for mechanism in attached for parameter in mechanism.parameters())


def test_a_detector_trains_and_predicts_as_documented():
    names = executed(DETECTOR)
    assert set(names["losses"]) >= {"loss_classifier", "loss_box_reg"}
    assert [set(found) for found in names["predictions"]] == [{"boxes", "labels", "scores"}] * 2


def test_every_option_of_detectors_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "detection.md").read_text()
    for function in (interlayer.detector, interlayer.segmenter):
        assert [name for name in [*signature(function).parameters][1:] if f"`{name}" not in text] == []


@pytest.mark.slow
def test_an_exported_network_is_run_without_the_library():
    pytest.importorskip("onnxscript", reason="the extra export is not installed")
    names = executed(READ_EXPORTED)
    assert names["logits"].shape == (2, 10)
    assert names["metadata"]["image_size"]
