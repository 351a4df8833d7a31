"""What context broadcasting adds to a training step of DeiT-S, and what ResT's attention saves.

    python benchmarks/token_step.py            # on a GPU: batch 256, 224 pixels, bfloat16
    python benchmarks/token_step.py --tables rest --compiled-only

"published" runs every operation in plain PyTorch, as the authors' program arranges them; "MSA" is ResT-Lite with plain
self-attention over all tokens, its maps stored ("published") or by torch's fused attention. Times are medians of single
steps (forward, backward, SGD with momentum), memory is the peak of a step; ratios are to the first line of a table.
"""

import argparse

import timm
from step_table import print_head, print_step

import interlayer  # noqa: F401  registers the models
from interlayer.analysis import Setting

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager-only", action="store_true")
    parser.add_argument("--compiled-only", action="store_true")
    arguments = parser.parse_args()
    for table in arguments.tables:
        print_head(arguments.device)
        for compiled in (False, True):
            if arguments.eager_only if compiled else arguments.compiled_only:
                continue
            setting = Setting(
                arguments.batch_size,
                arguments.image_size,
                arguments.device,
                "bfloat16",
                True,
                compiled,
                arguments.steps,
            )
            first = None
            for label, name, options, backend in TABLES[table]:
                cost = print_step(
                    label,
                    lambda name=name, options=options: timm.create_model(name, **options),
                    setting,
                    first,
                    backend,
                )
                first = first or cost


if __name__ == "__main__":
    main()
