"""`interlayer plot sharing`: where do consecutive layers attend alike?"""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Networks, Overwrite, Pictures, check_output, naming, open_images, open_networks, save


def sharing(
    networks: Networks,
    image: Pictures = None,
    threshold: Annotated[
        float, typer.Option(min=0.0, help="The largest divergence, in nats, at which a layer could share scores.")
    ] = 0.01,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("sharing.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot where neighboring layers attend alike, and say which of them could share their scores.

    The scores of a layer and of the layer before, over the layers that both read, are renormalized; their KL divergence
    is averaged over images and heads. It is zero if the layer could use the scores of the layer before. The scores of
    MRLA-light are the magnitudes of the weights in Eq. 8, products of lambda and gates, which are alike by
    construction up to differences between the channels of a head.

    Example: `interlayer plot sharing runs/20250101-120000-resnet50 --threshold 0.02`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer import analysis

    check_output(output, overwrite)
    found, sentences = {}, []
    table = Table("network", "layer", "KL, nats", "")
    for name, loaded in open_networks(networks).items():
        images = open_images(loaded, image).inputs
        with naming(name):
            found[name] = analysis.score_sharing(analysis.layer_scores(loaded.network, images))
        rows = [row for stage in found[name] for row in zip(stage.divergences, stage.blocks, strict=True)]
        for divergence, block in sorted(rows):
            table.add_row(name, block, f"{divergence:.4f}", "could share" if divergence <= threshold else "")
        alike = sum(divergence <= threshold for divergence, _ in rows)
        closest, block = min(rows)
        sentences.append(
            f"{name}: {alike} of {len(rows)} layers differ from the layer before by at most {threshold:g} nats; "
            f"the closest is {block} with {closest:.4f}"
        )
    Console().print(table)
    for sentence in sentences:
        typer.echo(sentence)
    save(analysis.plot_score_sharing(found, threshold=threshold), output)
