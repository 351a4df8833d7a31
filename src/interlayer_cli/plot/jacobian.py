"""`interlayer plot jacobian`: how steep the softmax of attention is."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Networks, Overwrite, Pictures, TestImages, check_output, measure_networks, save


def jacobian(
    networks: Networks,
    image: Pictures = None,
    test_images: TestImages = 16,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("jacobian.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the nuclear norm of the softmax's Jacobian against the entropy of attention (CB, Figure 5).

    The first panel is the softmax of two scores. The others show the attention of each network, colored by depth: the
    denser the attention, the larger the gradient.

    Example: `interlayer plot jacobian runs/plain runs/cb`

    Example: `interlayer plot jacobian deit_small_patch16_224 pretrained=true --image photo.jpg`
    """
    from interlayer.analysis import attention_jacobian, plot_attention_jacobian

    check_output(output, overwrite)
    save(plot_attention_jacobian(measure_networks(networks, image, test_images, attention_jacobian)), output)
