"""The explorer: what it shows, whose it is, and a visit in a real browser."""

import io
import json
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from interlayer.analysis import attention_maps
from interlayer.analysis.overlay import mark_box, overlay
from interlayer.experiments import sample_photographs
from interlayer.experiments.explorer import Explorer, ExplorerError, enlarged, read_photograph
from interlayer.experiments.pretrained import PretrainedNetwork
from interlayer.experiments.shown_images import show_photograph

CPU = torch.device("cpu")
SMALL = {
    "transformer": ("vit_tiny_patch16_224+mrla_base", ["image_size=64", "model_options={depth: 4}"]),
    "cnn": ("resnet10t+mrla_light", ["image_size=64"]),
}


def make_explorer():
    torch.manual_seed(0)
    return Explorer({
        name: partial(PretrainedNetwork, model, keys, device=CPU, untrained=True)
        for name, (model, keys) in SMALL.items()
    }, device=CPU)  # fmt: skip


@pytest.fixture(scope="module")
def explorer():
    return make_explorer()


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (90, 70, 3), dtype=np.uint8))


def test_the_picture_is_the_attention_of_the_patch_that_was_chosen(explorer):
    """The patch at (0.9, 0.3) of a grid of 4 x 4 is in row 1 and column 3."""
    network = explorer.open("transformer")
    loaded, photograph = network._loaded, sample_photographs()["flower"]()
    shown = show_photograph(loaded, photograph)
    maps = attention_maps(loaded.network, shown.inputs)
    assert [each.name for each in network.attentions(photograph)] == [each.name for each in maps]
    weights = maps[1].weights[0, 2, 1 + 4 * 1 + 3, 1:].view(4, 4)
    heatmap = (weights - weights.min()) / (weights.max() - weights.min())
    expected = mark_box(overlay(enlarged(shown.pictures[0]), heatmap), (1 / 4, 3 / 4, 1 / 4, 1 / 4))
    found = network.spatial_attention(photograph, layer=maps[1].name, head=2, place=(0.9, 0.3))
    assert np.array_equal(found.image, expected)
    assert "head 2" in found.caption


def test_layer_attention_and_class_activation_differ_by_what_is_chosen(explorer):
    """Every control changes the picture."""
    for name in SMALL:
        network, photograph = explorer.open(name), picture(0)
        mean, head = (np.asarray(network.layer_attention(photograph, head=h).image) for h in (None, 0))
        assert mean.shape != head.shape or not np.array_equal(mean, head)
        predicted = network.predictions(photograph, top=2)
        assert predicted[0][1] >= predicted[1][1]
        drawn = [
            network.class_activation(photograph, "group_cam", target=target, stage=stage)
            for target, stage in ((None, None), (predicted[1][0], None), (None, 1))
        ]
        assert len({shown.image.tobytes() for shown in drawn}) == 3
        assert drawn[0].caption.startswith(predicted[0][0])


def test_two_visitors_of_one_network_get_their_own_pictures(explorer):
    """Captures add hooks to a network: without a lock, one visitor could see what another one's photograph computes."""
    network = explorer.open("transformer")
    photographs = [picture(seed) for seed in range(4)]
    alone = [network.spatial_attention(each).image.tobytes() for each in photographs]
    assert len(set(alone)) == 4
    found: dict[int, set[bytes]] = {}

    def visit(number):
        found[number] = {network.spatial_attention(photographs[number]).image.tobytes() for _ in range(4)}

    visitors = [threading.Thread(target=visit, args=(number,)) for number in range(4)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert found == {number: {alone[number]} for number in range(4)}


def test_networks_by_name_are_built_but_folders_are_not_opened(explorer, tmp_path):
    assert explorer.open("resnet10t").title == "resnet10t, untrained"
    for name in (str(tmp_path), "../runs/mine", f"local-dir:{tmp_path}", "hf-hub:someone/model"):
        with pytest.raises(ExplorerError, match="is not offered here"):
            explorer.open(name)
    with pytest.raises(ExplorerError, match="did you mean resnet18"):
        explorer.open("resnet118")
    with pytest.raises(ExplorerError, match="has no spatial attention: choose a transformer"):
        explorer.open("cnn").spatial_attention(picture(0))
    with pytest.raises(ExplorerError, match="has no layer attention"):
        explorer.open("resnet10t").layer_attention(picture(0))
    with pytest.raises(ExplorerError, match="has spatial attention at places that are not known"):
        explorer.open("halonet26t").spatial_attention(picture(0))


def test_networks_that_were_not_used_are_dropped(monkeypatch):
    """A visitor who names many networks does not fill the memory."""
    monkeypatch.setattr("interlayer.experiments.explorer.MOST_NETWORKS", 1)
    explorer = make_explorer()
    for name in ("cnn", "resnet10t", "resnet14t"):
        explorer.open(name)
    assert list(explorer._opened) == ["cnn", "resnet14t"]


def test_files_that_are_no_photographs_get_a_sentence(tmp_path):
    (tmp_path / "corrupt.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"nonsense")
    (tmp_path / "text.jpg").write_text("no image")
    Image.new("1", (10_000, 6_000)).save(tmp_path / "huge.png")
    (tmp_path / "large.png").write_bytes(b"\0" * (21 * 2**20))
    for name, sentence in {
        "corrupt.png": "cannot be read as an image",
        "text.jpg": "cannot be read as an image",
        "huge.png": "more than 50 million pixels: take a smaller photograph",
        "large.png": "more than 20 MB: take a smaller photograph",
    }.items():
        with pytest.raises(ExplorerError, match=sentence) as error:
            read_photograph(tmp_path / name)
        assert str(tmp_path) not in str(error.value), "a visitor does not know the folders of the server"
    picture(0).save(tmp_path / "good.png")
    assert np.array_equal(read_photograph(tmp_path / "good.png"), picture(0))


@pytest.fixture(scope="module")
def served():
    """An explorer, and the address of its page."""
    pytest.importorskip("gradio", reason="gradio is not installed: the explorer cannot be shown")
    from interlayer.pages.explorer import serve_explorer

    explorer = make_explorer()
    page, address = serve_explorer(explorer, wait=False)
    yield explorer, address
    page.close()


@pytest.fixture
def visit(served, browser):
    """Opens the page, as often as it is called."""
    empty, visits = browser.current_window_handle, []

    def open_page():
        visits.append(Visit(browser, served[1]))
        return visits[-1]

    yield open_page
    # Every page keeps a connection, and a browser has six for one server.
    for each in visits:
        each.look()
        browser.close()
    browser.switch_to.window(empty)


class Visit:
    """What a visitor does and sees."""

    def __init__(self, browser, address):
        self.browser = browser
        browser.switch_to.new_window("tab")
        browser.get(address)
        self.window = browser.current_window_handle
        self.until(lambda: self.source("activation-0"), "the first picture")

    def look(self):
        self.browser.switch_to.window(self.window)

    def until(self, condition, what):
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 60, 0.2).until(lambda _: condition(), f"{what} did not appear")

    def find(self, selector):
        from selenium.webdriver.common.by import By

        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def source(self, picture):
        images = self.find(f"#{picture} img")
        return images[0].get_attribute("src") if images else None

    def pixels(self, picture):
        """The picture that the page shows, as the browser gets it."""
        code = """const done = arguments[1];
            fetch(arguments[0]).then(r => r.arrayBuffer()).then(b => done(Array.from(new Uint8Array(b))))"""
        content = bytes(self.browser.execute_async_script(code, self.source(picture)))
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))

    def upload(self, path):
        (field,) = self.until(lambda: self.find("#upload input[type=file]"), "the field for files")
        field.send_keys(str(path))

    def choose(self, name, element="network-0"):
        from selenium.webdriver.common.keys import Keys

        (field,) = self.find(f"#{element} input")
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(name, Keys.ENTER)

    def take(self, sample):
        (field,) = self.find(f"#sample input[value='{sample}']")
        field.click()

    def open_tab(self, title):
        (tab,) = [each for each in self.find("button[role=tab]") if each.text == title]
        tab.click()

    def click(self, picture, x, y):
        """Click into a picture, at fractions of its width and height."""
        from selenium.webdriver.common.action_chains import ActionChains

        (image,) = self.find(f"#{picture} img")
        size = image.size
        offset = round(x * size["width"] - size["width"] / 2), round(y * size["height"] - size["height"] / 2)
        ActionChains(self.browser).move_to_element_with_offset(image, *offset).click().perform()

    def text(self, element):
        found = self.find(f"#{element}")
        return found[0].text if found else ""


def test_a_visit(visit, explorer, tmp_path):
    """Uploads a photograph, chooses a network, clicks a patch, and sees the attention that Python computes."""
    photograph = sample_photographs()["palace"]()
    photograph.save(tmp_path / "palace.png")
    visit = visit()
    first = visit.source("activation-0")
    visit.upload(tmp_path / "palace.png")
    visit.until(lambda: visit.source("activation-0") != first, "the activation of the photograph")
    network = explorer.open("transformer")
    assert np.array_equal(visit.pixels("activation-0"), network.class_activation(photograph, "grad_cam").image)

    visit.open_tab("Spatial attention")
    visit.until(lambda: visit.source("attention-0"), "the attention of the center")
    before = visit.source("attention-0")
    visit.click("attention-0", 0.9, 0.3)
    visit.until(lambda: visit.source("attention-0") != before, "the attention of the patch")
    expected = network.spatial_attention(photograph, place=(0.9, 0.3))
    assert np.array_equal(visit.pixels("attention-0"), expected.image)
    assert visit.text("attention-caption-0") == expected.caption

    visit.choose("cnn")
    visit.until(lambda: "has no spatial attention" in visit.text("attention-caption-0"), "the reason")
    visit.open_tab("Layer attention")
    visit.until(lambda: visit.source("layers-0"), "the scores between layers")
    expected = explorer.open("cnn").layer_attention(photograph, stage=0)
    assert visit.text("layers-caption-0") == expected.caption

    visit.choose("transformer", "network-1")
    visit.until(lambda: visit.source("layers-1"), "the second network")

    before = visit.source("layers-0")
    (tmp_path / "notes.png").write_text("no image")
    visit.upload(tmp_path / "notes.png")
    visit.until(lambda: "cannot be read as an image" in visit.text("message"), "the sentence about the file")
    assert visit.source("layers-0") == before, "the photograph stays"
    visit.choose("resnet118")
    visit.until(lambda: "did you mean" in visit.text("problem-0"), "advice")
    visit.choose("transformer")
    visit.until(lambda: not visit.text("problem-0"), "a network without a problem")


def test_another_stage_is_drawn_with_the_heads_that_the_list_shows(visit, explorer):
    """Stages differ in their number of heads, so that the choice of a head begins again."""
    visit = visit()
    visit.choose("cnn")
    visit.open_tab("Layer attention")
    photograph = sample_photographs()["Grace Hopper"]()
    stages = explorer.open("cnn").layer_scores(photograph)
    visit.until(lambda: stages[0].name in visit.text("layers-caption-0"), "the first stage")
    visit.choose("head 1", "layer-head-0")
    visit.until(lambda: visit.text("layers-caption-0").endswith("head 1"), "one head")
    visit.choose(stages[2].name, "layer-stage-0")
    visit.until(lambda: stages[2].name in visit.text("layers-caption-0"), "the third stage")
    assert visit.text("layers-caption-0").endswith("mean over heads"), "as the list of heads says"
    assert visit.find("#layer-head-0 input")[0].get_attribute("value") == "mean over heads"


def test_the_last_choice_is_shown(served, visit, monkeypatch):
    """A network that takes long to draw does not replace what was chosen after it."""
    explorer, visit = served[0], visit()
    opened = explorer.open
    finished = threading.Event()

    def open_slowly(name):
        if name == "transformer":
            time.sleep(3)
            finished.set()
        return opened(name)

    monkeypatch.setattr(explorer, "open", open_slowly)
    visit.take("flower")
    visit.choose("resnet118")
    visit.until(lambda: "did you mean" in visit.text("problem-0"), "advice")
    visit.until(finished.is_set, "the slow network")
    time.sleep(2)
    assert "did you mean" in visit.text("problem-0"), "what the slow network draws belongs to the choice before"


def test_a_file_that_is_no_photograph_draws_nothing(served, visit, monkeypatch, tmp_path):
    """Drawing everything again takes seconds, in which the page would seem to take the file."""
    explorer, visit = served[0], visit()
    opened = []
    monkeypatch.setattr(explorer, "open", lambda name: opened.append(name))
    (tmp_path / "notes.png").write_text("no image")
    visit.upload(tmp_path / "notes.png")
    visit.until(lambda: "cannot be read as an image" in visit.text("message"), "the sentence about the file")
    time.sleep(1)
    assert not opened


@pytest.fixture
def handlers(explorer):
    """The functions that the page calls, by name."""
    pytest.importorskip("gradio", reason="gradio is not installed: the explorer cannot be shown")
    from interlayer.pages.explorer import build_explorer

    return {each.fn.__name__: each.fn for each in build_explorer(explorer).fns.values()}


def test_the_heads_that_are_offered_are_those_of_the_layer(handlers):
    """PVT v2 has 1, 2, 5 and 8 heads in its stages."""
    for layer, heads in (("stages.0.blocks.0.attn", 1), ("stages.2.blocks.1.attn", 5)):
        offered = handlers["choose_layer"](picture(0), "pvt_v2_b0", layer)
        assert [value for _, value in offered["choices"]] == ["mean over heads", *range(heads)]
        assert offered["value"] == "mean over heads"


def test_without_a_second_network_nothing_is_drawn_for_it(handlers):
    """Choosing a method draws both networks; the lists of one that is not there are empty."""
    assert handlers["draw_activation"](picture(0), "nothing", "group_cam", None, None) == (None, "")


def test_a_network_whose_mechanism_has_no_attention_is_shown_without_it(handlers):
    """What cannot be drawn is said where the picture would be; the other panels are drawn."""
    refresh = handlers["refresh"]
    problem, _, _, _, *shown = refresh(picture(0), "resnet10t+mrla_light:attention=false", "group_cam", (0.5, 0.5))
    assert problem == ""
    assert [type(each).__name__ for each in shown].count("Image") == 1, "class activation"
    assert any("gives no scores: attention=False has none" in each for each in shown if isinstance(each, str))


def test_visitors_see_only_their_own_photographs(visit, tmp_path):
    photographs = [picture(seed) for seed in (1, 2)]
    visits = []
    for number, photograph in enumerate(photographs):
        photograph.save(tmp_path / f"{number}.png")
        one = visit()
        before = one.source("activation-0")
        one.upload(tmp_path / f"{number}.png")
        one.until(lambda one=one, before=before: one.source("activation-0") != before, "the photograph")
        visits.append(one)
    network = make_explorer().open("transformer")
    for one, photograph in zip(visits, photographs, strict=True):
        one.look()
        assert np.array_equal(one.pixels("activation-0"), network.class_activation(photograph, "grad_cam").image)


def test_nothing_comes_from_other_servers(served, visit, browser):
    browser.get_log("performance")
    visit()
    hosts = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent" and message["params"]["request"]["url"].startswith("http"):
            hosts.add(message["params"]["request"]["url"].split("/")[2])
    assert hosts == {served[1].split("/")[2]}
