"""What a training step of a HaloNet costs, beside timm's.

    python benchmarks/halo_step.py               # on a GPU: batch 256, 256 pixels, bfloat16, channels_last
    python benchmarks/halo_step.py --models halonet50ts "halonet50ts, ours" --batch-size 64
    python benchmarks/halo_step.py --models halo_h7 --image-size 600 --batch-size 32 --modes eager

"halonet50ts, ours" is timm's halonet50ts with an attention of this library, of the same shape, in the place of each of
its own. Times are medians of steps queued one behind another (forward, backward, SGD with momentum), memory is the peak
of a step; ratios are to the first model, each mode by itself.
"""

from functools import partial

import timm
from step_table import make_parser, print_table
from timm.layers.halo_attn import HaloAttn
from torch import nn

from interlayer.mechanisms import HaloAttention2d

OURS = ", ours"


def make_model(name: str) -> nn.Module:
    model = timm.create_model(name.removesuffix(OURS))
    if name.endswith(OURS):
        for path, layer in list(model.named_modules()):
            if isinstance(layer, HaloAttn):
                attention = HaloAttention2d(
                    layer.q.in_channels,
                    layer.dim_out_v,
                    qk_channels=layer.dim_out_qk,
                    heads=layer.num_heads,
                    block=layer.block_size,
                    halo=layer.halo_size,
                    stride=layer.block_stride,
                )
                model.set_submodule(path, attention)
    return model


def main() -> None:
    parser = make_parser(__doc__, image_size=256, steps=10)
    default = ["halonet_h1", "halo_h1", "halonet50ts", f"halonet50ts{OURS}"]
    parser.add_argument("--models", nargs="+", default=default)
    arguments = parser.parse_args()
    print_table(arguments, lambda compiled: [(name, partial(make_model, name), "auto") for name in arguments.models])


if __name__ == "__main__":
    main()
