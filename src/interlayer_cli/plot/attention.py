"""`interlayer plot attention`: what a query attends to, over the photograph."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from .figure import Networks, Overwrite, check_output, naming, open_networks, save

QUERY = re.compile(r"(\d+(?:\.\d+)?)(%?)\s*,\s*(\d+(?:\.\d+)?)(%?)")


def attention(
    networks: Networks,
    image: Annotated[
        Path | None,
        typer.Option(help="An image file; by default the first test image of a run, or a sample photograph."),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(
            metavar="ROW,COLUMN|X%,Y%|class",
            help="The query: row and column of a patch, from 0; a position in the image, such as 50%,25% from the left "
            "and from the top; or class for the class token. By default the center.",
        ),
    ] = None,
    layer: Annotated[
        str,
        typer.Option(
            help="Name of the attention or of its block, such as blocks.3, or its number, from 1 or, negative, from "
            "the end; by default the last."
        ),
    ] = "-1",
    heads: Annotated[
        str | None, typer.Option(metavar="N,N...|mean", help="Heads, from 0, or their mean; by default up to eight.")
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            metavar="shared|own",
            help="One color scale for all maps, from the smallest to the largest weight, or one for each map.",
        ),
    ] = "shared",
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("attention.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot what a query attends to, over the photograph: heads side by side, networks below each other.

    The query is marked by a red box (MRLA, Figure 7). Networks can be classifiers, and runs that detect or segment,
    which see the whole image (CB, Figure 10).

    Example: `interlayer plot attention runs/plain runs/mrla --image photo.jpg --query 40%,60% --heads 0,1,2`

    Example: `interlayer plot attention deit_tiny_patch16_224 pretrained=true --image cat.jpg --query class --layer 6`
    """
    from interlayer.analysis import AttentionRow, plot_query_attention, query_attention
    from interlayer.experiments import whole_image

    check_output(output, overwrite)
    place, number, chosen = parse_query(query), parse_layer(layer), parse_heads(heads)
    if scale not in ("shared", "own"):
        raise ValueError(f"--scale is shared or own, got {scale!r}")
    rows = []
    for name, loaded in open_networks(networks).items():
        shown = whole_image(loaded, image)
        with naming(name):
            found = query_attention(loaded.network, shown.inputs, layer=number, forward=loaded.task.forward, **place)
        rows.append(AttentionRow(name, shown.pictures[0], found))
    title = f"What a query attends to: {Path(shown.names[0]).name}"
    save(plot_query_attention(rows, heads=chosen, scale=scale, title=title), output)  # type: ignore[arg-type]


def parse_query(text: str | None) -> dict[str, Any]:
    """Returns the arguments of `query_attention` for --query."""
    if text is None:
        return {}
    if text == "class":
        return {"query": "class"}
    match = QUERY.fullmatch(text.strip())
    if match is None or match[2] != match[4] or (not match[2] and "." in match[1] + match[3]):
        raise ValueError(f"--query is ROW,COLUMN such as 7,4, X%,Y% such as 50%,25%, or class, got {text!r}")
    if match[2]:
        return {"at": (float(match[1]) / 100, float(match[3]) / 100)}
    return {"query": (int(match[1]), int(match[3]))}


def parse_layer(text: str) -> int | str:
    """Returns the layer for `query_attention`, which counts from 0."""
    if not re.fullmatch(r"-?\d+", text):
        return text
    number = int(text)
    if number == 0:
        raise ValueError("--layer counts attentions from 1: give 1 for the first, or the name of its module")
    return number - 1 if number > 0 else number


def parse_heads(text: str | None) -> list[int] | str | None:
    """Returns the heads for `plot_query_attention`."""
    if text is None or text == "mean":
        return text
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise ValueError(f"--heads is a list of heads such as 0,2,5, or mean, got {text!r}")
    return [int(head) for head in text.replace(" ", "").split(",")]
