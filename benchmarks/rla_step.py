"""What recurrent layer aggregation costs: a training step of ResNet-50 with and without it.

    python benchmarks/rla_step.py                     # on a GPU: batch 256, 224 pixels, bfloat16, channels_last
    python benchmarks/rla_step.py --batch-size 64 --models resnet50 resnet50_rla resnet50_eca_rla

Times are medians of steps queued one behind another (forward, backward, SGD with momentum), memory is the peak of a
step; the ratios are to the first model, each mode by itself. "reference" runs every operation in plain PyTorch.
"""

from functools import partial

import timm
from step_table import Row, make_parser, print_table

import interlayer  # noqa: F401  registers the models


def main() -> None:
    parser = make_parser(__doc__, image_size=224, steps=20)
    parser.add_argument("--models", nargs="+", default=["resnet50", "resnet50_rla"])
    arguments = parser.parse_args()

    def rows(compiled: bool) -> list[Row]:
        return [
            (name, partial(timm.create_model, name), backend)
            for name in arguments.models
            for backend in (("auto",) if name == arguments.models[0] or compiled else ("auto", "reference"))
        ]

    print_table(arguments, rows)


if __name__ == "__main__":
    main()
