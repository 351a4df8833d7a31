"""What recurrent layer aggregation costs: a training step of ResNet-50 with and without it.

    python benchmarks/rla_step.py                     # on a GPU: batch 256, 224 pixels, bfloat16, channels_last
    python benchmarks/rla_step.py --batch-size 64 --models resnet50 resnet50_rla resnet50_eca_rla

Times are medians of single steps (forward, backward, SGD with momentum), memory is the peak of a step; the ratios are
to the first model, eager to eager and compiled to compiled. "reference" runs every operation in plain PyTorch.
"""

import argparse

import timm
from step_table import print_head, print_step

import interlayer  # noqa: F401  registers the models
from interlayer.analysis import Setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "resnet50_rla"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled-only", action="store_true")
    arguments = parser.parse_args()
    print_head(arguments.device)
    for compiled in (True,) if arguments.compiled_only else (False, True):
        setting = Setting(
            arguments.batch_size, arguments.image_size, arguments.device, "bfloat16", True, compiled, arguments.steps
        )
        first = None
        for name in arguments.models:
            for backend in ("auto",) if name == arguments.models[0] or compiled else ("auto", "reference"):
                cost = print_step(name, lambda name=name: timm.create_model(name), setting, first, backend)
                first = first or cost


if __name__ == "__main__":
    main()
