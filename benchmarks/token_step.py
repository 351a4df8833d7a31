"""What context broadcasting adds to a training step of DeiT-S, and what ResT's attention saves.

    python benchmarks/token_step.py            # on a GPU: batch 256, 224 pixels, bfloat16
    python benchmarks/token_step.py --tables rest --modes graph

"published" runs every operation in plain PyTorch, as the authors' program arranges them; "MSA" is ResT-Lite with plain
self-attention over all tokens, its maps stored ("published") or by torch's fused attention. Times are medians of steps
queued one behind another (forward, backward, SGD with momentum), memory is the peak of a step; ratios are to the first
line of a table.
"""

from functools import partial

import timm
from step_table import make_parser, print_table

import interlayer  # noqa: F401  registers the models

# label, model, its options, implementation
TABLES = {
    "cb": [
        ("DeiT-S", "deit_small_patch16_224", {}, "auto"),
        ("DeiT-S + CB", "deit_small_cb", {}, "auto"),
        ("DeiT-S + CB_S", "deit_small_cb_scaled", {}, "auto"),
    ],
    "rest": [
        ("ResT-Lite, published", "rest_lite", {}, "reference"),
        ("ResT-Lite", "rest_lite", {}, "auto"),
        ("with MSA, published", "rest_lite", {"attention": "msa"}, "reference"),
        ("with MSA", "rest_lite", {"attention": "msa"}, "auto"),
    ],
}


def main() -> None:
    parser = make_parser(__doc__, image_size=224, steps=30)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    arguments = parser.parse_args()
    for table in arguments.tables:
        rows = [
            (label, partial(timm.create_model, name, **options), backend)
            for label, name, options, backend in TABLES[table]
        ]
        print_table(arguments, lambda compiled, rows=rows: rows)


if __name__ == "__main__":
    main()
