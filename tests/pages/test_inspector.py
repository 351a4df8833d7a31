"""The page of an inspection: every figure that applies, how to read it, and why the others do not."""

import re
from html import unescape

import numpy as np
import pytest
import torch
from PIL import Image

from interlayer.experiments import load_network, shown_images
from interlayer.experiments.shown_images import sample_photographs
from interlayer.pages import inspected, write_inspection
from interlayer.pages.readings import READINGS

CPU = torch.device("cpu")
SPATIAL = {"attention", "entropy", "distance", "jacobian"}
LAYERS = {"layer_scores", "contribution"}
SEVERAL = {"queries", "sharing"}  # which stages of one layer do not have


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    for name, load in sample_photographs().items():
        load().resize((96, 80)).save(folder / f"{name}.png")
    return sorted(folder.iterdir())


def networks(*names):
    torch.manual_seed(0)
    keys = {"vit": ["model_options={depth: 3}"]}
    return {
        name: load_network(name, ["image_size=64", *keys.get(name[:3], [])], device=CPU, untrained=True)
        for name in names
    }


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("names", "figures"),
    [
        (["resnet10t"], {"class_activation"}),
        (["resnet10t", "resnet10t+mrla_light"], {"class_activation", *LAYERS}),
        (
            ["vit_tiny_patch16_224+mrla_base+cb:scaled=true"],
            {"class_activation", "broadcast_scales", *SPATIAL, *LAYERS},
        ),
        pytest.param(["rest_lite"], {"class_activation", "emsa_heads", *SPATIAL}, marks=pytest.mark.slow),
    ],
)
def test_the_page_has_what_applies_and_says_why_the_rest_does_not(names, figures, photographs, tmp_path):
    loaded = networks(*names)
    before = {name: (hooks(each.network), each.network.training) for name, each in loaded.items()}
    images = {name: shown_images(each, photographs) for name, each in loaded.items()}
    files = write_inspection(loaded, images, tmp_path / "page.html", command="interlayer inspect")
    assert {re.sub(r"_\d$", "", file.stem) for file in files[1:]} == figures
    for file in files[1:]:
        assert np.asarray(Image.open(file).convert("L")).std() > 5, f"{file} is blank"
    page = unescape((tmp_path / "page.html").read_text())
    left_out = page.partition("What does not apply")[2]
    for name, reading in READINGS.items():
        assert (reading.text in page) == (name in figures), name
        assert (reading.title in left_out) == (name not in figures), "with the reason why"
    for name in loaded:
        assert f"{name[0].upper()}{name[1:]}:" not in page, "names of networks are not capitalized"
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page), "nothing is loaded from a server"
    assert page.count("has random weights") == len(names)
    assert {name: (hooks(each.network), each.network.training) for name, each in loaded.items()} == before


def test_a_figure_that_fails_leaves_no_page(photographs, tmp_path, monkeypatch):
    """A bug in the last figure must not leave a page that looks complete."""

    def fail(subject):
        raise RuntimeError("a bug")

    broken = inspected.InspectedFigure("emsa_heads", fail, lambda networks: [])
    monkeypatch.setattr("interlayer.pages.inspector.FIGURES", (*inspected.FIGURES[:1], broken))
    loaded = networks("resnet10t")
    images = {"resnet10t": shown_images(loaded["resnet10t"], photographs)}
    with pytest.raises(RuntimeError, match="a bug"):
        write_inspection(loaded, images, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_every_figure_has_a_reading():
    assert {figure.name for figure in inspected.FIGURES} == set(READINGS)
