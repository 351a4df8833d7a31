"""`interlayer plot distance`: how far attention reaches, by depth."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Networks, Overwrite, Pictures, TestImages, check_output, measure_networks, save


def distance(
    networks: Networks,
    image: Pictures = None,
    test_images: TestImages = 64,
    per_query: Annotated[
        bool,
        typer.Option(
            "--per-query",
            help="Sum over the keys and average over queries, which is the distance at which a query attends, instead "
            "of averaging over pairs of tokens as the paper does.",
        ),
    ] = False,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("distance.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the relative distance of spatial attention by depth, several networks in one figure (CB, Figure 7b).

    It is the mean of the attention weight times the distance over pairs of different tokens, in fractions of the
    height and width of the image. Class tokens are left out.

    Example: `interlayer plot distance runs/plain runs/cb --per-query`

    Example: `interlayer plot distance vit_small_patch16_224 swin_tiny_patch4_window7_224 --image photo.jpg`
    """
    from functools import partial

    from interlayer.analysis import attention_distance, plot_attention_distance

    check_output(output, overwrite)
    found = measure_networks(networks, image, test_images, partial(attention_distance, per_query=per_query))
    save(plot_attention_distance(found, per_query=per_query), output)
