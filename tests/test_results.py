"""The claims of results/: their commands can be run, the page is what the files say, and comparisons are taken over."""

import json
import re
import shlex
import shutil
import sys
from fractions import Fraction

import pytest
import torch
import yaml
from documents import ROOT
from test_site import program

from interlayer.experiments import compare, comparison_rows
from interlayer.experiments.compare import recipe_for
from interlayer.experiments.record import RECIPE_FILE, RECORD_FILE, read_record
from interlayer.experiments.trained import task_of
from interlayer.models.build import check_network
from interlayer.training import Stopped
from interlayer.training.recipe import read_recipe
from interlayer.training.setup import build_network

claims, write_results = program("claims"), program("write_results")
CLAIMS = {claim.id: claim for claim in claims.read_claims()}
PLANS = {plan.name: plan for claim in CLAIMS.values() for plan in claim.plans}
BUILT = [(plan.name, model) for plan in PLANS.values() for model in plan.models]


def test_the_page_is_what_the_files_say():
    assert write_results.PAGE.read_text() == write_results.page(), "run `make results`"


def test_claims_follow_one_another():
    assert [claim.number for claim in CLAIMS.values()] == list(range(1, len(CLAIMS) + 1))
    assert len(PLANS) == sum(len(claim.plans) for claim in CLAIMS.values()), "two comparisons have the same --output"
    assert {path.name for path in claims.RESULTS.iterdir() if path.is_dir()} == set(CLAIMS)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_schedule_is_a_fifth_of_the_papers_or_more(name):
    claim = CLAIMS[name]
    assert claim.paper_epochs is None or Fraction(claim.epochs, claim.paper_epochs) >= Fraction(1, 5)


@pytest.mark.parametrize("name", PLANS)
def test_commands_are_understood(name):
    """Their networks exist, the images have the neutral name, and a rate that decays does so in the schedule."""
    plan = PLANS[name]
    for model in plan.models:
        check_network(model)
    assert plan.recipe.data in {"/data/cifar10", "/data/BCCD", "/data/nuclei", "/data/camvid"}
    assert all(milestone < plan.recipe.epochs for milestone in plan.recipe.milestones)
    assert plan.recipe.shortened_warmup == plan.recipe.warmup_epochs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), BUILT)
def test_networks_build_and_read_images(name, model):
    from_scratch = {"pretrained": False, "new_lr_scale": 1.0, "mechanism_lr_scale": None}
    recipe = recipe_for(PLANS[name].recipe.replace(**from_scratch), model, 0)
    task = task_of(recipe, [str(number) for number in range(10)])
    network = build_network(task).eval()
    with torch.no_grad():
        output = task.forward(network, torch.randn(1, 3, task.image_size, task.image_size))
    if task.annotations == "labels":
        assert output.shape == (1, 10)
    else:
        assert len(output) == 1, "a label map or the detections of one image"


@pytest.mark.parametrize("path", sorted(claims.RESULTS.rglob("*")), ids=lambda path: path.name)
def test_files_are_small_texts_without_paths_of_a_machine(path):
    """Weights and images do not belong here, nor where somebody's images are."""
    if path.is_file():
        assert path.suffix in {".yaml", ".json", ".csv", ".md"}
        assert path.stat().st_size < 100_000
        assert re.search(r"/(work|home|root|tmp|mnt|Users)/", path.read_text()) is None


COMMAND = (
    "interlayer compare --recipe digits --model preresnet20_cifar --model preresnet20_cifar+mrla_light "
    "--mildest-control --seeds 2 --data digits --output runs/tiny model_options.blocks=2 "
    "'model_options.widths=[8,8,16]' image_size=8 padding=1 batch_size=256 epochs=1 warmup_epochs=0 tensorboard=false "
    "device=cpu workers=0"
)
PLAIN, LIGHT = "preresnet20_cifar", "preresnet20_cifar+mrla_light"
CUT = f"{LIGHT}:cross_layer=false"
TINY = {
    "id": "tiny", "number": 1, "title": "A tiny claim", "paper": "No paper, Table 0", "claim": "It helps.",
    "networks": [PLAIN, LIGHT, CUT], "claimed": [LIGHT], "seeds": 2, "epochs": 1, "paper_epochs": 5,
    "schedule": "Short.", "commands": [COMMAND],
}  # fmt: skip


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty results/ with one claim; returns the function that writes it with other values."""
    folder = tmp_path / "results"
    monkeypatch.setattr(claims, "RESULTS", folder)
    monkeypatch.setattr(write_results, "PAGE", tmp_path / "results.md")
    (folder / "tiny").mkdir(parents=True)
    (folder / "overview.md").write_text("# Results\n\nSee [Controls](../docs/controls.md).\n")

    def write(**changes):
        (folder / "tiny" / "claim.yaml").write_text(yaml.safe_dump({**TINY, **changes}, sort_keys=False))
        return claims.read_claim(folder / "tiny" / "claim.yaml")

    write()
    return write


def run(folder, stop=lambda: False, **options):
    """Runs the comparison of the claim. Data have another name on this machine, as they have on a reader's."""
    plan = claims.Plan(claims.Claim(**TINY), COMMAND)
    return compare(
        plan.recipe, plan.models, folder, seeds=plan.seeds, stop=stop, command="interlayer secret", **options
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("comparisons") / "whole")


def steps(number):
    """Returns a function that asks for a stop after some calls."""
    count = iter(range(10**9))
    return lambda: next(count) > number


def call(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["write_results.py", *map(str, arguments)])
    write_results.main()


def test_a_finished_comparison_is_taken_over(whole, results, monkeypatch, capsys):
    """The page has the figures of the library, and the stored files no weights and no paths."""
    call("add", "tiny", whole.folder, monkeypatch=monkeypatch)
    assert (
        "2 runs of preresnet20_cifar, 2 runs of preresnet20_cifar+mrla_light and 2 runs of" in capsys.readouterr().out
    )
    page, folder = write_results.PAGE.read_text(), claims.RESULTS / "tiny"
    assert page.startswith("# Results\n\nSee [Controls](controls.md).\n")
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert files == {"claim.yaml", "recipe.yaml", RECORD_FILE, "metrics.csv", "summary.json"}
    assert not any(str(whole.folder) in path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "secret" not in "".join(path.read_text() for path in folder.rglob("*.json"))
    for row in comparison_rows(whole):
        assert all(f" {cell.strip('*')}" in page.replace("**", "") for cell in row[:4] if cell)
    light = whole.results[1]
    assert f"| {light.controls[0].difference.format(whole.metric)} |" in page.replace("**", "")
    for line in (line for text in whole.verdicts() for line in text.splitlines()):
        assert f"- {line}\n" in page
    assert f"`{LIGHT}`: {write_results.FINDINGS[whole.finding(light)]}.**" in page
    assert "1 of 5 epochs (1/5)" in page
    assert "| 6 of 6 |" in page
    assert "on CPU." in page
    assert "Open:" not in page
    assert f"```\n{COMMAND}\n```" in page


def test_further_metrics_stand_beside_the_one_that_is_compared(whole, results):
    claim = results(metrics=["top5"])
    claims.add(claim, whole.folder)
    lines = [line.split(" | ") for line in write_results.page().splitlines() if line.startswith("| ")]
    header = next(cells for cells in lines if cells[0] == "| network")
    assert header[1:3] == ["accuracy", "top 5"]
    values = [json.loads((whole.folder / PLAIN / f"seed{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    mean = sum(summary["test"]["top5"] for summary in values) / 2
    row = next(cells for cells in lines if cells[0] == f"| `{PLAIN}`")
    assert row[2].startswith(f"{mean:.2%} ± ")
    assert len(row) == len(header)


def test_a_partial_comparison_is_taken_over_and_goes_on(whole, results, tmp_path, monkeypatch, capsys):
    """What is missing is listed with the command that goes on, and the end is that of an unbroken comparison."""
    folder = tmp_path / "cut"
    with pytest.raises(Stopped):
        run(folder, steps(5 * 8))
    finished = len(list(folder.glob("*/seed*/summary.json")))
    assert 3 <= finished < 6, "the test is about a comparison with some runs"
    call("add", "tiny", folder, monkeypatch=monkeypatch)
    page = write_results.PAGE.read_text()
    assert f"| {finished} of 6 |" in page
    assert f"`{CUT}` (seed 1)" in page, "every network has the first seed before one has the second"
    assert f"{COMMAND.replace('--seeds 2', '--seeds 1-1')} --resume --budget 10m" in page
    assert f"| `{PLAIN}` |" in page
    assert ", so far.**" in page
    run(folder, resume=True)
    call("add", "tiny", folder, monkeypatch=monkeypatch)
    again = write_results.PAGE.read_text()
    call("add", "tiny", whole.folder, monkeypatch=monkeypatch)
    assert [line for line in again.splitlines() if line.startswith("- ")] == [
        line for line in write_results.PAGE.read_text().splitlines() if line.startswith("- ")
    ]


def test_before_the_first_run_there_is_no_table(results, tmp_path):
    folder = tmp_path / "cut"
    with pytest.raises(Stopped):
        run(folder, steps(3))
    assert claims.add(claims.read_claims()[0], folder) == "results/tiny: no run finished"
    assert "**Verdict: open.**" in write_results.page()


def test_a_claim_without_runs_is_open(results):
    page = write_results.page()
    assert "**Verdict: open.**" in page
    assert f"```\n{COMMAND} --budget 10m\n```" in page
    assert "| A tiny claim | No paper, Table 0 | 0 of 6 | 1 of 5 epochs (1/5) |  | open |" in page


def test_runs_of_another_comparison_count_too(whole, results):
    """Two claims can share a network, which is then trained once; the rest of that comparison is left out."""
    other = COMMAND.replace(f"--model {LIGHT}", f"--model {PLAIN}+eca")
    claim = results(networks=[PLAIN, f"{PLAIN}+eca"], claimed=[], seeds=2, commands=[other])
    said = claims.add(claim, whole.folder)
    assert said == f"results/tiny: 2 runs of {PLAIN} finished; not networks of this claim: {LIGHT}, {CUT}"
    assert read_record(claim.folder).models == [PLAIN, f"{PLAIN}+eca"]
    page = write_results.page()
    assert "| 2 of 4 |" in page
    assert f"`{PLAIN}+eca` (seed 0, 1)" in page


def test_one_of_several_comparisons_is_found_by_its_recipe(whole, results):
    commands = [COMMAND.replace("runs/tiny", "runs/long") + " lr=0.2", COMMAND]
    claim = results(commands=commands)
    assert claims.add(claim, whole.folder).startswith("results/tiny/tiny: 2 runs")
    page = write_results.page()
    assert f"`{LIGHT}` (long): open; `{LIGHT}` (tiny): " in page
    assert f"```\n{commands[0]} --budget 10m\n```" in page


def test_a_verdict_of_ones_own_and_why(whole, results):
    claim = results(verdict="Not shown: it is too small.", why="There is little to gain.")
    assert "**Verdict: open.**" in write_results.page(), "without runs there is no verdict"
    claims.add(claim, whole.folder)
    assert "**Verdict: Not shown: it is too small.**\n\nWhy: There is little to gain.\n" in write_results.page()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"networks": [PLAIN, LIGHT]}, "networks .* are not those of the command"),
        ({"seeds": 3}, "seeds 3 are not those of the command, 2"),
        ({"epochs": 2}, "epochs 2 are not those of the command, 1"),
        ({"claimed": [f"{PLAIN}+se"]}, r"claimed preresnet20_cifar\+se is not among the networks"),
        ({"id": "other"}, "id 'other' is not the name of its folder"),
        ({"verdict": "It is good."}, "the verdict must begin with"),
        ({"colour": "red"}, "unknown key colour"),
        ({"metrics": ["box_ap"]}, "unknown metrics box_ap, expected some of accuracy"),
        ({"commands": ["interlayer train --recipe digits"]}, "expected a command `interlayer compare`"),
    ],
)
def test_a_claim_that_contradicts_its_command_is_refused(results, changes, message):
    with pytest.raises(ValueError, match=message):
        results(**changes)


def test_a_claim_must_be_whole(results):
    path = claims.RESULTS / "tiny" / "claim.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in TINY.items() if key not in ("paper", "seeds")}))
    with pytest.raises(ValueError, match=r"paper, seeds must be given"):
        claims.read_claim(path)


def edited(folder, target, **changes):
    """Returns a copy of a comparison whose recipe has other values."""
    shutil.copytree(folder, target)
    recipe = read_recipe(folder / RECIPE_FILE).replace(**changes)
    (target / RECIPE_FILE).write_text(recipe.to_yaml())
    return target


def recorded(folder, target, **changes):
    """Returns a copy of a comparison whose record has other values."""
    shutil.copytree(folder, target)
    record = json.loads((folder / RECORD_FILE).read_text())
    (target / RECORD_FILE).write_text(json.dumps({**record, **changes}))
    return target


def test_what_does_not_fit_is_refused_and_nothing_is_written(whole, results, tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    mixed = recorded(whole.folder, tmp_path / "mixed")
    first, second = mixed / PLAIN / "seed0" / "summary.json", mixed / PLAIN / "seed1" / "summary.json"
    shutil.copy(first, second)
    alone = recorded(whole.folder, tmp_path / "alone")
    (alone / PLAIN / "seed0" / "metrics.csv").unlink()
    cases = {
        empty: "holds no comparison",
        edited(whole.folder, tmp_path / "lr", lr=0.5, epochs=2): "has another recipe than tiny of tiny: epochs 1 -> 2, "
        "lr 0.1 -> 0.5",
        edited(whole.folder, tmp_path / "data", data="/elsewhere/letters"): "data 'digits' -> '/elsewhere/letters'",
        recorded(whole.folder, tmp_path / "names", models=["resnet18", "resnet18+se"]): "has no network of tiny",
        recorded(whole.folder, tmp_path / "time", epochs={PLAIN: 2}): "was made with --equal-time",
        recorded(whole.folder, tmp_path / "earlier", costs={}): "repeat its command with --resume",
        mixed: f"holds a run of {PLAIN} with seed 0",
        alone: "has no metrics.csv",
    }
    for folder, message in cases.items():
        with pytest.raises(SystemExit) as stopped:
            call("add", "tiny", folder, monkeypatch=monkeypatch)
        said = capsys.readouterr().err
        assert stopped.value.code == 2
        assert message in said, said
        assert said.startswith("write_results: ")
        assert said.count("\n") == 1
        assert [path.name for path in (claims.RESULTS / "tiny").iterdir()] == ["claim.yaml"], folder
    with pytest.raises(SystemExit):
        call("add", "nothing", whole.folder, monkeypatch=monkeypatch)
    assert "no such claim: nothing; expected one of tiny" in capsys.readouterr().err
    assert not write_results.PAGE.exists()


def test_folders_of_a_machine_become_those_of_the_claim(whole, results, tmp_path):
    """Where the images and weights of a machine are does not matter, nor how many workers it has."""
    folder = edited(
        whole.folder, tmp_path / "moved", data="/mnt/x/digits", weights="/mnt/x/lite.safetensors", workers=9
    )
    claim = claims.read_claims()[0]
    claims.add(claim, folder)
    recipe = read_recipe(claim.folder / "recipe.yaml")
    assert (recipe.data, recipe.weights) == ("digits", "/data/lite.safetensors")
    assert (claim.folder / "recipe.yaml").read_text().startswith(f"# {COMMAND}\n")


def test_other_epochs_than_those_that_are_stored_are_refused(whole, results, tmp_path):
    """Runs of different lengths must not be averaged."""
    claim = results(commands=[f"{COMMAND} --equal-time"])
    first = recorded(whole.folder, tmp_path / "first", epochs={PLAIN: 3, LIGHT: 1, CUT: 1})
    claims.add(claim, first)
    second = recorded(whole.folder, tmp_path / "second", epochs={PLAIN: 4, LIGHT: 1, CUT: 1})
    with pytest.raises(ValueError, match=f"trains {PLAIN} for 4 epochs, but 3 are in"):
        claims.add(claim, second)


def test_commands_of_figures_exist():
    from test_documented_commands import parsed

    for claim in CLAIMS.values():
        for command in claim.figures:
            assert parsed(command)


def test_make_results_runs_the_program():
    assert "results:" in (ROOT / "Makefile").read_text()
    assert shlex.split((ROOT / "Makefile").read_text().split("results: ")[1].splitlines()[1])[-1] == (
        "docs/write_results.py"
    )
