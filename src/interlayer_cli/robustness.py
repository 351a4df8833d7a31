"""`interlayer robustness`: evaluate networks on perturbed images, side by side."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from .evaluate import AsJson, SkipBad
from .train import DataName

OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")  # not NAME+MECHANISM:OPTION=VALUE


def robustness(
    networks: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|MODEL... [KEY=VALUE]...",
            help="Folders of finished runs, or networks such as NAME or NAME+MECHANISM. KEY=VALUE, such as "
            "weights=FILE or image_size=288, is for the network before it, and for all networks if it comes first.",
        ),
    ],
    data: DataName = None,
    perturb: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=STRENGTH,...]",
            help="A perturbation, all by default: occlusion, gray_occlusion, gaussian_noise, shot_noise, "
            "gaussian_blur, fgsm, pgd. Give it several times.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of repetitions of what is random.")] = 5,
    images: Annotated[int | None, typer.Option(min=1, help="Number of images, evenly spaced; by default all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is random.")] = 0,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation or test. By default the first that exists: test, validation, train."),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Right labels of ImageNet's validation images: real, or a JSON file.")
    ] = None,
    restrict: Annotated[
        bool | None,
        typer.Option("--restrict/--no-restrict", help="Restrict predictions to the classes that have a folder."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="HTML page to write; the same figures are written beside it as .json.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it exists.")] = False,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate networks on occluded, noisy, blurred and adversarial images, side by side.

    Noise and the random start of PGD are repeated, and have a mean and a 95% interval. Strengths are fractions of the
    side for occlusion, 255ths for gaussian_noise, fgsm and pgd, photons for shot_noise and pixels for gaussian_blur.

    Example: `interlayer robustness runs/plain runs/mrla --data /data/imagenet --output robustness.html`

    Example: `interlayer robustness resnet50 weights=a.safetensors resnet50+mrla_light weights=b.safetensors
    --data /data/imagenet/val --images 1000 --perturb occlusion --perturb fgsm=1,4`
    """
    from rich.console import Console

    from interlayer.analysis.robustness import parse_perturbations
    from interlayer.experiments import load_network, robustness_table
    from interlayer.experiments import robustness as measure
    from interlayer.pages import write_robustness_page

    from .display import command_line, log_to_stderr, showing
    from .printing import rich_table

    log_to_stderr()
    rows = parse_perturbations(perturb or [])
    if output is not None:
        _check_output(output, overwrite)
    skipping = ["on_bad_image=skip"] if skip_bad else []
    given = _split(networks)
    loaded = [load_network(network, [*skipping, *keys]) for network, keys in given]
    names = _names(given, [each.recipe.model for each in loaded])
    with showing(len(loaded)) as show:
        result = measure(
            dict(zip(names, loaded, strict=True)), data, perturbations=rows, repeats=repeats, images=images, seed=seed,
            split=split, labels=labels, restrict=restrict, skip_option="--skip-bad", show=show,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        console = Console(width=None if Console().is_terminal else 160)
        console.print(rich_table(robustness_table(result), align_right=True))
    if output is not None:  # last: the results are printed even if the page cannot be written
        write_robustness_page(result, output, command=command_line())
        typer.echo(f"page: {output}", err=as_json)


def _split(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """Returns each run or model with its overrides. Those before the first network are for all networks."""
    shared: list[str] = []
    found: list[tuple[str, list[str]]] = []
    for text in arguments:
        if not OVERRIDE.match(text) or Path(text).exists():
            found.append((text, []))
        elif found:
            found[-1][1].append(text)
        else:
            shared.append(text)
    if not found:
        raise ValueError("no network to evaluate: name folders of runs, or models")
    return [(network, [*shared, *keys]) for network, keys in found]


def _names(networks: list[tuple[str, list[str]]], models: list[str]) -> list[str]:
    """Returns the name of each network in the table: its model, or more of what was given where models are alike."""
    folders = [Path(network).name for network, _ in networks]
    shared = set.intersection(*(set(keys) for _, keys in networks))
    texts = [" ".join([network, *(key for key in keys if key not in shared)]) for network, keys in networks]
    for names in (models, folders):
        if len(set(names)) == len(names):
            return names
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"{text} is given twice: name different networks")
    return texts


def _check_output(output: Path, overwrite: bool) -> None:
    if output.suffix != ".html":
        raise ValueError(f"--output must be the name of a page, such as robustness.html, got {output}")
    for path in (output, output.with_suffix(".json")):
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists; give --overwrite to replace it")
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: no such folder")
