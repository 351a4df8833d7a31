"""The page of a robustness evaluation: complete, a single file, escaped, and readable in a browser and on a phone."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from interlayer.analysis import PERTURBATIONS, PerturbedScore
from interlayer.experiments import Robustness, robustness_table
from interlayer.experiments.robustness import Condition, Example
from interlayer.pages import write_robustness_page
from interlayer.tasks import Metric

ROWS = [PERTURBATIONS[name] for name in ("occlusion", "gaussian_noise", "fgsm")]
CONDITIONS = [Condition(), *(Condition(row, strength) for row in ROWS for strength in row.strengths)]


def made_up(*names, side=80):
    """Scores of networks that do not exist."""
    scores = {
        name: {
            condition: PerturbedScore((0.7 - 0.05 * place,), 0.7 - 0.05 * place, 0.01 if place == 2 else None)
            for place, condition in enumerate(CONDITIONS)
        }
        for name in names
    }
    original = torch.rand(3, side, side)
    examples = [
        Example(condition, (original + 0.01 * place).clamp(0, 1), original)
        for place, condition in enumerate(CONDITIONS)
    ]
    metric = Metric("accuracy", percent=True)
    return Robustness("photographs", 100, metric, 5, 0, scores, examples, {"bad<b>.png": "broken"}, ["one & two"])


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "robustness.html"
    write_robustness_page(made_up("plain", "<i>&odd"), path, command="interlayer robustness a <b>")
    return path


def test_table_plot_examples_and_command_are_there(page):
    text = page.read_text()
    cells = [html.unescape(cell).replace("\N{NO-BREAK SPACE}", " ") for cell in re.findall(r"<td>(.*?)</td>", text)]
    result = made_up("plain", "<i>&odd")
    assert cells == [cell for row in robustness_table(result).rows for cell in row]
    images = re.findall(r'<img alt="([^"]+)" src="data:image/(\w+)', text)
    assert images[0] == ("Accuracy by strength of each perturbation", "svg")
    attacks = len(PERTURBATIONS["fgsm"].strengths)
    assert len(images) == 1 + len(CONDITIONS) + attacks  # attacks also show their change
    assert {kind for _, kind in images[1:]} == {"jpeg"}
    assert "interlayer robustness a &lt;b&gt;" in text
    assert "Center occlusion, black: CB, Table 8." in text
    assert "1 image could not be used" in text
    assert re.search(r"torch \d+\.\d+", text)


def test_names_are_text_not_markup(page):
    text = page.read_text()
    assert "<i>" not in text
    assert "<b>.png" not in text
    assert "&lt;i&gt;&amp;odd" in text
    assert "One &amp; two." in text


def test_the_figures_are_beside_it_as_json(page):
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["command"] == "interlayer robustness a <b>"
    assert record["networks"] == ["plain", "<i>&odd"]
    assert len(record["results"]) == len(CONDITIONS)
    assert sorted(path.name for path in page.parent.iterdir()) == ["robustness.html", "robustness.json"]


def test_small_images_are_not_compressed(tmp_path):
    write_robustness_page(made_up("plain", side=8), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "data:image/jpeg" not in text
    assert text.count("class=small") == len(CONDITIONS) + len(PERTURBATIONS["fgsm"].strengths)


def test_it_renders_without_errors_without_a_network_and_on_a_phone(browser, page):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 3, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get_log("browser")
        browser.get_log("performance")
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []
    messages = " ".join(str(entry["message"]) for entry in browser.get_log("performance"))
    requests = re.findall(r'"url":"((?!data:)[^"]+)"', messages)
    assert {url for url in requests if not url.startswith(("file:", "about:", "chrome"))} == set()
    sizes = browser.execute_script("return [...document.images].map(i => [i.complete, i.naturalWidth, i.alt])")
    assert all(done and width > 0 and alt for done, width, alt in sizes)
    headings = [heading.text for heading in browser.find_elements("tag name", "h2")]
    assert headings == ["Scores", "By strength", "Examples", "Whose strengths", "Again"]


def test_the_examples_of_the_documentation_run(finished_run, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text()
    experiment, attack = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "mrla"):
        shutil.copytree(finished_run, tmp_path / "runs" / name)
    exec(experiment.replace("images=200", "images=20"), {})
    assert "FGSM" in capsys.readouterr().out
    assert (tmp_path / "robustness.html").is_file()
    images = torch.rand(2, 3, 4, 4)
    names = {"torch": torch, "model": torch.nn.Flatten(), "mean": 0.5, "std": 0.2, "images": images}
    names["labels"] = torch.tensor([0, 1])
    exec(attack, names)
    assert (names["attacked"] - images).abs().max() <= 4 / 255 + 1e-6
