"""`interlayer plot entropy`: how dense attention is, by depth."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Networks, Overwrite, Pictures, TestImages, check_output, measure_networks, save


def entropy(
    networks: Networks,
    image: Pictures = None,
    test_images: TestImages = 64,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("entropy.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the entropy of the rows of spatial attention by depth, several networks in one figure.

    High entropy is dense attention, and log N is that of uniform attention to N keys. The band is from the 15th to the
    85th percentile of the rows. If a network has a class token, a second panel shows its entropy alone (CB, Figures 4
    and 7a).

    Example: `interlayer plot entropy runs/plain runs/cb --output entropy.png`

    Example: `interlayer plot entropy deit_small_patch16_224 pretrained=true --image photos`
    """
    from interlayer.analysis import attention_entropy, plot_attention_entropy

    check_output(output, overwrite)
    found = measure_networks(networks, image, test_images, attention_entropy)
    for name, layers in found.items():
        mean = sum(layer.mean for layer in layers) / len(layers)
        bound = sum(layer.bound for layer in layers) / len(layers)
        typer.echo(f"{name}: mean entropy {mean:.2f} nats over {len(layers)} attentions, {bound:.2f} if uniform")
    save(plot_attention_entropy(found), output)
