"""`interlayer plot emsa-heads`: how similar the heads of EMSA are."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Networks, Overwrite, Pictures, TestImages, check_output, measure_networks, naming, save


def emsa_heads(
    networks: Networks,
    image: Pictures = None,
    layer: Annotated[
        str | None, typer.Option(help="Name of the attention or of its block, such as stages.3.1; by default the last.")
    ] = None,
    test_images: TestImages = 64,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("emsa-heads.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the cosine similarity between the heads of EMSA: before they are mixed, after it, and after the norm.

    The mixing makes heads similar and the instance norm makes them diverse again, according to ResT (Figure 1).

    Example: `interlayer plot emsa-heads runs/rest`

    Example: `interlayer plot emsa-heads rest_lite weights=rest_lite.safetensors --image photos --layer stages.2.1`
    """
    from interlayer import analysis
    from interlayer.analysis.query_attention import attention_number

    check_output(output, overwrite)
    found = measure_networks(networks, image, test_images, analysis.emsa_heads)
    chosen = {}
    for name, layers in found.items():
        with naming(name):
            number = -1 if layer is None else attention_number([each.name for each in layers], layer)
        chosen[name] = layers[number]
    save(analysis.plot_emsa_heads(chosen), output)
