"""`interlayer explore`: look inside networks in a browser."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .networks import distinct_names, split_networks

if TYPE_CHECKING:
    from interlayer.experiments.explorer import Explorer

PRETRAINED = "tf_efficientnet_lite0"  # whose weights come with the extra
UNTRAINED = ("resnet50+mrla_base", "deit_tiny_mrla_light")


def explore(
    networks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|MODEL]... [KEY=VALUE]...",
            help="Networks to offer: folders of finished runs, or NAME or NAME+MECHANISM. KEY=VALUE, such as "
            "weights=FILE or image_size=288, is for the network before it, and for all networks if it comes first. By "
            f"default {PRETRAINED} with its ImageNet weights, and examples without weights.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at. 0.0.0.0 shows the page to every computer that reaches this one.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; by default a free one from 7860.")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show a local web page: which layer reads which, what a patch attends to, where a class is seen.

    Drop a photograph or take a sample, choose one network or two, and walk through stages, heads and patches. Needs
    `pip install "interlayer[explore]"`. Stop it with Ctrl-C.

    Example: `interlayer explore`

    Example: `interlayer explore runs/plain runs/mrla vit_tiny_patch16_224+cb`
    """
    from interlayer.pages.explorer import import_gradio, serve_explorer

    from .display import log_to_stderr

    log_to_stderr()
    import_gradio()  # before networks are loaded
    explorer = open_explorer(networks or [])
    explorer.open(explorer.names[0])  # an error in the first network is seen here, not in the browser
    try:
        _, address = serve_explorer(explorer, host=host, port=port, open_browser=browser, wait=False)
    except OSError as error:
        at = host if port is None else f"{host}:{port}, which may be in use"
        raise ValueError(f"no page can be served at {at}: give another --host or --port") from error
    typer.echo(f"explorer: {address} (Ctrl-C stops it)")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        typer.echo("stopped")


def open_explorer(arguments: Sequence[str]) -> "Explorer":
    """Returns the explorer of the networks on the command line."""
    from interlayer.experiments import load_network
    from interlayer.experiments.explorer import Explorer
    from interlayer.models.packaged import has_package

    if not arguments:
        trained = [f"{PRETRAINED} pretrained=true"] if has_package(PRETRAINED) else []
        given = [(text.split()[0], text.split()[1:]) for text in (*trained, *UNTRAINED)]
    else:
        given = split_networks(arguments)
    for network, _ in given:
        if ("/" in network or network in (".", "..")) and not Path(network).is_dir():
            raise ValueError(f"{network}: no such folder of a run")
    names = distinct_names(given, [f"{network}" for network, _ in given])
    loaders = {
        name: partial(load_network, network, keys, untrained=True)
        for name, (network, keys) in zip(names, given, strict=True)
    }
    return Explorer(loaders)
