"""`interlayer resume`: continue a run or a comparison that was stopped."""

from pathlib import Path
from typing import Annotated

import typer

from .train import Budget


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of a comparison.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What may differ on another machine: workers=8 device=cpu."),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Add the controls of its networks to a comparison, finished or not.")
    ] = False,
    budget: Budget = None,
) -> None:
    """Continue a run or a comparison that was stopped, with the recipe that its folder records.

    A run of several processes continues with as many: `torchrun --nproc-per-node 8 -m interlayer resume FOLDER`.

    Example: `interlayer resume runs/20250101-120000-resnet50`
    """
    from interlayer.experiments.record import RECORD_FILE
    from interlayer.training.run_folder import MACHINE_KEYS

    from .train import is_main_process, train

    for override in overrides or []:
        key = override.partition("=")[0]
        if key not in MACHINE_KEYS:
            raise ValueError(f"{key} cannot change when a run is resumed, only {', '.join(sorted(MACHINE_KEYS))}")
    is_comparison = (folder / RECORD_FILE).is_file()
    if not is_comparison and any(folder.glob("*/seed*/recipe.yaml")):
        raise ValueError(f"{folder} holds a comparison without {RECORD_FILE}: repeat its command with --resume")
    if not is_comparison and not (folder / "recipe.yaml").is_file():
        raise ValueError(f"{folder} holds no run and no comparison: expected the folder that was printed at the start")
    if control and not is_comparison:
        raise ValueError(f"--control adds networks to a comparison, and {folder} holds a run")
    if _is_finished(folder, is_comparison) and not control:
        if is_main_process():
            typer.echo(f"{folder} is finished, nothing is left to do; report: {folder / 'report.html'}")
    elif is_comparison:
        _resume_comparison(folder, overrides, control=control, budget=budget)
    else:
        train(overrides, recipe=str(folder / "recipe.yaml"), output=folder, resume=True, budget=budget)


def _is_finished(folder: Path, is_comparison: bool) -> bool:
    """Whether all runs of the record are finished, to which networks or seeds may have been added."""
    if not is_comparison:
        return (folder / "summary.json").is_file()
    from interlayer.experiments import finished_runs
    from interlayer.experiments.record import read_record

    record = read_record(folder)
    runs = finished_runs(record, folder)
    return (folder / "comparison.json").is_file() and all(len(found) == len(record.seeds) for found in runs.values())


def _resume_comparison(folder: Path, overrides: list[str] | None, *, control: bool, budget: str | None) -> None:
    from interlayer.experiments.record import RECIPE_FILE, read_record

    from .compare import compare, seeds_text

    record = read_record(folder)
    compare(
        overrides, recipe=str(folder / RECIPE_FILE), model=record.models, seeds=seeds_text(record.seeds),
        control=control, together=record.together, side_by_side=record.side_by_side, output=folder, resume=True,
        budget=budget,
    )  # fmt: skip
