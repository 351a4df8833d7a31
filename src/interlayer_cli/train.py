"""`interlayer train`: train one network under a recipe."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .completion import complete_recipe
from .stopping import Stopping

RecipeName = Annotated[
    str,
    typer.Option(help="Name of a recipe (see `interlayer recipes`), or a .yaml file.", autocompletion=complete_recipe),
]
DataName = Annotated[
    str | None, typer.Option(help="A folder of images or CIFAR, digits, synthetic, hfds/NAME, wds/FOLDER or tfds/NAME.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Save checkpoints and stop before this time is up: 90s, 10m, 1h30m. `resume` goes on."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that override the recipe, such as epochs=10 lr=0.05."),
]


def train(
    overrides: Overrides = None,
    recipe: RecipeName = "default",
    model: Annotated[str | None, typer.Option(help="A network, or NAME+MECHANISM to attach a mechanism.")] = None,
    data: DataName = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; by default a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --output, if there is one.")] = False,
    budget: Budget = None,
) -> None:
    """Train a network and write its weights, metrics, summary and report.html to a folder.

    To use several GPUs or machines, start it with `torchrun --nproc-per-node 8 -m interlayer train ...` or `accelerate
    launch -m interlayer train ...`. Ctrl-C and SIGTERM save a checkpoint, and `--resume` continues from it.

    Example: `interlayer train --recipe mrla_resnet --model resnet50_mrla_light --data /data/imagenet`
    """
    stop = Stopping(budget)  # before the library is imported, which takes some of the time
    from interlayer.pages import write_run_report
    from interlayer.tasks import task_class
    from interlayer.training import Stopped, load_recipe
    from interlayer.training import train as run
    from interlayer.training.wording import unusable_count

    from .display import command_line, log_to_stderr, new_folder, showing

    log_to_stderr()
    stop.prepare()
    check_overrides(overrides or [], ("output", "recipe", "budget"))
    resolved = load_recipe(recipe, overrides or [], model=model, data=data)
    folder = output or new_folder(resolved.model or "run")
    try:
        with stop.listening(), showing() as show:
            summary = run(
                resolved, folder, show=show, resume=resume, stop=stop,
                on_start=opening_lines(finetuning_advice(recipe, resolved)), command=command_line(),
            )  # fmt: skip
    except Stopped as stopped:
        if is_main_process():
            typer.echo(f"{stopped}; a checkpoint is saved, {stop.advice(folder)}", err=True)
        raise typer.Exit(stop.exit_code) from None
    if not is_main_process():
        return
    report = write_run_report(folder)  # all ranks use the folder that rank 0 chose
    test, headline = summary["test"], task_class(resolved.task).headline
    value = headline.format(test[headline.name])
    typer.echo(f"test {headline.title} {value} on {test['images']:,} images ({chosen_epoch(summary)})")
    if summary["contribution"] is not None:
        typer.echo(summary["contribution"]["sentence"])
    if summary["bad_images"]:
        typer.echo(f"{unusable_count(summary['bad_images'])} could not be used: see {folder / 'summary.json'}")
    typer.echo(f"report: {report}")


def finetuning_advice(name: str, recipe: Any) -> str:
    """Returns a line that names the recipe for fine-tuning, if the default one is about to train loaded weights."""
    untouched = name == "default" and recipe.lr == type(recipe).lr and not recipe.fine_tuning_keys
    if not untouched or not (recipe.pretrained or recipe.weights):
        return ""
    return (
        f"note: the default recipe is for training from scratch, and lr={recipe.lr:g} can destroy loaded weights; "
        f"--recipe finetune is for fine-tuning them"
    )


def chosen_epoch(summary: Mapping[str, Any]) -> str:
    """Returns the epoch whose weights were tested, and why."""
    by = summary["chosen_by"]
    return by if by == "last epoch" else f"epoch {summary['chosen_epoch']}, chosen by {by}"


def opening_lines(advice: str = "") -> Callable[[Any], None]:
    """Returns a function that prints what a run understood: everything once, and further networks of a comparison.

    Args:
        advice: a line that is printed once, after the others.
    """
    printed: set[str] = set()

    def show(overview: Any) -> None:
        lines = overview.network if printed else [*overview.lines(), *filter(None, [advice])]
        if overview.model not in printed:
            printed.add(overview.model)
            typer.echo("\n".join(lines))

    return show


def check_overrides(overrides: list[str], options: Sequence[str] = ("output", "recipe")) -> None:
    """Raises if a network, a recipe or a folder of images is given without its option, as in `train resnet50`.

    Args:
        options: options of the command that are not keys of recipes, and could be written like one.
    """
    from interlayer.training import list_recipes

    for text in overrides:
        if "=" not in text.partition(":")[0]:  # NAME+MECHANISM:OPTION=VALUE is not KEY=VALUE
            option = "--recipe" if text in list_recipes() else "--data" if Path(text).exists() else "--model"
            raise ValueError(f"expected key=value, got {text!r}; did you mean {option} {text}?")
        key, _, value = text.partition("=")
        if key in options:
            option = f"--{key.replace('_', '-')}"
            raise ValueError(f"{key} is an option of the command, not a key of recipes: write {option} {value}")


def key_advice(error: Any) -> str:
    """Returns the advice for an unknown option that is a key of recipes, such as --epochs 3; otherwise nothing."""
    option, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if not option or context is None or context.info_name not in ("train", "compare"):
        return ""
    from interlayer.training.keys import SYNONYMS
    from interlayer.training.recipe import list_keys

    name = option.lstrip("-").replace("-", "_")
    key = SYNONYMS.get(name, name)
    if key not in list_keys():
        return ""
    value = _value_after(option) or ("true" if list_keys()[key].type == "true or false" else "VALUE")
    return f"no such option: {option}; values of the recipe are written without dashes: {key}={value}"


def _value_after(option: str) -> str:
    """Returns the value that follows an option on the command line; an empty string if there is none."""
    for index, argument in enumerate(sys.argv):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option and not "".join(sys.argv[index + 1 : index + 2]).startswith("--"):
            return "".join(sys.argv[index + 1 : index + 2])
    return ""


def is_main_process() -> bool:
    """Whether this process has rank 0."""
    import os

    return int(os.environ.get("RANK", "0")) == 0
