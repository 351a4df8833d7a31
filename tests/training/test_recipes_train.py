"""Every recipe trains, and every value that it sets has an effect, which is checked for each field.

Each recipe runs for two steps on a few images with a small network of its kind. Only the image size, the batch size,
the epochs and the data are changed.
"""

import dataclasses

import pytest
import timm
import torch
from recipe_networks import build_network
from timm.data import RandomResizedCropAndInterpolation
from timm.data.auto_augment import AutoAugment, RandAugment
from torch import nn
from torchvision import transforms

from interlayer.hosts import attached_blocks, attached_mechanisms
from interlayer.models import save_weights
from interlayer.models.checkpoints import read_checkpoint
from interlayer.tasks import task_class
from interlayer.training import Trainer, load_recipe
from interlayer.training.data import BatchTransform
from interlayer.training.data.resident import ResidentTrainBatches
from interlayer.training.data.workers import LoadedTrainBatches
from interlayer.training.optimization import make_scheduler
from interlayer.training.recipe import Recipe, list_recipes
from interlayer.training.step import TrainStep
from interlayer.training.trainer import TrainingLoop

NETWORKS = {  # a small network of the kind that the recipe is meant for
    "mrla_deit": ("vit_tiny_patch16_224+mrla_light", {"depth": 3, "embed_dim": 48, "num_heads": 3}),
    "cb_deit": ("vit_tiny_patch16_224", {"depth": 2, "embed_dim": 48, "num_heads": 3}),
    "mrla_efficientnet": ("mobilenetv3_small_050", {}),
    "rla_mobilenetv2": ("mobilenetv2_035", {}),
    "rla_cifar": ("preresnet20_cifar", {"blocks": 1}),
    "finetune": ("resnet10t+mrla_light", {}),
    "digits": ("preresnet20_cifar+mrla_light", {"blocks": 2}),
    "digits_vit": ("test_vit+mrla_light", load_recipe("digits_vit").model_options),
}
SIZE, BATCH = 32, 12


def shrunk(name, digit_files, folder) -> Recipe:
    recipe = load_recipe(name)
    model, options = NETWORKS.get(name, ("resnet10t", {}))
    if recipe.pretrained:  # nothing can be downloaded here
        save_weights(timm.create_model(model.split("+")[0]), folder / "pretrained.safetensors")
        recipe = recipe.replace(weights=str(folder / "pretrained.safetensors"))
    # a batch size of 12 instead of the recipe's; lr is scaled if the recipe has lr_batch_size
    return recipe.replace(
        model=model, model_options=options, data=str(digit_files), image_size=SIZE, batch_size=BATCH, workers=0,
        tensorboard=False, device="cpu", validation=24 if recipe.validation else 0,
    )  # fmt: skip


def two_steps(recipe, folder) -> TrainingLoop:
    trainer = Trainer(recipe, folder)
    steps = trainer.run()
    while (progress := next(steps)).step < 2 or progress.what != "training":
        pass
    trainer.close()
    return trainer.loop


def transform_of(loop, kind):
    """Returns the first transform of this type among those that workers apply."""
    applied = loop.setup.batches.loader.dataset.transform.transforms
    nested = [inner for t in applied if isinstance(t, transforms.Compose) for inner in t.transforms]
    return next((t for t in [*applied, *nested] if isinstance(t, kind)), None)


def lr_at(recipe, epoch):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=recipe.scaled_lr)
    scheduler = make_scheduler(recipe, optimizer, 10)
    if scheduler is not None:
        scheduler.step(int(epoch))
        scheduler.step_update(int(epoch * 10))
    return optimizer.param_groups[0]["lr"]


def lr_changes(field, epochs, without):
    """Checks that the learning rate at one of these epochs changes without the field."""

    def check(loop, recipe):
        changed = recipe.replace(**{field: without})
        assert any(lr_at(recipe, epoch) != lr_at(changed, epoch) for epoch in epochs(recipe)), field

    return check


def check_auto_augment(loop, recipe):
    if recipe.auto_augment.startswith("rand"):
        (found,) = [transform_of(loop, RandAugment)]
        wanted = float(recipe.auto_augment.split("-m")[1].split("-")[0])
        assert found.ops[0].magnitude == wanted
        assert (found.ops[0].magnitude_max or 10) >= wanted, "timm would clip the magnitude"
    else:
        assert transform_of(loop, AutoAugment) is not None


def check_mixing(loop, recipe):
    images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 3])
    images[:2] = 200
    generator = torch.Generator().manual_seed(0)
    results = [loop.setup.batches.batch_transform(images, labels, generator) for _ in range(20)]
    assert all(targets.shape == (4, 10) for _, targets in results)
    assert len({float(targets[0, 0]) for _, targets in results}) > 10


def centred_transform(loop, recipe):
    """Returns the recipe's batch transform, with a mean and standard deviation of 0.5."""
    return BatchTransform.of(recipe, loop.setup.batches.batch_transform.task, [0.5] * 3, [0.5] * 3, torch.device("cpu"))


def check_erasing(loop, recipe):
    transform = centred_transform(loop, recipe.replace(mixup=0, cutmix=0))
    images = torch.full((40, 3, 16, 16), 255, dtype=torch.uint8)
    out, _ = transform(images, torch.zeros(40, dtype=torch.long), torch.Generator().manual_seed(0))
    touched = (out != 1).any(dim=(1, 2, 3)).float().mean()
    assert 0 < touched < 0.6
    assert (out[out != 1].unique().numel() > 1) == (recipe.erasing_mode == "pixel")


def check_label_smoothing(loop, recipe):
    if recipe.mixes:
        images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
        _, targets = loop.setup.batches.batch_transform(images, torch.tensor([0, 0]), torch.Generator())
        assert targets.min() == pytest.approx(recipe.label_smoothing / 10)
    else:
        batch = next(loop.setup.batches.epoch(0))
        certain = nn.functional.one_hot(batch[1], 10) * 30.0 + torch.zeros((), requires_grad=True)
        step = TrainStep(dataclasses.replace(loop.setup, model=lambda images: certain))
        step.forward_backward(batch)
        loss, _, count, _ = step.sums.values.tolist()
        assert loss / count == pytest.approx(30 * 0.9 * recipe.label_smoothing, rel=1e-3), "certainty is punished"


def check_decay_groups(loop, recipe):
    decayed = {id(p) for g in loop.setup.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    norms = [
        p for m in loop.setup.network.modules() if isinstance(m, (nn.BatchNorm2d, nn.LayerNorm)) for p in m.parameters()
    ]
    assert norms
    assert not any(id(p) in decayed for p in norms)


def check_channels_last(loop, recipe):
    images, _ = loop.setup.batches.transform_batch(next(loop.setup.batches.epoch(0)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    weight = next(p for p in loop.setup.network.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last)


def check_precision(loop, recipe):
    seen = []
    handle = loop.setup.network.get_classifier().register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    loop.step.forward_backward(next(loop.setup.batches.epoch(0)))
    handle.remove()
    assert seen == [{"tf32": torch.float32}.get(recipe.precision) or getattr(torch, recipe.precision)]
    assert torch.backends.cudnn.allow_tf32 == (recipe.precision == "tf32")


def drop_paths(network):
    return [m.drop_prob for m in network.modules() if isinstance(m, timm.layers.DropPath)]


def check_central_crop(loop, recipe):
    """Checks the ratio of the center crop to the resized image in evaluation."""
    cropped, *_ = loop.setup.loading.transform.evaluation().transforms
    assert cropped.size == int(SIZE / recipe.crop_pct)


def check_pretrained(loop, recipe):
    saved, own = read_checkpoint(recipe.weights)[0], build_network(recipe, 10).state_dict()
    assert torch.equal(own["conv1.0.weight"], saved["conv1.0.weight"])


def check_new_rate(loop, recipe):
    group = next(
        g for g in loop.setup.optimizer.param_groups if any(p is loop.setup.network.fc.weight for p in g["params"])
    )
    assert group["lr_scale"] == recipe.new_lr_scale


def check_clipping(loop, recipe):
    for parameter in loop.setup.network.parameters():
        parameter.data.mul_(1e3)  # gradients far above the maximum
    loop.step.run(next(loop.setup.batches.epoch(0)))
    gradients = [p.grad for p in loop.setup.network.parameters() if p.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients) <= recipe.clip_grad * 1.001


def check_zero_head(loop, recipe):
    assert not any(p.any() for p in build_network(recipe, 10).get_classifier().parameters())


def white_batch(loop, recipe):
    """Returns a batch of white images, cropped and flipped by the recipe: [B, 3, H, W], 1 if white, -1 if padded."""
    batches = ResidentTrainBatches(loop.setup.batches.images, dataclasses.replace(loop.setup.loading, recipe=recipe))
    batches.images.pixels.fill_(255)
    batches.images.pixels[..., : SIZE // 2] = 128  # the left half is gray
    batches.seed(0, 0)
    batches.batch_transform = centred_transform(loop, recipe.replace(mixup=0, cutmix=0, erasing=0))
    return batches.transform_batch(torch.arange(100))[0]


def check_crop(loop, recipe):
    assert isinstance(loop.setup.batches, ResidentTrainBatches if recipe.crop == "padded" else LoadedTrainBatches)
    if recipe.crop == "scaled":
        sides = [resize.size for resize in transform_of(loop, transforms.RandomChoice).transforms]
        assert (sides[0], sides[-1], len(sides)) == (256, 480, 225)
        assert transform_of(loop, transforms.RandomCrop).size == (SIZE, SIZE)


def check_padding(loop, recipe):
    images = white_batch(loop, recipe)
    padded_rows = (images[:, 0, :, SIZE // 2] == -1).sum(1)
    assert padded_rows.max() == recipe.padding
    assert len(padded_rows.unique()) == recipe.padding + 1


def check_no_flip(loop, recipe):
    assert recipe.flip == 0
    images = white_batch(loop, recipe.replace(crop="none"))
    assert (images[:, 0, 0, 0] < 0.5).all(), "the grey half stays on the left"


def check_attach_options(loop, recipe):
    network, options = loop.setup.network, dict(recipe.attach_options)
    heads = options.pop("channels_per_head", None)
    assert heads in (None, *(m.channels // m.heads for m in attached_mechanisms(network).values()))
    lengths = {
        entry.place.stage: entry.place.length for _, b in attached_blocks(network) for entry in b.interlayer_entries
    }
    assert options.pop("stages", list(lengths.values())) == list(lengths.values())
    assert not options, "an option without a check"


def check_model_options(loop, recipe):
    """They are those of the small ViT on digits."""
    network, options = loop.setup.network, dict(recipe.model_options)
    assert network.patch_embed.patch_size == (options.pop("patch_size"),) * 2
    assert network.embed_dim == options.pop("embed_dim")
    assert (network.cls_token is not None) == options.pop("class_token")
    assert network.global_pool == options.pop("global_pool")
    assert not options, "an option without a check"


CHECKS = {
    "model": lambda t, r: bool(attached_mechanisms(build_network(load_recipe("digits"), 10))),
    "model_options": check_model_options,
    "attach_options": check_attach_options,
    "image_size": lambda t, r: (
        t.setup.batches.transform_batch(next(t.setup.batches.epoch(0)))[0].shape[-2:] == (SIZE, SIZE)
    ),
    "batch_size": lambda t, r: t.setup.batches.images_per_rank == BATCH,
    "epochs": lambda t, r: t._progress("training", 0, 1).epochs == r.epochs,
    "mean": lambda t, r: torch.allclose(t.setup.batches.batch_transform.mean.flatten(), torch.tensor(r.mean) * 255),
    "std": lambda t, r: torch.allclose(t.setup.batches.batch_transform.std.flatten(), torch.tensor(r.std) * 255),
    "interpolation": lambda t, r: t.setup.loading.transform.interpolation == r.interpolation,
    "crop_pct": check_central_crop,
    "validation": lambda t, r: t.setup.held_out.count == 24 and len(t.setup.data.test) == 40,
    "crop": check_crop,
    "padding": check_padding,
    "flip": check_no_flip,
    "auto_augment": check_auto_augment,
    "erasing": check_erasing,
    "mixup": check_mixing,
    "cutmix": check_mixing,
    "repeated_augmentation": lambda t, r: (
        len(dict.fromkeys(t.setup.batches.names(0, 0))) == BATCH // r.repeated_augmentation
    ),
    "label_smoothing": check_label_smoothing,
    "drop_rate": lambda t, r: getattr(t.setup.network, "drop_rate", None) == r.drop_rate,
    "drop_path_rate": lambda t, r: max(drop_paths(t.setup.network)) == pytest.approx(r.drop_path_rate, rel=0.35),
    "batch_norm_momentum": lambda t, r: (
        {m.momentum for m in t.setup.network.modules() if isinstance(m, nn.BatchNorm2d)} == {r.batch_norm_momentum}
    ),
    "optimizer": lambda t, r: (
        type(t.setup.optimizer)
        .__name__.lower()
        .startswith({"sgd": "sgd", "momentum": "sgd", "adamw": "adamw", "rmsproptf": "rmsproptf"}[r.optimizer])
        and (r.optimizer not in ("sgd", "momentum") or t.setup.optimizer.defaults["nesterov"] == (r.optimizer == "sgd"))
    ),
    "optimizer_options": lambda t, r: all(
        t.setup.optimizer.defaults[k] == (tuple(v) if isinstance(v, list) else v)
        for k, v in r.optimizer_options.items()
    ),
    "lr": lambda t, r: t.setup.optimizer.defaults["lr"] == pytest.approx(r.scaled_lr),
    "lr_batch_size": lambda t, r: r.scaled_lr == pytest.approx(r.lr * BATCH / r.lr_batch_size),
    "weight_decay": lambda t, r: r.weight_decay in {g["weight_decay"] for g in t.setup.optimizer.param_groups},
    "decay_norms_and_biases": check_decay_groups,
    "schedule": lambda t, r: len({lr_at(r, e) for e in range(0, r.epochs, max(1, r.epochs // 8))}) > 1,
    "schedule_on": lambda t, r: lr_at(r, 0.3) != lr_at(r, 0.0),
    "decay_epochs": lr_changes("decay_epochs", lambda r: (r.decay_epochs, 3 * r.decay_epochs + 1), 1000.0),
    "decay_rate": lr_changes("decay_rate", lambda r: (r.epochs - 1,), 0.5),
    "milestones": lr_changes("milestones", lambda r: (r.milestones[0] - 1, r.milestones[0]), [1]),
    "warmup_epochs": lr_changes("warmup_epochs", lambda r: (0,), 0.0),
    "warmup_lr": lr_changes("warmup_lr", lambda r: (0,), 0.0),
    "min_lr": lr_changes("min_lr", lambda r: (r.epochs,), 0.0),
    "channels_last": check_channels_last,
    "precision": check_precision,
    "zero_head": check_zero_head,
    "pretrained": check_pretrained,
    "new_lr_scale": check_new_rate,
    "crop_scale": lambda t, r: transform_of(t, RandomResizedCropAndInterpolation).scale == tuple(r.crop_scale),
    "clip_grad": check_clipping,
}


LABELED = [  # those of detection and segmentation: test_dense_recipes.py
    name for name in list_recipes() if task_class(load_recipe(name).task).annotations == "labels"
]


@pytest.mark.parametrize("name", LABELED)
def test_a_recipe_trains_and_every_value_has_its_effect(name, digit_files, tmp_path):
    recipe = shrunk(name, digit_files, tmp_path)
    loop = two_steps(recipe, tmp_path / "run")
    assert all(torch.isfinite(p).all() for p in loop.setup.network.parameters())
    defaults = dataclasses.asdict(Recipe())
    written = dataclasses.asdict(load_recipe(name))
    changed = [key for key, value in written.items() if value != defaults[key]]
    assert [key for key in changed if key not in CHECKS] == [], "a field without a check"
    for key in changed:
        result = CHECKS[key](loop, recipe)
        assert result is None or result, key
