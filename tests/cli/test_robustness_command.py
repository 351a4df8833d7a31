"""`interlayer robustness`, run in separate processes."""

import json
import shutil

import pytest
from command_line import fails, run_forked

from interlayer_cli.networks import distinct_names, split_networks


@pytest.fixture(scope="module")
def runs(finished_run, tmp_path_factory):
    """Two folders of the same run."""
    folder = tmp_path_factory.mktemp("robustness")
    for name in ("one", "two"):
        shutil.copytree(finished_run, folder / name)
    return folder


def test_it_prints_networks_side_by_side_and_writes_a_page(runs):
    result = run_forked(
        "robustness", "one", "two", "--images", 40, "--repeats", 2, "--perturb", "occlusion", "--perturb",
        "shot_noise=5", "--perturb", "fgsm=4", "--output", "page.html", cwd=runs,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for text in ("one", "two", "difference", "shot noise", "5 photons", "epsilon 4/255", "page: page.html"):
        assert text in result.stdout
    assert "interlayer robustness one two --images 40" in (runs / "page.html").read_text()
    record = json.loads((runs / "page.json").read_text())
    assert (record["networks"], record["images"], record["data"]) == (["one", "two"], 40, "digits")
    assert [len(entry["scores"]["one"]["values"]) for entry in record["results"]] == [1, 1, 2, 1]
    assert "exists; give --overwrite" in fails("robustness", "one", "--output", "page.html", cwd=runs)


def test_json_is_printed_alone(runs):
    result = run_forked("robustness", "one", "--images", 20, "--perturb", "gaussian_blur=1", "--json", cwd=runs)
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert [entry["label"] for entry in record["results"]] == ["", "sigma 1 px"]
    assert record["networks"] == ["preresnet20_cifar+mrla_light:channels_per_head=8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "--perturb", "fog"], "unknown perturbation 'fog'; expected one of occlusion,"),
        (["one", "--perturb", "fgsm=a"], "expected fgsm=STRENGTH,STRENGTH with numbers"),
        (["one", "one"], "one is given twice"),
        (["one", "--output", "page.txt"], "must be the name of a page, such as robustness.html"),
        (["one", "--output", "nowhere/page.html"], "nowhere: no such folder"),
        (["device=cpu"], "no network is given"),
        (["nothing_here"], "nothing_here: no such folder of a run"),
        (["preresnet20_cifar"], "has no trained weights: give weights=FILE"),
        (["one", "epochs=3"], "epochs has no effect here"),
        (["one", "--data", "missing"], "missing: no such folder"),
    ],
)
def test_wrong_input_gives_one_sentence(runs, arguments, message):
    assert message in fails("robustness", *arguments, cwd=runs)


def test_overrides_belong_to_the_network_before_them():
    given = split_networks(
        ["device=cpu", "resnet50", "weights=a.pt", "resnet50+rla:state_channels=16", "image_size=64"]
    )
    assert given == [
        ("resnet50", ["device=cpu", "weights=a.pt"]),
        ("resnet50+rla:state_channels=16", ["device=cpu", "image_size=64"]),
    ]


def test_networks_have_the_shortest_names_that_tell_them_apart():
    runs = [("runs/a", []), ("runs/b", [])]
    assert distinct_names(runs, ["resnet50", "resnet50+mrla_light"]) == ["resnet50", "resnet50+mrla_light"]
    assert distinct_names(runs, ["resnet50", "resnet50"]) == ["a", "b"]
    sizes = [("resnet50", ["weights=a.pt"]), ("resnet50", ["weights=a.pt", "image_size=64"])]
    assert distinct_names(sizes, ["resnet50", "resnet50"]) == ["resnet50", "resnet50 image_size=64"]
    alike = [("resnet50", ["weights=a.pt"]), ("resnet50", ["weights=b.pt"])]
    assert distinct_names(alike, ["resnet50", "resnet50"]) == ["resnet50 weights=a.pt", "resnet50 weights=b.pt"]
