"""What every test shares: threads, a fixed seed, and where to find files that are not part of the project."""

import os
from pathlib import Path

import pytest
import torch
from digit_images import SMALL, save_digits

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined: they run on the CPU where asked for
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # two workers share two cores
torch.set_num_threads(THREADS)
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of processes that tests start: other threads, other last bits


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    if "torch._dynamo" in __import__("sys").modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def reference_folder() -> Path:
    """Names, shapes and logits of the published models; INTERLAYER_REFERENCE can name another folder of them."""
    return Path(os.environ.get("INTERLAYER_REFERENCE") or Path(__file__).parent / "reference")


@pytest.fixture
def small():
    """A function that makes a small recipe with some values changed."""
    from interlayer.training.recipe import from_values

    def make(**changes):
        return from_values({**SMALL, **changes})

    return make


@pytest.fixture(scope="session")
def digit_files(tmp_path_factory) -> Path:
    """An image folder: train with 12 images a class, val with 4."""
    root = tmp_path_factory.mktemp("digits")
    save_digits(root / "train", 12)
    save_digits(root / "val", 4, skip=12)
    return root


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory) -> Path:
    """The folder of a run on the digits: a small network with MRLA-light."""
    from interlayer.training import train
    from interlayer.training.recipe import from_values

    folder = tmp_path_factory.mktemp("finished") / "run"
    train(from_values({**SMALL, "epochs": 1, "model": "preresnet20_cifar+mrla_light:channels_per_head=8"}), folder)
    return folder
