"""`interlayer push`: store a trained network on the Hugging Face Hub or in a folder."""

from typing import Annotated

import typer


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="Folder of a finished run, or NAME or NAME+MECHANISM:OPTION=VALUE."
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="hf-hub:USER/NAME, or local-dir:FOLDER.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="weights=FILE; for a model also pretrained=true, num_classes."),
    ] = None,
    license_name: Annotated[
        str, typer.Option("--license", help="License of the weights in the Hub's notation, such as apache-2.0.")
    ] = "unknown",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Store a trained network with a model card on the Hugging Face Hub, or in a folder in the same format.

    The same name loads it again in all commands and, if timm knows the network, in `timm.create_model`. Uploading uses
    the login of `hf auth login`.

    Examples: `interlayer push runs/20250101-120000-resnet50 local-dir:birds`,
    `interlayer push runs/20250101-120000-resnet50 hf-hub:user/birds --license apache-2.0`
    """
    from rich.console import Console

    from interlayer.experiments.hub import push_to_hub, save_for_hub

    from .display import log_to_stderr

    prefix, colon, name = target.partition(":")
    if not colon or prefix not in ("hf-hub", "local-dir") or not name:
        raise ValueError(f"expected hf-hub:USER/NAME or local-dir:FOLDER, got {target!r}")
    log_to_stderr()
    given = overrides or []
    with Console(stderr=True).status("storing"):
        if prefix == "local-dir":
            save_for_hub(source, name, overrides=given, license=license_name)
            typer.echo(f"stored in {name}; its name is {target}")
        else:
            address = push_to_hub(source, name, overrides=given, license=license_name, private=private)
            typer.echo(f"stored at {address}; its name is {target}")
