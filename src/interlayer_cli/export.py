"""`interlayer export`: export a network to a file that runs without this library."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="Folder of a finished run, or NAME or NAME+MECHANISM:OPTION=VALUE."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="weights=FILE; for a model also pretrained=true, and image_size=288."
        ),
    ] = None,
    file_format: Annotated[
        str | None, typer.Option("--format", help="onnx or pt2; by default that of the name of --output.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file to write; by default named after the run or the model.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="A fixed number of images per batch; by default any number.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference between outputs, relative to the largest output.")
    ] = 1e-4,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Export a network as ONNX, or as a torch.export program (pt2).

    The file is loaded again, and its outputs are compared with those of the network, before it gets its name. The names
    of the classes, the image size, mean, std and crop are stored in its metadata.

    Examples: `interlayer export runs/20250101-120000-resnet50 --format onnx`,
    `interlayer export resnet50+mrla_light weights=resnet50.safetensors --output resnet50.pt2`
    """
    import torch
    from rich.console import Console

    from interlayer.experiments import load_network
    from interlayer.experiments.export import FORMATS, export_source

    from .display import file_name, log_to_stderr

    log_to_stderr()
    if output is None and file_format is None:
        raise ValueError(f"give --format {' or --format '.join(FORMATS)}")
    path = output or Path(f"{file_name(Path(source).name)}.{file_format}")
    with Console(stderr=True).status("exporting"):
        loaded = load_network(source, overrides or [], device=torch.device("cpu"))
        report = export_source(
            loaded, path, format=file_format, batch_size=batch_size, tolerance=tolerance, overwrite=overwrite
        )
    sizes = " and ".join(map(str, report.batch_sizes))
    batches = f"batches of {sizes} images" if sizes != "1" else "a batch of 1 image"
    typer.echo(
        f"{path}: outputs differ from the network's by at most {report.difference:.1e} on {batches} (outputs are up to "
        f"{report.scale:.1e})"
    )
