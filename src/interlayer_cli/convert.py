"""`interlayer convert`: published checkpoints into this library's."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The authors' checkpoint, .pth or .safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, .safetensors.")],
    model: Annotated[str, typer.Option(help="The model it belongs to, such as resnet50_mrla_light.")],
    reading: Annotated[
        str | None, typer.Option(help="The reading the checkpoint was made with.", show_default="published")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of interlayer.attach, such as head_activation=tanh for the rlav1 checkpoints."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT where it exists.")] = False,
) -> None:
    """Convert a checkpoint of an author's program to this library's names, as safetensors with its reading recorded.

    Nothing in the file is run (weights_only). Names that are unknown or missing are listed and nothing is written.

    Example: `interlayer convert mrla_resnet50.pth resnet50.safetensors --model resnet50_mrla_light`
    """
    from interlayer.models.checkpoints import (
        check_description,
        convert_checkpoint,
        read_checkpoint,
        save_weights,
        unwrap,
    )
    from interlayer.models.rows import ROWS

    from .names import create

    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; give --overwrite to replace it")
    checkpoint, descriptions = read_checkpoint(source)
    tensors = unwrap(checkpoint)
    given = dict(_pair(entry) for entry in option or [])
    read = {"reading": reading or "published"} if model in ROWS else {}
    network = create(model, **read, **({"attach_options": given} if given else {}))
    if reading and not read:
        raise ValueError(f"there is one reading of {model}: leave --reading out")
    classifier = network.default_cfg["classifier"]
    head = tensors.get(f"{classifier}.weight", tensors.get(f"{classifier}.1.weight"))
    if head is not None and len(head) != network.num_classes:
        network.reset_classifier(len(head))
    check_description(descriptions, network)
    converted = convert_checkpoint(tensors, network)
    save_weights(network, target, converted)
    typer.echo(f"{target}: {len(converted)} tensors of {model}" + (f", reading {read['reading']!r}" if read else ""))


def _pair(entry: str) -> tuple[str, object]:
    """KEY=VALUE, the value read as a recipe reads it."""
    from interlayer.models.build import parse_value

    key, equals, value = entry.partition("=")
    if not key or not equals:
        raise ValueError(f"--option expects KEY=VALUE, got {entry!r}")
    return key, parse_value(value)
