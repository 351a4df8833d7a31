"""Compares the ways in which a mechanism that starts as the identity can be brought to use.

    python benchmarks/identity_starts.py --data CIFAR10_FOLDER weights=tf_efficientnet_lite0.safetensors \
        image_size=128 epochs=5 crop=padded padding=16 crop_pct=1.0 resident=yes precision=bfloat16 \
        channels_last=true

Trains the plain backbone and one network per start with the recipe `finetune`, and prints the accuracy with the
mechanism and with it switched off, and how many predictions switching it off changes.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interlayer.mechanisms import LayerAttention
from interlayer.tasks import Classification, register_task
from interlayer.training import load_recipe, train


class ScaledNorm(nn.Module):
    """A norm that starts as usual, followed by a scale per channel that starts at zero."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        nn.init.ones_(norm.weight)
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros_like(norm.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale[:, None, None]


@register_task
class ScaleBehindNorm(Classification):
    """Classification with layer attention whose zero is behind its norm, instead of in it."""

    name = "scale_behind_norm"

    def build(self) -> nn.Module:
        network = super().build()
        for module in network.modules():
            if isinstance(module, LayerAttention):
                module.norm = ScaledNorm(module.norm)
        return network


STARTS: dict[str, dict[str, Any]] = {
    "zero in the norm": {"new_lr_scale": 1},
    "zero in a scale behind the norm": {"new_lr_scale": 1, "task": "scale_behind_norm"},
    "new parameters alone for one epoch": {"new_lr_scale": 1, "freeze_epochs": 1},
    "new parameters at 10 times the rate": {"new_lr_scale": 10},
    "new parameters at 30 times the rate": {"new_lr_scale": 30},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    parser.add_argument("--mechanism", default="mrla_light")
    parser.add_argument("--starts", default="0,1,2,3,4", help="rows of the table, from 0")
    parser.add_argument("overrides", nargs="*", help="values of the recipe, key=value")
    arguments = parser.parse_intermixed_args()
    chosen = [list(STARTS.items())[index] for index in map(int, arguments.starts.split(","))]
    attached = f"{arguments.backbone}+{arguments.mechanism}"
    runs = [("plain backbone", arguments.backbone, {}), *((name, attached, values) for name, values in chosen)]
    print("| start | accuracy | switched off | predictions changed |\n| --- | --- | --- | --- |")
    for name, model, values in runs:
        recipe = load_recipe("finetune", arguments.overrides, model=model, data=arguments.data, **values)
        with tempfile.TemporaryDirectory() as folder:
            summary = train(recipe, Path(folder) / "run")
        off = summary["contribution"]
        rest = f"{off['value_without']:.2%} | {off['changed'] / off['images']:.2%}" if off else " | "
        print(f"| {name} | {summary['test']['accuracy']:.2%} | {rest} |", flush=True)


if __name__ == "__main__":
    main()
