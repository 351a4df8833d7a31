"""`interlayer compare`: train several networks under one recipe and compare them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .completion import complete_recipe
from .stopping import Stopping
from .train import Budget, DataName, Overrides, check_overrides, finetuning_advice, is_main_process, opening_lines


def compare(
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Name of a recipe, or a .yaml file; digits_vit if neither model nor data is given.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A network to compare; give it several times. The first one is the baseline."),
    ] = None,
    data: DataName = None,
    seeds: Annotated[
        str,
        typer.Option(
            metavar="NUMBER",
            help="Number of runs of each network, with seeds 0, 1, 2, ...; or the seeds themselves, as 2-4 or 0,3, for "
            "a comparison in parts.",
        ),
    ] = "3",
    control: Annotated[
        bool | None,
        typer.Option(
            "--control/--no-control",
            help="Also train the controls of each network, which tell what its gain is from; by default only if "
            "neither model nor data is given.",
            show_default=False,
        ),
    ] = None,
    mildest_control: Annotated[
        bool, typer.Option("--mildest-control", help="Of the controls, only the mildest one of each mechanism.")
    ] = False,
    equal_time: Annotated[
        bool, typer.Option("--equal-time", help="Train each network for the time that the slowest one takes.")
    ] = False,
    together: Annotated[int | None, typer.Option(min=1, help="Number of runs that share the GPU at a time.")] = None,
    side_by_side: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of runs that train at a time, each in a process of its own: faster for detectors and others "
            "that keep the processor busy.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; by default a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the comparison in --output.")] = False,
    budget: Budget = None,
) -> None:
    """Train networks under the same recipe with several seeds, and write a report.html that compares them.

    A single network with a mechanism is compared with its plain backbone. A control is the same network without what
    the mechanism is credited with. Without options, a small ViT is compared with and without MRLA-light, and with its
    controls, on handwritten digits.

    Example: `interlayer compare --recipe rla_cifar --model preresnet20_cifar+mrla_light --data /data/cifar10 --control`
    """
    stop = Stopping(budget)  # before the library is imported, which takes some of the time
    from rich.console import Console

    from interlayer.experiments import compare as run
    from interlayer.experiments import comparison_table, networks_of
    from interlayer.experiments.record import Controls
    from interlayer.pages import write_comparison_report
    from interlayer.training import Stopped, load_recipe

    from .display import command_line, log_to_stderr, new_folder, showing
    from .printing import rich_table

    log_to_stderr()
    stop.prepare()
    check_overrides(overrides or [], ("seeds", "together", "side_by_side", "output", "recipe", "control", "budget"))
    controls: Controls = not (recipe or model or data) if control is None else control
    if mildest_control:
        if control is False:
            raise ValueError("--mildest-control chooses among controls, and --no-control trains none: give one of them")
        controls = "mildest"
    recipe = recipe or ("default" if model or data else "digits_vit")
    resolved = load_recipe(recipe, overrides or [], data=data)
    models = model or [resolved.model]
    if not models[0]:
        raise ValueError("nothing to compare: give --model NAME+MECHANISM, or --model twice")
    folder = output or new_folder("compare")
    if is_main_process() and folder.is_dir() and any(folder.iterdir()) and not resume:
        raise ValueError(
            f"{folder} is not empty: give --resume to resume the comparison in it, or choose another folder"
        )
    wanted = seeds_in(seeds)
    networks = networks_of(models, control=controls, attach_options=resolved.attach_options, task=resolved.task)
    total = len(networks) * len(wanted)
    try:
        with stop.listening(), showing(total, folder) as show:
            comparison = run(
                resolved, models, folder, seeds=wanted, control=controls, equal_time=equal_time, resume=resume,
                together=together, side_by_side=side_by_side, stop=stop, show=show,
                on_start=opening_lines(finetuning_advice(recipe, resolved)), command=command_line(),
            )  # fmt: skip
    except Stopped as stopped:
        if is_main_process():
            typer.echo(f"{stopped}; checkpoints are saved, {stop.advice(folder)}", err=True)
        raise typer.Exit(stop.exit_code) from None
    if not is_main_process():
        return
    report = write_comparison_report(comparison)
    console = Console(width=None if Console().is_terminal else 180)
    console.print(rich_table(comparison_table(comparison), align_right=True))
    for text in comparison.verdicts():
        console.print(text, highlight=False)
    console.print(f"report: {report}", highlight=False, soft_wrap=True)


def seeds_in(text: str) -> list[int]:
    """Returns the seeds that ``--seeds`` asks for: the first N for "N", else those of "A-B" or "A,B,C"."""
    parts = text.split(",")
    try:
        if len(parts) == 1 and "-" not in text:
            seeds = list(range(int(text)))
        else:
            seeds = []
            for part in parts:
                first, dash, last = part.partition("-")
                seeds += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"--seeds: expected a number of seeds, such as 3, or seeds, such as 2-4 or 0,3, got {text!r}")
    return sorted(seeds)


def seeds_text(seeds: Sequence[int]) -> str:
    """Returns the ``--seeds`` that asks for these seeds, given in increasing order."""
    first, last = seeds[0], seeds[-1]
    if list(seeds) == list(range(last + 1)):
        return str(len(seeds))
    is_range = list(seeds) == list(range(first, last + 1))
    return f"{first}-{last}" if is_range else ",".join(map(str, seeds))
