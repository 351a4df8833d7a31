"""What layer attention costs: a training step of ResNets and DeiTs with and without it.

    python benchmarks/layer_attention_step.py         # on a GPU: batch 256, 224 pixels, bfloat16, channels_last
    python benchmarks/layer_attention_step.py --batch-size 8 --modes eager graph
    python benchmarks/layer_attention_step.py --modes compiled --together 8
    python benchmarks/layer_attention_step.py --models resnet50 resnet50+mrla_light:learn_decay=false

Every family is a table of its own, whose ratios are to its first model, the plain backbone, each mode by itself. Times
are medians of steps queued one behind another (forward, backward, SGD with momentum), memory is the peak of a step.
The published MRLA-base has a stem of three convolutions and is compared with a plain ResNet with that stem, "deep".
`--together 8` compiles eight models beside each other, which takes minutes instead of half an hour. "reference" runs
every operation in plain PyTorch. `--models` replaces the families by one table of the given models;
NAME+MECHANISM:OPTION=VALUE is accepted as everywhere.
"""

from functools import partial
from typing import Any

from step_table import Row, make_parser, print_table

from interlayer.models.build import build_network

PUBLISHED = {"reading": "published"}
DEEP = {"stem_type": "deep", "stem_width": 32}

# label, model and its options
FAMILIES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
for _name in ("resnet50", "resnet101"):
    FAMILIES[_name] = [
        (_name, _name, {}),
        (f"{_name}_mrla_light", f"{_name}_mrla_light", {}),
        ("  published", f"{_name}_mrla_light", PUBLISHED),
        (f"{_name}_mrla_base", f"{_name}_mrla_base", {}),
    ]
    FAMILIES[f"{_name}_deep"] = [
        (f"{_name}, deep", _name, DEEP),
        (f"{_name}_mrla_base, pub.", f"{_name}_mrla_base", PUBLISHED),
    ]
FAMILIES["deit_small"] = [
    ("deit_small", "deit_small_patch16_224", {}),
    ("deit_small_mrla_light", "deit_small_mrla_light", {}),
    ("  published", "deit_small_mrla_light", PUBLISHED),
    ("deit_small_mrla_base", "deit_small_mrla_base", {}),
    ("  published", "deit_small_mrla_base", PUBLISHED),
]


def main() -> None:
    parser = make_parser(__doc__, image_size=224, steps=20)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--models", nargs="+", help="one table of these models instead of the families")
    parser.add_argument("--reference", action="store_true", help="also time the plain PyTorch operations")
    arguments = parser.parse_args()
    tables = [FAMILIES[family] for family in arguments.families]
    if arguments.models:
        tables = [[(name, name, {}) for name in arguments.models]]

    def rows(table: list[tuple[str, str, dict[str, Any]]], compiled: bool) -> list[Row]:
        return [
            (label, partial(build_network, name, model_options=options), backend)
            for label, name, options in table
            for backend in (("auto", "reference") if arguments.reference and not compiled else ("auto",))
        ]

    print_table(arguments, *(partial(rows, table) for table in tables))


if __name__ == "__main__":
    main()
