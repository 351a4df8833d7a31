"""The claims of results/, and how comparisons are taken over into it: see write_results.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from interlayer.experiments import finished_runs, networks_of, run_folder
from interlayer.experiments.record import RECIPE_FILE, RECORD_FILE, ComparisonRecord, read_record
from interlayer.experiments.stored import static_costs
from interlayer.models.names import same_network
from interlayer.tasks import task_class
from interlayer.training import Recipe, TrainingError, load_recipe
from interlayer.training.files import write_json, write_text
from interlayer.training.recipe import differences, read_recipe
from interlayer.training.run_folder import MACHINE_KEYS
from interlayer.training.summary import read_summary
from interlayer.training.wording import listing, plural

RESULTS = Path(__file__).parents[1] / "results"
KEPT = (  # of summary.json: what the page shows or a reader needs, and no paths
    "model", "seed", "test", "contribution", "chosen_epoch", "chosen_by", "epochs", "train_images", "image_size",
    "seconds", "device", "processes", "versions",
)  # fmt: skip
OWN_PATHS = ("data", "weights")  # keys of recipes that name files of a machine


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, as its claim.yaml states it.

    Args:
        id: the name of its folder.
        number: its place on the page.
        title: the heading of its section.
        paper: the paper with the tables or figures that make the claim.
        claim: what the paper claims.
        networks: the networks of each comparison, with their controls, as the commands name them.
        seeds: the number of seeds that each comparison should have.
        epochs: the epochs of the recipe.
        schedule: how the schedule relates to the paper's.
        commands: the comparisons; the last folder of `--output` names each of them.
        claimed: the networks that the claim says to be better than the first one.
        paper_epochs: the epochs of the paper's schedule; None if it has none.
        metrics: names of metrics of the task that the table shows beside the one that is compared.
        figures: commands that draw what the claim is about from the finished runs.
        verdict: one sentence that begins with "shown", "not shown" or "not decided", for a claim that is not about a
            difference to the first network; otherwise the runs give it.
        why: why a mechanism does not help, if it is known.
    """

    id: str
    number: int
    title: str
    paper: str
    claim: str
    networks: list[str]
    seeds: int
    epochs: int
    schedule: str
    commands: list[str]
    claimed: list[str] = field(default_factory=list)
    paper_epochs: int | None = None
    metrics: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    verdict: str = ""
    why: str = ""

    @property
    def folder(self) -> Path:
        return RESULTS / self.id

    @cached_property
    def plans(self) -> list[Plan]:
        return [Plan(self, command) for command in self.commands]


class Plan:
    """A comparison that tests a claim, as its command asks for it.

    Args:
        claim: the claim.
        command: the command.
    """

    def __init__(self, claim: Claim, command: str) -> None:
        from typer.main import get_command

        from interlayer_cli.app import app
        from interlayer_cli.compare import seeds_in

        program, subcommand, *words = shlex.split(command)
        if (program, subcommand) != ("interlayer", "compare"):
            raise ValueError(f"{claim.id}: expected a command `interlayer compare`, got {command!r}")
        commands: Any = get_command(app)
        given = commands.commands["compare"].make_context("compare", words).params
        self.claim, self.command, self.output = claim, command, Path(given["output"])
        self.recipe: Recipe = load_recipe(given["recipe"], given["overrides"] or [], data=given["data"])
        controls = "mildest" if given["mildest_control"] else bool(given["control"])
        self.models = networks_of(
            given["model"], control=controls, attach_options=self.recipe.attach_options, task=self.recipe.task
        )
        self.seeds, self.equal_time = seeds_in(given["seeds"]), bool(given["equal_time"])

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def folder(self) -> Path:
        """The folder in results/: that of the claim, or one inside it if the claim has several comparisons."""
        return self.claim.folder if len(self.claim.commands) == 1 else self.claim.folder / self.name

    @property
    def record(self) -> ComparisonRecord | None:
        """The record of what was added; None if nothing was."""
        return read_record(self.folder) if (self.folder / RECORD_FILE).is_file() else None

    def differing(self, recipe: Recipe) -> list[str]:
        """Returns the values in which a recipe differs from that of the command, except for the machine's."""
        found = {
            key: values
            for key, values in differences(self.recipe, recipe).items()
            if key not in {*MACHINE_KEYS, *OWN_PATHS, "model", "seed"}
        }
        texts = [f"{key} {wanted!r} -> {got!r}" for key, (wanted, got) in found.items()]
        if Path(self.recipe.data).name != Path(recipe.data).name:
            texts.append(f"data {self.recipe.data!r} -> {recipe.data!r}")
        return texts


def read_claim(path: Path) -> Claim:
    """Reads a claim.yaml. What it says about its commands must be what they ask for."""
    values = yaml.safe_load(path.read_text())
    if unknown := set(values) - {each.name for each in fields(Claim)}:
        raise ValueError(f"{path}: unknown key {', '.join(sorted(unknown))}")
    required = {each.name for each in fields(Claim) if each.default is MISSING and each.default_factory is MISSING}
    if missing := required - set(values):
        raise ValueError(f"{path}: {', '.join(sorted(missing))} must be given")
    claim = Claim(**values)
    if claim.id != path.parent.name:
        raise ValueError(f"{path}: id {claim.id!r} is not the name of its folder")
    for plan in claim.plans:
        stated = (claim.networks, claim.seeds, claim.epochs)
        asked = (plan.models, len(plan.seeds), plan.recipe.epochs)
        for key, ours, theirs in zip(("networks", "seeds", "epochs"), stated, asked, strict=True):
            if ours != theirs:
                raise ValueError(f"{path}: {key} {ours} are not those of the command, {theirs}")
        known = [metric.name for metric in task_class(plan.recipe.task).eval_metrics]
        if unknown := set(claim.metrics) - set(known):
            raise ValueError(
                f"{path}: unknown metrics {', '.join(sorted(unknown))}, expected some of {', '.join(known)}"
            )
    if strangers := set(claim.claimed) - set(claim.networks):
        raise ValueError(f"{path}: claimed {', '.join(sorted(strangers))} is not among the networks")
    if claim.verdict and not claim.verdict.lower().startswith(("shown", "not shown", "not decided")):
        raise ValueError(
            f"{path}: the verdict must begin with shown, not shown, shown to be something else or not decided"
        )
    return claim


def read_claims() -> list[Claim]:
    """Returns the claims in the order of the page."""
    return sorted((read_claim(path) for path in RESULTS.glob("*/claim.yaml")), key=lambda claim: claim.number)


def add(claim: Claim, folder: Path) -> str:
    """Copies the small files of a comparison into the folder of a claim, and returns what was done.

    Nothing is written unless the comparison fits the claim.

    Raises:
        TrainingError: the folder holds no comparison, or one of another recipe or of other networks.
    """
    if not (folder / RECORD_FILE).is_file() or not (folder / RECIPE_FILE).is_file():
        raise TrainingError(f"{folder} holds no comparison: expected the folder that `interlayer compare` wrote")
    theirs, recipe = read_record(folder), read_recipe(folder / RECIPE_FILE)
    plan = _fitting(claim, recipe, folder)
    if bool(theirs.epochs) != plan.equal_time:
        word = "with" if theirs.epochs else "without"
        raise TrainingError(f"{folder} was made {word} --equal-time, unlike the command of {claim.id}")
    names = {ours: name for ours in plan.models for name in theirs.models if same_network(ours, name)}
    if not names:
        raise TrainingError(f"{folder} has no network of {claim.id}: expected some of {', '.join(plan.models)}")
    runs = finished_runs(theirs, folder)
    static_costs(theirs, [name for name in names.values() if runs[name]], folder)  # raises if they are not recorded
    record = _merged(plan, theirs, names, folder)
    files: dict[Path, str] = {}
    finished = dict.fromkeys(names, 0)
    for ours, name in names.items():
        for seed in theirs.seeds:
            found = _run_files(run_folder(folder, name, seed), name, seed, ours)
            target = run_folder(plan.folder, ours, seed)
            if "summary.json" not in found and (target / "summary.json").is_file():
                continue  # an earlier comparison finished this run
            finished[ours] += "summary.json" in found
            files |= {target / file: text for file, text in found.items()}
    weights = recipe.weights and f"/data/{Path(recipe.weights).name}"
    used = recipe.replace(data=plan.recipe.data, weights=weights)
    files[plan.folder / "recipe.yaml"] = used.to_yaml(plan.command)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    write_json(plan.folder / RECORD_FILE, asdict(record))
    left_out = [name for name in theirs.models if name not in names.values()]
    runs = listing([f"{plural(count, 'run')} of {name}" for name, count in finished.items() if count]) or "no run"
    more = f"; not networks of this claim: {', '.join(left_out)}" if left_out else ""
    return f"{plan.folder.relative_to(RESULTS.parent)}: {runs} finished{more}"


def _fitting(claim: Claim, recipe: Recipe, folder: Path) -> Plan:
    """Returns the comparison of a claim that has this recipe."""
    differing = {plan: plan.differing(recipe) for plan in claim.plans}
    plan = min(claim.plans, key=lambda plan: len(differing[plan]))
    if differing[plan]:
        raise TrainingError(f"{folder} has another recipe than {plan.name} of {claim.id}: {', '.join(differing[plan])}")
    return plan


def _merged(plan: Plan, theirs: ComparisonRecord, names: Mapping[str, str], folder: Path) -> ComparisonRecord:
    """Returns the record with what the comparison adds to it. It names all networks and seeds that are wanted."""
    before = plan.record or ComparisonRecord([], [], None, "")

    def both(key: str) -> dict[str, Any]:
        new = getattr(theirs, key)
        return {**getattr(before, key), **{ours: new[name] for ours, name in names.items() if name in new}}

    epochs = both("epochs")
    for name, number in before.epochs.items():
        if epochs[name] != number:
            raise TrainingError(f"{folder} trains {name} for {epochs[name]} epochs, but {number} are in {plan.folder}")
    return ComparisonRecord(
        plan.models, sorted({*plan.seeds, *before.seeds, *theirs.seeds}), None, plan.command, theirs.control,
        epochs, both("epoch_seconds"), both("costs"), theirs.shared,
    )  # fmt: skip


def _run_files(folder: Path, name: str, seed: int, ours: str) -> dict[str, str]:
    """Returns the small files of a run: its metrics so far, and its summary if it is finished."""
    files = {}
    if (folder / "metrics.csv").is_file():
        files["metrics.csv"] = (folder / "metrics.csv").read_text()
    if (folder / "summary.json").is_file():
        summary = read_summary(folder)
        if (summary.get("model"), summary.get("seed")) != (name, seed):
            raise TrainingError(f"{folder} holds a run of {summary.get('model')} with seed {summary.get('seed')}")
        if "metrics.csv" not in files:
            raise TrainingError(f"{folder} has no metrics.csv: fetch it with summary.json")
        kept = {key: summary[key] for key in KEPT if key in summary}
        files["summary.json"] = json.dumps({**kept, "model": ours}, indent=1) + "\n"
    return files
