"""The Python examples of the documents run as they are printed."""

import re
from inspect import signature
from pathlib import Path

import pytest
import torch
from digit_images import SMALL, save_digits

import interlayer
from interlayer.hosts import attached_mechanisms
from interlayer.training import train
from interlayer.training.recipe import from_values

DOCS = Path(__file__).parents[1] / "docs"
TRAINING = (DOCS / "training.md").read_text()


def example(heading: str) -> str:
    """Returns the Python code under a heading of docs/training.md."""
    section = TRAINING.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_is_loaded_in_three_lines(capsys):
    train(from_values({**SMALL, "epochs": 1}), Path("runs/mine"))
    save_digits(Path("digits"), 1)
    next(Path("digits/7").iterdir()).rename("photo.jpg")
    exec(example("Loading a run"), {})
    assert capsys.readouterr().out.split()[0] in {str(label) for label in range(10)}


def test_a_loop_of_ones_own_trains_an_attached_network():
    batch = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    names = {"loader": [batch, batch]}
    exec(example("Your own loop"), names)
    assert Path("mine.safetensors").is_file()
    attached = attached_mechanisms(names["model"]).values()
    assert attached
    assert all(parameter.grad is not None for mechanism in attached for parameter in mechanism.parameters())


def test_a_detector_trains_and_predicts_as_documented():
    code = re.search(r"```python\n(.*?)```", (DOCS / "detection.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert set(names["losses"]) >= {"loss_classifier", "loss_box_reg"}
    assert [set(found) for found in names["predictions"]] == [{"boxes", "labels", "scores"}] * 2


def test_every_option_of_detectors_is_documented():
    text = (DOCS / "detection.md").read_text()
    for function in (interlayer.detector, interlayer.segmenter):
        assert [name for name in [*signature(function).parameters][1:] if f"`{name}" not in text] == []
