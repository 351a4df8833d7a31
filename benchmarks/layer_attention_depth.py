"""What layer attention costs with depth: one stage of 4 to 64 blocks, plain and with MRLA-light and MRLA-base.

    python benchmarks/layer_attention_depth.py            # on a GPU: batch 64, 256 channels of 14x14, bfloat16
    python benchmarks/layer_attention_depth.py --device cpu --depths 2 4 --batch-size 2 --steps 1 --plot /tmp/depth.svg

Prints the time and the memory of a training step (forward, backward, SGD with momentum) for each number of blocks T.
Memory is the peak of a step less weights and momentum. The exponents of memory and time in T are slopes of log-log
regressions, over all T and over the two largest. A plot shows memory and the time per block.
"""

import argparse
import math
import time
from pathlib import Path

import torch

from interlayer.analysis import Setting, depth_costs, depth_curves, depth_exponents, plot_depth

LABELS = {"plain": "plain", "mrla_light": "+ MRLA-light", "mrla_base": "+ MRLA-base"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--mechanisms", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--reading", choices=("paper", "published"), default="paper")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--map-size", type=int, default=14)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--graph", action="store_true", help="time the step as a CUDA graph")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=math.inf, help="measure no further row after this time")
    parser.add_argument("--plot", type=Path, default=Path("docs/images/layer_attention_depth.svg"))
    arguments = parser.parse_args()
    setting = Setting(
        arguments.batch_size, 4 * arguments.map_size, arguments.device, "bfloat16",
        channels_last=True, steps=arguments.steps, graph=arguments.graph,
    )  # fmt: skip
    if arguments.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    networks = {
        LABELS[name]: None if name == "plain" else f"{name}:reading={arguments.reading}"
        for name in arguments.mechanisms
    }
    start = time.monotonic()
    found, plain = [], {}
    print(f"{'':13} {'T':>3} {'step':>11} {'per block':>11} {'memory':>12} {'ratios to plain':>16}")
    costs = depth_costs(networks, arguments.depths, setting, channels=arguments.channels, map_size=arguments.map_size)
    for cost in costs:
        found.append(cost)
        if not cost.fits:
            print(f"{cost.name:13} {cost.blocks:3} does not fit", flush=True)
            continue
        if cost.name == LABELS["plain"]:
            plain[cost.blocks] = cost
        ratios = ""
        if other := plain.get(cost.blocks):
            ratios = f"{cost.seconds / other.seconds:8.3f} {cost.memory / other.memory:7.3f}"
        print(
            f"{cost.name:13} {cost.blocks:3} {cost.seconds * 1e3:8.2f} ms"
            f" {cost.seconds / cost.blocks * 1e3:8.3f} ms {cost.memory / 2**20:8.1f} MiB {ratios:>16}",
            flush=True,
        )
        if time.monotonic() - start > 60 * arguments.minutes:
            break
    print(f"\n{'exponents in T':13} {'memory':>8} {'last two':>9} {'time':>8} {'last two':>9}")
    curves = depth_curves(found)
    for name, curve in curves.items():
        if len(curve) > 1:
            (seconds, memory), (last_seconds, last_memory) = depth_exponents(curve), depth_exponents(curve[-2:])
            print(f"{name:14} {memory:8.3f} {last_memory:9.3f} {seconds:8.3f} {last_seconds:9.3f}")
    if curves:
        path = arguments.plot
        path.parent.mkdir(parents=True, exist_ok=True)
        plot_depth(found).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        print(f"saved {path}")


if __name__ == "__main__":
    main()
