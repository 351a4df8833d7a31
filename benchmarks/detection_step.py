"""What a detector costs: a training step and inference of Faster R-CNN, torchvision's own and this library's.

    python benchmarks/detection_step.py               # on a GPU: batch 16, 800 x 1216 pixels, bfloat16, channels_last
    python benchmarks/detection_step.py --batch-size 8 --norms all --models resnet50 resnet50_mrla_light
    python benchmarks/detection_step.py --device cpu --batch-size 1 --size 64 96 --steps 1 --rounds 1

"torchvision" is `fasterrcnn_resnet50_fpn`. All networks start from its weights as far as they have them, so that they
propose the same boxes. Ratios are to the first model after it. The networks are timed in turns, `--rounds` times, and
the median of all steps is printed: forward, backward and SGD with momentum, with a learning rate of zero, so that every
step does the same work. Memory is the peak of a step in addition to weights, gradients and momentum.

Norms: "trained" uses the statistics of the batch and trains the whole backbone; "statistics" uses the running
statistics, trains the weights of the norms and freezes the first stage, as the papers do; "all" freezes the weights of
the norms as well, as torchvision does for pretrained backbones. torchvision's row has its FrozenBatchNorm2d in both.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, fasterrcnn_resnet50_fpn
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

import interlayer
from interlayer.analysis.cost import median_queued_seconds, peak_bytes

NORMS = ("trained", "statistics", "all")
OWN = "torchvision"
CLASSES = 80

Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


def make_batch(count: int, height: int, width: int, boxes: int, device: str) -> Batch:
    """Returns random images and boxes with sides of an eighth to a half of the image."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, height, width, generator=generator).to(device) for _ in range(count)]
    targets = []
    for _ in range(count):
        size = torch.tensor([width, height])
        sides = (0.125 + 0.375 * torch.rand(boxes, 2, generator=generator)) * size
        corners = torch.rand(boxes, 2, generator=generator) * (size - sides)
        labels = torch.randint(1, CLASSES + 1, (boxes,), generator=generator)
        targets.append({"boxes": torch.cat((corners, corners + sides), 1).to(device), "labels": labels.to(device)})
    return images, targets


def shared_weights(batch: Batch, sizes: dict[str, int], device: str) -> dict[str, Tensor]:
    """Returns weights of torchvision's detector, with the statistics of the batch as running statistics."""
    torch.manual_seed(0)
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=CLASSES + 1, **sizes).to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(*batch)
    return model.state_dict()


def make_model(name: str, norms: str, sizes: dict[str, int], weights: dict[str, Tensor]) -> nn.Module:
    """Builds a detector with the given norms from the weights of torchvision's detector."""
    if name == OWN and norms == "trained":
        model: nn.Module = fasterrcnn_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=CLASSES + 1, **sizes
        )
    elif name == OWN:  # what fasterrcnn_resnet50_fpn builds for a pretrained backbone
        backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=3)
        model = FasterRCNN(backbone, CLASSES + 1, **sizes)
    else:
        model = interlayer.detector(
            "faster_rcnn",
            backbone=name,
            num_classes=CLASSES,
            predict_background=True,
            freeze_stages=0 if norms == "trained" else 1,
            frozen_norms="none" if norms == "trained" else norms,  # type: ignore[arg-type]
            **sizes,  # type: ignore[arg-type]
        )
        weights = {key.replace("backbone.body.", "backbone.body.network."): value for key, value in weights.items()}
    model.load_state_dict(weights, strict=False)
    return model


class Row:
    """A detector that is timed in turns with others."""

    def __init__(self, name: str, model: nn.Module, batch: Batch, device: str) -> None:
        self.name, self.batch, self.device = name, batch, device
        self.model = model.to(device).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0, momentum=0.9)
        self.train_seconds: list[float] = []
        self.inference_seconds: list[float] = []
        self.memory = 0

    def train_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16):
            losses = self.model(*self.batch)
        torch.stack([loss.float() for loss in losses.values()]).sum().backward()
        self.optimizer.step()

    def infer(self) -> None:
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16):
            self.model(self.batch[0])

    def measure(self, steps: int) -> None:
        """Times some training steps and forward passes in eval mode."""
        for run, training, seconds in (
            (self.train_step, True, self.train_seconds),
            (self.infer, False, self.inference_seconds),
        ):
            self.model.train(training)
            run()  # warms up, and settles the allocator after the model before
            if training and not self.memory:
                self.memory = peak_bytes(run, self.device)
            seconds.append(_median_seconds(run, steps, self.device))


def _median_seconds(run: Callable[[], None], steps: int, device: str) -> float:
    if device == "cuda":
        return median_queued_seconds(run, steps)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def print_table(norms: str, rows: list[Row]) -> None:
    first = next((row for row in rows if row.name != OWN), rows[0])
    for row in rows:
        columns = ""
        for figures, unit, factor in (
            ("train_seconds", "ms", 1e3),
            ("memory", "GiB", 2**-30),
            ("inference_seconds", "ms", 1e3),
        ):
            value, base = (_median(getattr(x, figures)) for x in (row, first))
            columns += f" {value * factor:8.2f} {unit:3} {value / base:6.3f}"
        print(f"{row.name:28} {norms:10}{columns}", flush=True)


def _median(figures: Any) -> float:
    return statistics.median(figures) if isinstance(figures, list) else figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet50", "resnet50_mrla_light", "resnet50_rla"])
    parser.add_argument("--norms", nargs="+", default=list(NORMS), choices=NORMS)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, nargs=2, default=[800, 1216], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--boxes", type=int, default=12, help="number of boxes in an image")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()

    device, (height, width) = arguments.device, arguments.size
    sizes = {"min_size": min(height, width), "max_size": max(height, width)}
    batch = make_batch(arguments.batch_size, height, width, arguments.boxes, device)
    weights = shared_weights(batch, sizes, device)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    print(
        f"{'Faster R-CNN':28} {'norms':10}" + "".join(f" {x:>12} {'ratio':>6}" for x in ("step", "memory", "inference"))
    )
    for norms in arguments.norms:
        rows = []
        for name in (OWN, *arguments.models):
            model = make_model(name, norms, sizes, weights)
            rows.append(Row(name, model, batch, device))
        for _ in range(arguments.rounds):
            for row in rows:
                row.measure(arguments.steps)
        print_table(norms, rows)
        del rows
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
