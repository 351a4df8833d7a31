"""`interlayer plot queries`: are the queries of consecutive layers alike?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .figure import Networks, Overwrite, Pictures, check_output, naming, open_images, open_networks, save

if TYPE_CHECKING:
    from interlayer.experiments import LoadedNetwork


def queries(
    networks: Networks,
    image: Pictures = None,
    per_class: Annotated[int, typer.Option(min=1, help="Number of test images of each class of a run.")] = 5,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("queries.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot how similar the queries of consecutive layers are, in networks with layer attention (MRLA, Figure 2b).

    MRLA-light assumes that within each head, the query of a layer is proportional to that of the layer before: the
    absolute value of their cosine similarity is then one. All heads and layers are counted except for the first layer
    of a stage. By default, 5 test images of each class of a run are used.

    Example: `interlayer plot queries runs/20250101-120000-resnet50`

    Example: `interlayer plot queries resnet50+mrla_base weights=resnet50.safetensors --image photos/`
    """
    from rich.console import Console
    from rich.table import Table

    from interlayer import analysis

    check_output(output, overwrite)
    found = {}
    table = Table("network", "layer", "mean |cos|", "random directions")
    for name, loaded in open_networks(networks).items():
        with naming(name):
            found[name] = analysis.query_similarities(loaded.network, _batches(loaded, image, per_class))
        for stage in found[name]:
            chance = f"{analysis.random_similarity(stage.channels):.3f}"
            for block, mean in zip(stage.blocks, stage.means.tolist(), strict=True):
                table.add_row(name, block, f"{mean:.3f}", chance)
    Console().print(table)
    count = {name: len(stages[0].similarities) for name, stages in found.items()}
    titles = {f"{name}, {number} image{'s' * (number > 1)}": found[name] for name, number in count.items()}
    save(analysis.plot_query_similarity(titles), output)


def _batches(loaded: "LoadedNetwork", image: list[Path] | None, per_class: int) -> Any:
    """Yields batches of normalized images: some of each class of a run, or those of `open_images`."""
    from interlayer.experiments import ClassImages, TrainedNetwork
    from interlayer.tasks import Classification

    from ..display import counting

    if image or not isinstance(loaded, TrainedNetwork) or not isinstance(loaded.task, Classification):
        yield open_images(loaded, image).inputs
        return
    batches = ClassImages(loaded, per_class)
    done = 0
    with counting("images") as progress:
        for shown in batches:
            yield shown.inputs
            done += len(shown)
            progress(done, len(batches))
