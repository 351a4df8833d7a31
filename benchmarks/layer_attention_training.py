"""Trains small networks with layer attention, with kernels and with the reference, and compares their losses.

    python benchmarks/layer_attention_training.py         # on a GPU: 200 steps, three seeds, bfloat16 autocast
    python benchmarks/layer_attention_training.py --device cpu --steps 4 --seeds 0 1 --batch-size 16
    TRITON_INTERPRET=1 python benchmarks/layer_attention_training.py --device cpu --kernels triton --steps 1

The data are scikit-learn's 1,797 handwritten digits, enlarged to 32 pixels. A seed determines the initial weights and
the batches, which are equal for both implementations. The loss is the mean of the last tenth of the steps. The exit
code is 1 if the difference of the losses, paired by seed, exceeds their noise (its 95% interval excludes zero), or if
no kernel was launched. Whether the mean of either implementation lies inside the spread of the other would say little:
with three seeds it does not in half of all comparisons of a network with itself.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from kernel_launches import record_launches
from sklearn.datasets import load_digits
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import interlayer
from interlayer.experiments.statistics import paired_difference


def make_resnet(mechanism: str, reading: str) -> nn.Module:
    network = ResNet(BasicBlock, layers=(2, 2, 2, 2), channels=(16, 32, 64, 128), num_classes=10)
    return interlayer.attach(network, mechanism, reading=reading, channels_per_head=8)


def make_vit(mechanism: str, reading: str) -> nn.Module:
    network = VisionTransformer(img_size=32, patch_size=4, embed_dim=64, depth=6, num_heads=4, num_classes=10)
    return interlayer.attach(network, mechanism, reading=reading, channels_per_head=16)


NETWORKS = {
    "resnet+mrla_light": partial(make_resnet, "mrla_light"),
    "resnet+mrla_base": partial(make_resnet, "mrla_base"),
    "vit+mrla_light": partial(make_vit, "mrla_light"),
    "vit+mrla_base": partial(make_vit, "mrla_base"),
}


def load_images(device: str) -> tuple[Tensor, Tensor]:
    """Returns the digits as images [N, 3, 32, 32] and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=32, mode="bilinear").repeat(1, 3, 1, 1)
    return images.to(device), torch.tensor(digits.target, device=device)


def train(
    make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], backend: str, *, seed: int, steps: int, batch_size: int
) -> float:
    """Trains a network and returns the mean loss of the last tenth of the steps."""
    images, labels = data
    device = images.device.type
    torch.manual_seed(seed)
    network = make().to(device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(images), (batch_size,), generator=generator).to(device)
        batch = images[chosen].contiguous(memory_format=torch.channels_last)
        with interlayer.backend(backend):
            with torch.autocast(device, torch.bfloat16):
                logits = network(batch)
            loss = F.cross_entropy(logits.float(), labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses[-max(1, steps // 10) :]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--reading", choices=("paper", "published"), default="paper")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--kernels", choices=("auto", "triton"), default="auto")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    data = load_images(arguments.device)
    start = time.monotonic()
    launched = record_launches()
    table = []
    good = True
    for name in arguments.networks:
        losses: dict[str, list[float]] = {arguments.kernels: [], "reference": []}
        launched.clear()
        for seed in arguments.seeds:
            for backend, found in losses.items():
                make = partial(NETWORKS[name], arguments.reading)
                steps, batch_size = arguments.steps, arguments.batch_size
                found.append(train(make, data, backend, seed=seed, steps=steps, batch_size=batch_size))
                print(
                    f"{time.monotonic() - start:5.0f} s {name}, seed {seed}, {backend}: loss {found[-1]:.4f}",
                    flush=True,
                )
        print(f"kernels launched: {' '.join(dict.fromkeys(launched)) or 'none'}", flush=True)
        kernels, reference = losses.values()
        means = statistics.fmean(kernels), statistics.fmean(reference)
        difference = paired_difference(reference, kernels)
        good = good and difference.within_noise and bool(launched)
        table.append((name, means, (kernels, reference), difference, bool(launched)))
    print(
        f"\n{'network':18} {'kernels: mean':>13} {'spread':>17}"
        f" {'reference: mean':>15} {'spread':>17} {'difference':>29}"
    )
    for name, means, found_losses, difference, ran in table:
        spreads = [f"{min(values):.4f} - {max(values):.4f}" for values in found_losses]
        verdict = "within the noise" if difference.within_noise else "BEYOND THE NOISE"
        verdict = verdict if ran else "NO KERNEL RAN"
        interval = f"{difference.mean:+.4f}"
        if difference.low is not None and difference.high is not None:
            interval += f" ({difference.low:+.4f} to {difference.high:+.4f})"
        print(f"{name:18} {means[0]:13.4f} {spreads[0]:>17} {means[1]:15.4f} {spreads[1]:>17} {interval:>29} {verdict}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
