"""The report in a browser: it renders without console errors or network access, and fits a phone screen."""

import html
import json
import re
import shutil

import pytest

from interlayer.pages import figures, write_comparison_report, write_run_report
from interlayer.tasks import make_task
from interlayer.training.summary import read_contribution, read_summary


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    from digit_images import SMALL

    from interlayer.experiments import compare
    from interlayer.training.recipe import from_values

    recipe = from_values(
        {**SMALL, "attach_options": {"channels_per_head": 8}, "batch_size": 128, "epochs": 3, "lr": 0.1}
    )
    models = ["preresnet20_cifar", "preresnet20_cifar+mrla_light"]
    return compare(
        recipe, models, tmp_path_factory.mktemp("report"), seeds=[0, 1], command="interlayer compare --seeds 2"
    )


@pytest.fixture(scope="module")
def reports(comparison):
    """Reports of a comparison and of one of its runs."""
    return {
        "comparison": write_comparison_report(comparison),
        "run": write_run_report(comparison.results[1].folders[0]),
    }


def shown_text(page):
    """The text of a page without markup, on one line."""
    return html.unescape(" ".join(re.sub(r"<(style|pre).*?</\1>|<[^>]*>", "", page, flags=re.DOTALL).split()))


def test_weights_between_layers_stand_beside_what_the_mechanism_contributes(comparison, reports):
    """ "Layer 3 reads layer 1 with 0.80" says nothing if the network does not use the mechanism."""
    light = comparison.results[1]
    for kind, contribution in (
        ("comparison", light.contribution),
        ("run", read_contribution(read_summary(light.folders[0]))),
    ):
        text = shown_text(reports[kind].read_text())
        before, after = text.split("Which layer reads which")
        assert f"{light.model}: {contribution.sentence}." in before
        assert f"Here {contribution.change}; {contribution.sentence}." in after
        assert f"mean over 360 test images{' and 2 seeds' if kind == 'comparison' else ''}. Switched off" in before


def test_a_run_of_an_earlier_version_has_its_contribution_measured_again(comparison, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(comparison.results[1].folders[0], folder)
    summary = read_summary(folder)
    del summary["contribution"]
    (folder / "summary.json").write_text(json.dumps(summary))
    text = shown_text(write_run_report(folder).read_text())
    assert "What the mechanism contributes" not in text
    assert "Here mrla_light changes the outputs of its blocks by " in text
    assert "of 64 predictions" in text


def test_a_run_shows_which_classes_are_taken_for_which(reports):
    page = reports["run"].read_text()
    assert 'alt="Confusion matrix of 10 classes"' in page
    assert "<h2>Confusion</h2>" in page


def open_report(browser, path):
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())


@pytest.mark.parametrize("kind", ["comparison", "run"])
def test_it_renders_without_errors_and_without_a_network(browser, reports, kind):
    open_report(browser, reports[kind])
    assert browser.get_log("browser") == []
    requests = re.findall(
        r'"url":"((?!data:)[^"]+)"', " ".join(str(e["message"]) for e in browser.get_log("performance"))
    )
    assert {url for url in requests if not url.startswith(("file:", "about:", "chrome"))} == set()
    sizes = browser.execute_script("return [...document.images].map(i => [i.complete, i.naturalWidth, i.alt])")
    assert len(sizes) > 5
    assert all(done and width > 0 and alt for done, width, alt in sizes)


def test_everything_a_reader_looks_for_is_there(browser, reports, comparison):
    open_report(browser, reports["comparison"])
    headings = [h.text for h in browser.find_elements("tag name", "h2")]
    assert headings == [
        "Accuracy and cost", "Training", "What the mechanism contributes", "Which layer reads which",
        "Where they disagree", "Confusion of preresnet20_cifar, first seed",
        "Confusion of preresnet20_cifar+mrla_light, first seed", "Again", "Recipe",
    ]  # fmt: skip
    text = browser.find_element("tag name", "body").text
    for verdict in comparison.verdicts():
        assert verdict in text
    assert "interlayer compare --seeds 2" in text
    assert "batch_size: 128" in text
    assert re.search(r"torch \d+\.\d+", text)
    cells = [cell.text for cell in browser.find_elements("css selector", "tbody tr:nth-child(2) td")]
    assert cells[0] == "preresnet20_cifar+mrla_light"
    assert cells[3] == comparison.results[1].contribution.range
    assert cells[5] == f"{comparison.results[1].cost.parameters:,}"
    assert browser.find_elements("css selector", "img[alt='Accuracy against training time and memory']")
    assert browser.find_elements("css selector", ".grid figure"), "two half-trained networks disagree on some images"


@pytest.mark.parametrize("kind", ["comparison", "run"])
def test_it_fits_a_phone(browser, reports, kind):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 3, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_report(browser, reports[kind])
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.execute_script("return parseFloat(getComputedStyle(document.body).fontSize)") >= 15
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_prints(browser, reports):
    open_report(browser, reports["comparison"])
    printed = browser.print_page()
    assert len(printed) > 20_000
    import base64

    assert base64.b64decode(printed).startswith(b"%PDF")


def test_names_are_text_not_markup(comparison, tmp_path):
    """Names of classes and files can contain markup."""
    folder = tmp_path / "run"
    shutil.copytree(comparison.results[0].folders[0], folder)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["classes"] = [f"<script>alert({i})</script>" for i in range(10)]
    summary["bad_images"] = {"<img src=x onerror=alert(1)>.png": "broken"}
    path.write_text(json.dumps(summary))
    page = write_run_report(folder).read_text()
    assert "<script" not in page
    assert "<img src=x" not in page


def test_sections_of_any_task_are_laid_out_and_escaped(comparison, monkeypatch):
    """Tables, keys and tones of a task from outside the package."""
    from PIL import Image

    from interlayer.tasks import Classification, Line, Picture, Plot, Section, Span, Table

    odd = "<i>&"
    picture = Picture(Image.new("RGB", (4, 4)), odd, [[Span(odd, "good", 1), Span(odd)], [Span(odd, "strong")]])
    section = Section(
        odd, odd, keys=["a", odd], legend=odd, tables=[Table(odd, [odd], [[odd]], odd)], pictures=[picture],
        plot=Plot(odd, odd, odd, [Line(odd, [0, 1], [1, 0])]), swatches=[(odd, "#123456")], rows=[[picture, picture]],
    )  # fmt: skip
    monkeypatch.setattr(Classification, "show_run", lambda self, run, images: [section])
    page = write_run_report(comparison.results[0].folders[1]).read_text()
    assert odd not in page
    assert page.count("&lt;i&gt;&amp;") == 14 + 2 + 2 * 5, "the plot, the swatch and two more pictures"
    assert '<span class=swatch style="background:#123456"></span>' in page
    assert page.count("data:image/jpeg") == 2
    assert "<span class=right>&lt;i&gt;&amp;</span>&lt;i&gt;&amp;<br><b>&lt;i&gt;&amp;</b>" in page


def test_templates_are_files_of_the_package():
    from importlib import resources

    names = {path.name for path in (resources.files("interlayer.pages") / "templates").iterdir()}
    assert names >= {"report.html", "report.css"}


def test_the_axis_of_the_loss_fits_its_curves(tmp_path, monkeypatch):
    """With limits from a linear axis, a logarithmic one spans hundreds of decades, and its curves are a line."""
    columns = ["epoch", "train_loss", "eval_loss", "train_accuracy", "eval_accuracy"]
    rows = [[epoch, 2.0**-epoch, 2.0**-epoch, 0.5, 0.5] for epoch in range(1, 9)]
    (tmp_path / "metrics.csv").write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]))
    drawn = []
    monkeypatch.setattr(figures, "svg", lambda figure: drawn.append(figure) or "")
    figures.curves(make_task({}, []), {"network": [tmp_path]})
    (axes,) = drawn[0].axes
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert 2**-9 < low <= 2**-8
    assert 2**-1 <= high < 1
