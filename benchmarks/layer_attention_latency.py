"""The latency of one image with layer attention: eager and as a CUDA graph.

    python benchmarks/layer_attention_latency.py          # on a GPU: 224 pixels, bfloat16 autocast, median of 50
    python benchmarks/layer_attention_latency.py --device cpu --runs 1 --models resnet50 resnet50_mrla_light

Every image is waited for. Ratios are to the plain backbone of the model, which is measured in the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from interlayer.models.build import build_network, plain_name

MODELS = (
    "resnet50", "resnet50_mrla_light", "resnet50_mrla_base", "resnet50_rla",
    "deit_small_patch16_224", "deit_small_mrla_light", "deit_small_mrla_base",
)  # fmt: skip


def median_seconds(run: Callable[[], object], runs: int, device: str) -> float:
    """Returns the median time of runs that are waited for."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def capture(run: Callable[[], object]) -> Callable[[], object]:
    """Returns a function that replays `run` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def measure(network: nn.Module, image: Tensor, runs: int) -> list[float]:
    """Returns the seconds of one image, eager and, on a GPU, as a CUDA graph."""
    device = image.device.type

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            output: Tensor = network(image)
        return output

    for _ in range(3 if device == "cuda" else 1):
        run()
    found = [median_seconds(run, runs, device)]
    return found if device == "cpu" else [*found, median_seconds(capture(run), runs, device)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    if arguments.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    plain: dict[str, list[float]] = {}
    print(f"{'model':28} {'eager':>11} {'ratio':>6} {'graph':>11} {'ratio':>6}")
    for name in arguments.models:
        network = build_network(name, image_size=arguments.image_size).to(arguments.device)
        network = network.to(memory_format=torch.channels_last).eval()
        image = torch.randn(1, 3, arguments.image_size, arguments.image_size, device=arguments.device)
        found = measure(network, image.contiguous(memory_format=torch.channels_last), arguments.runs)
        if plain_name(name) == name:
            plain[name] = found
        columns = ""
        for seconds, first in zip(found, plain.get(plain_name(name), [float("nan")] * 2), strict=False):
            columns += f" {seconds * 1e3:8.2f} ms {seconds / first:6.2f}"
        print(f"{name:28}{columns}", flush=True)


if __name__ == "__main__":
    main()
