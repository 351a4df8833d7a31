"""`interlayer robustness`: evaluate networks on perturbed images, side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .evaluate import AsJson, SkipBad
from .networks import distinct_names, split_networks
from .page import check_page
from .train import DataName


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
        check_page(output, output.with_suffix(".json"), example="robustness.html", overwrite=overwrite)
    skipping = ["on_bad_image=skip"] if skip_bad else []
    given = split_networks(networks)
    loaded = [load_network(network, [*skipping, *keys]) for network, keys in given]
    names = distinct_names(given, [each.recipe.model for each in loaded])
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
