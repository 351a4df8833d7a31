"""What the commands of `interlayer plot` share: their options, the network and images, and writing the figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from interlayer.experiments import LoadedNetwork, ShownImages

BATCH = 16  # number of images that are measured at a time

Networks = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN|MODEL... [KEY=VALUE]...",
        help="Folders of finished runs, or networks such as NAME or NAME+MECHANISM. KEY=VALUE, such as weights=FILE, "
        "pretrained=true or image_size=288, is for the network before it, and for all networks if it comes first.",
    ),
]
Pictures = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help="An image file or a folder of images; give it several times. By default test images of a run, or a sample "
        "photograph.",
    ),
]
TestImages = Annotated[
    int, typer.Option("--test-images", min=1, help="Number of test images of a run, if no image is given.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the figure if it exists.")]


def open_networks(arguments: Sequence[str]) -> dict[str, LoadedNetwork]:
    """Loads the networks of the arguments, by the names that tell them apart. Without weights, they are random."""
    from interlayer.experiments import load_network

    from ..display import log_to_stderr
    from ..networks import distinct_names, split_networks

    log_to_stderr()
    given = split_networks(arguments)
    loaded = [load_network(network, keys, untrained=True) for network, keys in given]
    return dict(zip(distinct_names(given, [each.title for each in loaded]), loaded, strict=True))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts a name before the message of an error, which may be about one network of several."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def open_images(loaded: LoadedNetwork, paths: Sequence[Path] | None, wanted: int = 64) -> ShownImages:
    """Returns the images in files and folders, or else some test images of a run, or a sample photograph."""
    from interlayer.experiments import image_files, shown_images

    return shown_images(loaded, image_files(paths or []), wanted=wanted)


def measure_networks(
    arguments: Sequence[str], paths: Sequence[Path] | None, wanted: int, measure: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    """Applies a measure to every network and its images, with a progress bar, and returns its results by name.

    Args:
        arguments: the networks; see `open_networks`.
        paths: files and folders of images; see `open_images`.
        wanted: the number of test images of a run.
        measure: a function of a network and batches of images.
    """
    from rich.console import Console
    from rich.progress import track

    result, console = {}, Console(stderr=True)
    for name, loaded in open_networks(arguments).items():
        batches = open_images(loaded, paths, wanted).inputs.split(BATCH)
        shown = track(batches, name, console=console, transient=True, disable=not console.is_terminal)
        with naming(name):
            result[name] = measure(loaded.network, shown)
    return result


def check_output(output: Path, overwrite: bool) -> None:
    """Raises if the figure cannot be written, before anything is computed."""
    from matplotlib.backend_bases import FigureCanvasBase

    if output.is_dir():
        raise ValueError(f"{output} is a folder: give --output the name of a figure, such as {output / 'figure.png'}")
    kinds = FigureCanvasBase.get_supported_filetypes()
    if output.suffix[1:].lower() not in kinds:
        raise ValueError(f"{output} cannot be drawn: the name of a figure ends in one of .{', .'.join(sorted(kinds))}")
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; give --overwrite to replace it")
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent}: no such folder")


def save(figure: Any, output: Path) -> None:
    """Writes a figure and prints where."""
    figure.draw_without_rendering()  # a constrained layout fits its labels only when it is computed a second time
    figure.savefig(output, dpi=150)
    typer.echo(f"drawn in {output}")
