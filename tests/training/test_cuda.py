"""Training on a GPU: captured steps, scaled gradients and runs that share the GPU."""

import pytest
import torch
from test_trainer import metrics, stop_after, weights

from interlayer.experiments import compare
from interlayer.models import save_weights
from interlayer.models.build import build_network
from interlayer.training import Stopped, TrainingError, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.fixture
def on_gpu(small):
    def make(**changes):
        return small(**{"device": "cuda", "batch_size": 64, "channels_last": True, **changes})

    return make


def losses(folder):
    return [float(row["train_loss"]) for row in metrics(folder)]


def test_a_captured_step_trains_as_a_plain_one(on_gpu, tmp_path):
    """In float32 with all augmentations, the graph draws the same random numbers as the eager step."""
    recipe = on_gpu(erasing=0.3, mixup=0.4, cutmix=1.0, padding=1, flip=0.5, epochs=2, lr=0.02, clip_grad=5.0, ema=0.9)
    train(recipe.replace(cuda_graph="yes"), tmp_path / "graph")
    train(recipe.replace(cuda_graph="no"), tmp_path / "plain")
    assert losses(tmp_path / "graph") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)


def test_a_captured_step_learns_in_bfloat16_with_dropout(on_gpu, tmp_path):
    summary = train(on_gpu(precision="bfloat16", cuda_graph="yes", epochs=8, drop_rate=0.1, lr=0.1), tmp_path / "run")
    assert summary["test"]["accuracy"] > 0.8


def test_a_captured_run_resumes(on_gpu, tmp_path):
    recipe = on_gpu(cuda_graph="yes", epochs=3, lr=0.02)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", stop=stop_after(30))
    train(recipe, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=2e-2)


def test_float16_scales_its_gradients(on_gpu, tmp_path):
    summary = train(on_gpu(precision="float16", epochs=8, lr=0.1, clip_grad=1.0), tmp_path / "run")
    assert summary["test"]["accuracy"] > 0.8


def test_a_loss_that_is_not_finite_is_noticed_in_a_graph(on_gpu, tmp_path):
    with pytest.raises(TrainingError, match=r"not finite at epoch \d"):
        train(on_gpu(cuda_graph="yes", lr=1e30, schedule="constant", epochs=3), tmp_path / "run")


def test_runs_that_share_the_gpu_learn_as_alone(on_gpu, tmp_path):
    recipe = on_gpu(attach_options={"channels_per_head": 8}, epochs=6, lr=0.1, precision="bfloat16")
    models = ["preresnet20_cifar", "preresnet20_cifar+mrla_light"]
    together = compare(recipe, models, tmp_path / "together", seeds=[0, 1, 2], together=3)
    alone = compare(recipe, models, tmp_path / "alone", seeds=[0, 1, 2], together=1)
    for ours, theirs in zip(together.results, alone.results, strict=True):
        assert ours.mean == pytest.approx(theirs.mean, abs=0.05)
        for folder in ours.folders:
            assert all(torch.isfinite(tensor.float()).all() for tensor in weights(folder).values())


def test_loaded_images_are_not_captured(on_gpu, digit_files, tmp_path):
    recipe = on_gpu(data=str(digit_files), crop="resized", batch_size=24, cuda_graph="yes")
    with pytest.raises(TrainingError, match="the images are not resident"):
        train(recipe, tmp_path / "run")
    train(recipe.replace(cuda_graph="auto", workers=2), tmp_path / "run2")


def test_a_captured_step_is_captured_again_when_the_backbone_unfreezes(on_gpu, tmp_path):
    """Frozen tensors keep their bits, and the graph of the free epoch trains all parameters as eager steps do."""
    plain = on_gpu(epochs=2, lr=0.02, ema=0.9)
    start = build_network(plain.model, num_classes=5, model_options=plain.model_options)
    save_weights(start, tmp_path / "start.safetensors")
    recipe = plain.replace(weights=str(tmp_path / "start.safetensors"), freeze_epochs=1, new_lr_scale=5)
    for graph in ("yes", "no"):
        train(recipe.replace(cuda_graph=graph), tmp_path / graph)
    assert losses(tmp_path / "yes") == pytest.approx(losses(tmp_path / "no"), rel=2e-3)
    train(recipe.replace(cuda_graph="yes", freeze_epochs=0, freeze_backbone=True), tmp_path / "frozen")
    frozen, trained, name = weights(tmp_path / "frozen"), weights(tmp_path / "yes"), "stem.0.weight"
    statistics = [key for key in frozen if key.endswith("running_mean")]
    assert all(torch.equal(frozen[key], start.state_dict()[key]) for key in [name, *statistics])
    assert not any(torch.equal(trained[key], start.state_dict()[key]) for key in [name, *statistics])
