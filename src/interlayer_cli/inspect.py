"""`interlayer inspect`: a page with everything that can be seen inside networks."""

from pathlib import Path
from typing import Annotated

import typer

from .page import check_page
from .plot.figure import Networks, TestImages, open_images, open_networks


def inspect(
    networks: Networks,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--images",
            "--image",
            help="An image file or a folder of images; give it several times. By default test images of a run, or a "
            "sample photograph.",
        ),
    ] = None,
    test_images: TestImages = 32,
    output: Annotated[
        Path, typer.Option(help="HTML page to write; its figures are written as PNG into a folder beside it.")
    ] = Path("inspection.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it exists.")] = False,
) -> None:
    """Look inside networks: one page with every figure that applies to them, side by side, and how to read it.

    The page is a single file that opens without a network. It has class activation maps, what mechanisms contribute,
    which layer reads which, spatial attention, its entropy and distance, and more, whichever the networks have.

    Example: `interlayer inspect runs/plain runs/mrla`

    Example: `interlayer inspect tf_efficientnet_lite0 pretrained=true --images photos --output lite0.html`
    """
    from interlayer.pages import write_inspection

    from .display import command_line, counting

    figures = output.with_name(f"{output.stem}_figures")
    check_page(output, figures, example="inspection.html", overwrite=overwrite)
    loaded = open_networks(networks)
    shown = {name: open_images(each, images, test_images) for name, each in loaded.items()}
    with counting("figures") as progress:
        written = write_inspection(loaded, shown, output, command=command_line(), progress=progress)
    typer.echo(f"page: {output}, with {len(written) - 1} figures in {figures}")
