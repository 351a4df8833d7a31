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
from matplotlib.figure import Figure
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

import interlayer
from interlayer.analysis import Setting, measure

MECHANISMS = ("plain", "mrla_light", "mrla_base")
LABELS = {"plain": "plain", "mrla_light": "+ MRLA-light", "mrla_base": "+ MRLA-base"}
Figures = dict[str, list[tuple[int, float, float]]]  # blocks, seconds and bytes of a step, by mechanism


def make_network(blocks: int, mechanism: str, channels: int, reading: str) -> nn.Module:
    """Returns a ResNet with one stage, for images four times as large as its maps."""
    network = ResNet(Bottleneck, layers=(blocks,), channels=(channels // 4,), num_classes=10)
    network.layer2 = network.layer3 = network.layer4 = nn.Identity()  # which timm's forward pass expects
    if mechanism != "plain":
        interlayer.attach(network, mechanism, reading=reading)
    return network


def slope(points: list[tuple[int, float]]) -> float:
    """Returns the slope of the least-squares line through the logarithms."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


def plot(figures: Figures, path: Path) -> None:
    """Saves memory and time per block as a function of the number of blocks."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    for mechanism, rows in figures.items():
        depths = [row[0] for row in rows]
        memory.plot(depths, [row[2] / 2**30 for row in rows], "o-", label=LABELS[mechanism])
        seconds.plot(depths, [row[1] / row[0] * 1e3 for row in rows], "o-", label=LABELS[mechanism])
    for axes, label in ((memory, "activations of a step [GiB]"), (seconds, "time of a step per block [ms]")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.set_xlabel("blocks of the stage, T")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    memory.set_yscale("log", base=2)
    seconds.set_ylim(bottom=0)
    memory.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(f"saved {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))
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
    start = time.monotonic()
    figures: Figures = {}
    print(f"{'':13} {'T':>3} {'step':>11} {'per block':>11} {'memory':>12} {'ratios to plain':>16}")
    for blocks in arguments.depths:
        for mechanism in arguments.mechanisms:
            if time.monotonic() - start > 60 * arguments.minutes:
                continue
            network = make_network(blocks, mechanism, arguments.channels, arguments.reading)
            try:
                cost = measure(network, setting)
            except torch.OutOfMemoryError:
                print(f"{LABELS[mechanism]:13} {blocks:3} does not fit", flush=True)
                continue
            finally:
                if arguments.device == "cuda":
                    torch.cuda.empty_cache()
            # Weights and momentum. At the peak, when the backward pass starts, there are no gradients of weights.
            memory = cost.memory - 2 * sum(p.numel() * p.element_size() for p in network.parameters())
            rows = figures.setdefault(mechanism, [])
            rows.append((blocks, cost.train_seconds, memory))
            ratios = ""
            if "plain" in figures and figures["plain"][-1][0] == blocks:
                _, seconds, plain_memory = figures["plain"][-1]
                ratios = f"{cost.train_seconds / seconds:8.3f} {memory / plain_memory:7.3f}"
            print(
                f"{LABELS[mechanism]:13} {blocks:3} {cost.train_seconds * 1e3:8.2f} ms"
                f" {cost.train_seconds / blocks * 1e3:8.3f} ms {memory / 2**20:8.1f} MiB {ratios:>16}",
                flush=True,
            )
    print(f"\n{'exponents in T':13} {'memory':>8} {'last two':>9} {'time':>8} {'last two':>9}")
    for mechanism, rows in figures.items():
        if len(rows) > 1:
            memories, times = [(row[0], row[2]) for row in rows], [(row[0], row[1]) for row in rows]
            found = (slope(memories), slope(memories[-2:]), slope(times), slope(times[-2:]))
            print(f"{LABELS[mechanism]:14} {found[0]:8.3f} {found[1]:9.3f} {found[2]:8.3f} {found[3]:9.3f}")
    if figures:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
