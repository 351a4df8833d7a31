"""`interlayer plot cam`: where in an image a network sees a class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .figure import Networks, Overwrite, Pictures, check_output, naming, open_images, open_networks, save

if TYPE_CHECKING:
    from interlayer.experiments import LoadedNetwork, ShownImages

TEST_IMAGES = 4  # number of test images of a run, if no image is given
MOST_IMAGES = 24
MOST_COLUMNS = 24
PREDICTED = "predicted"


def cam(
    networks: Networks,
    image: Pictures = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="grad_cam (the default), score_cam, group_cam, grad_cam_plusplus, xgrad_cam, hires_cam, layer_cam, "
            "eigen_cam or eigen_grad_cam. Several are separated by commas."
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="The name or the number of a class, or predicted, the default: the class that each network predicts. "
            "Give it several times for several classes."
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            help="The end of a stage, such as stage3 or -1, or the name of a module; by default the last map before "
            "the pooling. Several are separated by commas."
        ),
    ] = None,
    channels: Annotated[
        int | None,
        typer.Option(min=1, help="Number of channels for score_cam, those with the largest variance; by default all."),
    ] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Number of groups for group_cam; by default 32.")] = None,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("cam.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot where in images networks see a class: class activation maps over the photographs.

    Rows are images. The first column is the photograph; the others are networks, classes, layers and methods, with the
    class and its probability below each heatmap. grad_cam and its relatives need `pip install "interlayer[cam]"`.
    score_cam runs the network once for each channel of the layer.

    Example: `interlayer plot cam runs/plain runs/mrla --image photo.jpg --method score_cam --layer stage3,stage4`

    Example: `interlayer plot cam resnet50 pretrained=true --image cat.jpg --method grad_cam,group_cam --target tabby`
    """
    from interlayer.analysis import ActivationColumn, class_activation, plot_class_activation
    from interlayer.analysis.class_activation import METHODS

    from ..display import counting

    check_output(output, overwrite)
    methods = _listed(method) or ["grad_cam"]
    _check_methods(methods, METHODS, {"score_cam": ("--channels", channels), "group_cam": ("--groups", groups)})
    layers: list[str | None] = [*_listed(layer)] or [None]
    loaded = open_networks(networks)
    labels = {name: [_label(each, name, text) for text in target or [PREDICTED]] for name, each in loaded.items()}
    choices = [(name, *choice) for name in loaded for choice in product(labels[name], layers, methods)]
    if len(choices) > MOST_COLUMNS:
        raise ValueError(f"the figure would have {len(choices)} columns: ask for at most {MOST_COLUMNS} at a time")
    shown = _images(loaded, image)
    columns = []
    for name, label, place, how in choices:
        title = METHODS[how].title
        with naming(name), counting(f"{name} {title}") as progress:
            found = class_activation(
                loaded[name].network,
                shown[name].inputs,
                method=how,
                targets=label,
                layer=place,
                channels=channels if how == "score_cam" else None,
                groups=groups if how == "group_cam" else None,
                progress=progress,
            )
        typer.echo(f"{name}: {title} of {found.layer}, {found.resolution[0]} x {found.resolution[1]}")
        varying = [(name, len(loaded) > 1), (found.layer, len(layers) > 1), (title, len(methods) > 1)]
        heading = "\n".join(text for text, varies in varying if varies) or title
        columns.append(ActivationColumn(heading, shown[name].pictures, found, loaded[name].classes))
    common = [METHODS[methods[0]].title] * (len(methods) == 1) + list(loaded) * (len(loaded) == 1)
    title = "Where a class is seen" + (f": {', '.join(common)}" if common else "")
    names = [Path(name).name for name in next(iter(shown.values())).names]
    save(plot_class_activation(columns, names=names, title=title), output)


def _check_methods(
    methods: Sequence[str], known: Collection[str], options: Mapping[str, tuple[str, int | None]]
) -> None:
    """Raises if a method does not exist, or if an option is given without the method that has it."""
    for name in methods:
        if name not in known:
            raise ValueError(f"unknown method {name!r}: expected one of {', '.join(known)}")
    for owner, (option, value) in options.items():
        if value is not None and owner not in methods:
            raise ValueError(f"{option} is for {owner}, which is not among the methods: {', '.join(methods)}")


def _listed(values: Sequence[str] | None) -> list[str]:
    return [text.strip() for value in values or [] for text in value.split(",") if text.strip()]


def _label(loaded: LoadedNetwork, name: str, text: str) -> int | None:
    """Returns the label of a class of a network, or None for the predicted one."""
    if text == PREDICTED:
        return None
    with naming(name):
        return loaded.label_of(text)


def _images(loaded: dict[str, LoadedNetwork], paths: Sequence[Path] | None) -> dict[str, ShownImages]:
    """Opens the same images for each network, transformed as each of them expects."""
    shown = {name: open_images(each, paths, wanted=TEST_IMAGES) for name, each in loaded.items()}
    first, *others = shown.values()
    if any(other.names != first.names for other in others):
        raise ValueError("the networks have different test images: name images of your own with --image")
    if len(first) > MOST_IMAGES:
        raise ValueError(f"{len(first)} images are too many for a figure: name at most {MOST_IMAGES}")
    return shown
