"""The Python examples of the documents run as they are printed."""

import re
from pathlib import Path

import pytest
import torch
from digit_images import SMALL, save_digits

from interlayer.hosts import attached_mechanisms
from interlayer.training import train
from interlayer.training.recipe import from_values

TRAINING = (Path(__file__).parents[1] / "docs" / "training.md").read_text()


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
