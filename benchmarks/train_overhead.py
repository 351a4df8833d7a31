"""What the training loop adds to a step: `interlayer train` against a bare loop of forward, backward and optimiser.

    python benchmarks/train_overhead.py                  # ResNet-50, 256 synthetic images of 224 pixels, bfloat16

Both run the same network eagerly (no compilation, no CUDA graph) on images already on the device. The difference is
everything else: order and augmentation of the images, schedule, sums of loss and accuracy, checks, progress.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from interlayer.training import Trainer, load_recipe

STEPS = 60


def timed(step, steps: int) -> float:
    """Seconds of a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("overrides", nargs="*", help="values of the recipe, key=value")
    arguments = parser.parse_args()
    recipe = load_recipe(
        "mrla_resnet",
        ["epochs=100", "crop=none", "cuda_graph=no", *arguments.overrides],
        model=arguments.model, data="synthetic", tensorboard=False,
        data_options={"images": 2048, "classes": 1000, "test_images": 256},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(recipe, Path(folder) / "run")
        steps = trainer.run()

        def step() -> None:
            while next(steps).what != "training":  # evaluation and checkpoints are not part of a step
                pass

        for _ in range(12):
            step()
        setup = trainer.loop.setup
        images, labels = setup.batches.transform_batch(next(setup.batches.epoch(0)))

        def bare() -> None:
            setup.optimizer.zero_grad(set_to_none=True)
            with setup.autocast():
                logits = setup.network(images)
            F.cross_entropy(logits.float(), labels).backward()
            setup.optimizer.step()

        within_epoch = setup.batches.steps - 1
        rounds = []
        for _ in range(STEPS // within_epoch):
            while next(steps).what != "training":  # enter the next epoch outside of the clock
                pass
            ours = timed(lambda: next(steps), within_epoch - 1)
            next(steps)
            rounds.append((ours, timed(bare, within_epoch - 1)))
        trainer.close()
    ours, plain = (sorted(times)[len(times) // 2] for times in zip(*rounds, strict=True))
    print(f"{torch.cuda.get_device_name()}: {arguments.model}, batch {recipe.batch_size}, {recipe.precision}")
    print(f"bare step {plain * 1e3:.2f} ms, interlayer train {ours * 1e3:.2f} ms: {1 - plain / ours:.2%} outside")


if __name__ == "__main__":
    main()
