"""Images a second of training on one GPU, augmentation, evaluation, logging and checkpoints included.

    python benchmarks/train_throughput.py                       # one run, then four that share the GPU
    python benchmarks/train_throughput.py --runs 1 -- epochs=5  # any value of the recipe can be changed

A pre-activated ResNet-164 on images of CIFAR-10's size and number (noise: speed does not depend on what they show)
under the recipe of RLA's CIFAR experiments, in bfloat16, the 10,000 test images evaluated every epoch. Timed from when
every run has ended its first epoch, so compilation and graph capture are left out, to when the first run has evaluated
its last.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from interlayer.experiments.turns import in_turns
from interlayer.training import Trainer, load_recipe
from interlayer.training.data import open_data
from interlayer.training.processes import init_processes

DATA = {"images": 50_000, "test_images": 10_000, "classes": 10, "size": 32}


def measure(recipe, runs: int, folder: Path) -> tuple[float, float, float]:
    """Images a second of all runs together, seconds of an epoch, seconds until timing began."""
    processes, data = init_processes(recipe), open_data(recipe)
    trainers = (
        Trainer(
            recipe.replace(seed=seed), folder / f"{runs}_{seed}", data=data, processes=processes,
            separate_random_state=runs > 1,
        )
        for seed in range(runs)
    )  # fmt: skip
    started, begun, images = time.perf_counter(), None, 0
    in_second_epoch, last = set(), {}
    for progress in in_turns(trainers, runs):
        if progress.what == "testing":  # the last epoch has been trained and evaluated
            break
        if progress.what == "training" and progress.epoch >= 1:
            in_second_epoch.add(progress.folder)
            place = progress.epoch * progress.steps + progress.step
            if begun is not None:
                images += (place - last.get(progress.folder, place)) * recipe.batch_size
            last[progress.folder] = place
        if begun is None and len(in_second_epoch) == runs:
            torch.cuda.synchronize()
            begun = time.perf_counter()
    if begun is None:
        raise SystemExit("nothing was timed: the first epoch is left out, give epochs=2 or more")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    rate = images / seconds
    return rate, DATA["images"] * runs / rate, begun - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preresnet164_cifar")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("overrides", nargs="*", help="values of the recipe, key=value")
    arguments = parser.parse_args()
    recipe = load_recipe(
        "rla_cifar",
        ["epochs=3", "precision=bfloat16", "compile=tuned", *arguments.overrides],
        model=arguments.model, data="synthetic", data_options=DATA, validation=0, milestones=[2], tensorboard=False,
    )  # fmt: skip
    setting = f"batch {recipe.batch_size}, {recipe.precision}, compile={recipe.compile}"
    print(f"{torch.cuda.get_device_name()}: {arguments.model}, {setting}")
    print(f"{'runs':>4} {'images/s':>10} {'epoch of all':>13} {'set-up':>8}", flush=True)
    for runs in arguments.runs:
        with tempfile.TemporaryDirectory() as folder:
            rate, epoch, set_up = measure(recipe, runs, Path(folder))
        print(f"{runs:4} {rate:10,.0f} {epoch:11.2f} s {set_up:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
