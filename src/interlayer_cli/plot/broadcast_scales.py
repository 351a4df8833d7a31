"""`interlayer plot broadcast-scales`: how much of the average token each block adds."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Networks, Overwrite, check_output, naming, open_networks, save


def broadcast_scales(
    networks: Networks,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("broadcast-scales.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot the scales of scaled context broadcasting by depth: ratio of their quantiles, and mean (CB, Figure 8).

    The networks have `cb:scaled=true` attached. No images are needed.

    Example: `interlayer plot broadcast-scales runs/cb-scaled`

    Example: `interlayer plot broadcast-scales deit_small_patch16_224+cb:scaled=true weights=cb.safetensors`
    """
    from interlayer import analysis

    check_output(output, overwrite)
    found = {}
    for name, loaded in open_networks(networks).items():
        with naming(name):
            found[name] = analysis.broadcast_scales(loaded.network)
    save(analysis.plot_broadcast_scales(found), output)
