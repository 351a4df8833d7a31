"""`interlayer convert`: convert the authors' checkpoints to the names of this library."""

from pathlib import Path
from typing import Annotated, Any

import typer


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The authors' checkpoint, .pth or .safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, .safetensors.")],
    model: Annotated[
        str, typer.Option(help="The model of the checkpoint, such as resnet50_mrla_light or resnet50+mrla_light.")
    ],
    reading: Annotated[
        str | None, typer.Option(help="The reading that the checkpoint was trained with.", show_default="published")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for interlayer.attach, such as head_activation=tanh for the rlav1 checkpoints."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Convert a checkpoint of the authors' code to the names of this library, and save it as safetensors.

    The reading is recorded in the file. No code in the checkpoint is executed (weights_only). If names are missing or
    unexpected, they are listed and no file is written.

    Example: `interlayer convert mrla_resnet50.pth resnet50.safetensors --model resnet50_mrla_light`
    """
    from interlayer.models import convert_checkpoint, save_weights
    from interlayer.models.build import build_network
    from interlayer.models.checkpoints import check_description, read_checkpoint, unwrap

    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists; give --overwrite to replace it")
    checkpoint, descriptions = read_checkpoint(source)
    tensors = unwrap(checkpoint)
    given, made_with = _options(model, reading, dict(_pair(entry) for entry in option or []))
    network: Any = build_network(model, **given)
    classifier = network.default_cfg["classifier"]
    head = tensors.get(f"{classifier}.weight", tensors.get(f"{classifier}.1.weight"))
    if head is not None and len(head) != network.num_classes:
        network.reset_classifier(len(head))
    check_description(descriptions, network)
    converted = convert_checkpoint(tensors, network)
    save_weights(network, target, converted)
    typer.echo(f"{target}: {len(converted)} tensors of {model}" + (f", reading {made_with!r}" if made_with else ""))


def _options(model: str, reading: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Returns the options of `build_network` for a name, and the reading of the network if it has one.

    A registered model takes the reading as an option of the model, because the backbone depends on it too. With
    NAME+MECHANISM, it is an option of the mechanism.
    """
    from interlayer.hosts import options_of
    from interlayer.models.build import split_name
    from interlayer.models.rows import ROWS

    name, mechanisms = split_name(model)
    if not mechanisms:
        has_readings = name in ROWS and ROWS[name].has_readings
        used = (reading or "published") if has_readings else None
        given = ({"reading": used} if used else {}) | ({"attach_options": options} if options else {})
        built_with = {"model_options": given}
    else:
        has_readings = len(mechanisms) == 1 and "reading" in options_of(mechanisms[0][0])
        used = mechanisms[0][1].get("reading", reading or "published") if has_readings else None
        built_with = {"attach_options": options | ({"reading": used} if used else {})}
    if reading and not has_readings:
        remedy = "write it as an option of each mechanism" if len(mechanisms) > 1 else "leave --reading out"
        problem = "--reading is for one mechanism" if len(mechanisms) > 1 else f"there is one reading of {model}"
        raise ValueError(f"{problem}: {remedy}")
    return built_with, used


def _pair(entry: str) -> tuple[str, Any]:
    """Parses KEY=VALUE. The value has the syntax of recipes."""
    from interlayer.models.build import parse_value

    key, equals, value = entry.partition("=")
    if not key or not equals:
        raise ValueError(f"--option expects KEY=VALUE, got {entry!r}")
    return key, parse_value(value)
