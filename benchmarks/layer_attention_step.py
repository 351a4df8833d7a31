"""What layer attention costs: a training step of ResNets with and without it.

    python benchmarks/layer_attention_step.py         # on a GPU: batch 256, 224 pixels, bfloat16, channels_last
    python benchmarks/layer_attention_step.py --modes eager graph --models resnet101 resnet101_mrla_light

Times are medians of steps queued one behind another (forward, backward, SGD with momentum), memory is the peak of a
step; the ratios are to the first model, each mode by itself. "reference" runs every operation in plain PyTorch.
NAME+MECHANISM:OPTION=VALUE is accepted as everywhere.
"""

from functools import partial

from step_table import Row, make_parser, print_table

from interlayer.models.build import build_network

MODELS = ("resnet50", "resnet50_mrla_light", "resnet50+mrla_light:reading=published", "resnet50_mrla_base")


def main() -> None:
    parser = make_parser(__doc__, image_size=224, steps=20)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--reference", action="store_true", help="also time the plain PyTorch operations")
    arguments = parser.parse_args()

    def rows(compiled: bool) -> list[Row]:
        return [
            (name, partial(build_network, name), backend)
            for name in arguments.models
            for backend in (("auto", "reference") if arguments.reference and not compiled else ("auto",))
        ]

    print_table(arguments, rows)


if __name__ == "__main__":
    main()
