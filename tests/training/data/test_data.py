"""Data: every source, every kind of bad image, and an order that depends only on seed, epoch and step."""

import dataclasses
import io
import multiprocessing
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from digit_images import save_digits
from PIL import Image

from interlayer.tasks import make_task
from interlayer.training import Stopped, train
from interlayer.training.data import ImageTransform, LoadingContext, Ranks, eval_batches, open_data, train_batches
from interlayer.training.data.resident import ResidentTrainBatches
from interlayer.training.data.workers import LoadedTrainBatches
from interlayer.training.files import TrainingError

CPU = torch.device("cpu")
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def context_of(recipe, data, ranks, size):
    task = make_task(dataclasses.asdict(recipe), data.classes)
    transform = ImageTransform(size, MEAN, STD, "bilinear", 1.0)
    return LoadingContext(recipe, task, transform, ranks, CPU, data.problems)


def batches_of(recipe, ranks=Ranks(), size=8, data=None):  # noqa: B008
    data = data or open_data(recipe)
    return train_batches(data.train, context_of(recipe, data, ranks, size)), data


def evaluated(recipe, ranks=Ranks(), size=8):  # noqa: B008
    data = open_data(recipe)
    return eval_batches(data.test, context_of(recipe, data, ranks, size)), data


# Sources


def test_digits_are_split_the_same_for_every_seed(small):
    first, second = open_data(small(seed=0)), open_data(small(seed=1))
    assert (len(first.train), len(first.test)) == (1437, 360)
    assert np.array_equal(first.test.indices, second.test.indices)
    assert not set(first.train.indices) & set(first.test.indices)


def test_validation_is_held_out_of_training_by_number_or_fraction(small):
    data = open_data(small(validation=100))
    assert (len(data.train), len(data.validation), len(data.test)) == (1337, 100, 360)
    assert len(open_data(small(validation=0.1)).validation) == 144
    names = {data.train.name(i) for i in range(len(data.train))}
    assert not names & {data.validation.name(i) for i in range(100)}
    with pytest.raises(TrainingError, match="leaves a part empty"):
        open_data(small(validation=5000))


def test_folders_give_classes_by_name_and_val_as_the_test(small, digit_files):
    data = open_data(small(data=str(digit_files)))
    assert data.classes == [str(i) for i in range(10)]
    assert (len(data.train), data.validation, len(data.test)) == (120, None, 40)
    assert Path(data.train.name(0)).parent.name == data.classes[data.train.labels[0]]


def test_a_folder_without_parts_holds_a_tenth_out_and_says_so(small, digit_files):
    data = open_data(small(data=str(digit_files / "train")))
    assert (len(data.train), len(data.test)) == (108, 12)
    assert "a tenth" in data.notes[0]


def test_val_and_test_folders_are_validation_and_test(small, tmp_path):
    for part, skip in (("train", 0), ("val", 2), ("test", 4)):
        save_digits(tmp_path / part, 2, skip=skip)
    data = open_data(small(data=str(tmp_path)))
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 20, 20)


def write_cifar(root: Path, fine: bool) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    folder = root / ("cifar-100-python" if fine else "cifar-10-batches-py")
    folder.mkdir()
    key = "fine_labels" if fine else "labels"
    parts = ["train", "test"] if fine else [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in parts:
        with open(folder / name, "wb") as file:
            pickle.dump({"data": pixels, key: [i % 10 for i in range(20)]}, file)
    meta, meta_key, count = ("meta", "fine_label_names", 100) if fine else ("batches.meta", "label_names", 10)
    with open(folder / meta, "wb") as file:
        pickle.dump({meta_key: [f"class{i}" for i in range(count)]}, file)
    return pixels


@pytest.mark.parametrize("fine", [False, True])
def test_cifar_is_read_as_torchvision_reads_it(small, tmp_path, fine):
    pixels = write_cifar(tmp_path, fine)
    data = open_data(small(data=str(tmp_path)))
    assert (len(data.train), len(data.test), len(data.classes)) == (20 if fine else 100, 20, 100 if fine else 10)
    expected = pixels[3].reshape(3, 32, 32).transpose(1, 2, 0)
    assert np.array_equal(np.asarray(data.test.open(3)), expected)


def test_cifar_files_run_no_code(small, tmp_path):
    write_cifar(tmp_path, False)

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    with open(tmp_path / "cifar-10-batches-py" / "test_batch", "wb") as file:
        pickle.dump({"data": Evil()}, file)
    with pytest.raises(TrainingError, match=r"test_batch cannot be read"):
        open_data(small(data=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_hugging_face_datasets_come_through_timms_reader(small, digit_files):
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    options = {"test_split": "validation"}
    data = open_data(small(data=f"hfds/{digit_files}", data_options=options))
    assert (len(data.train), len(data.test), data.classes) == (120, 40, [str(i) for i in range(10)])
    expected = {Path(name).name for name in map(str, digit_files.glob("train/*/*.png"))}
    assert Path(data.train.name(0).split("(")[-1].rstrip(")")).name in expected
    assert data.train.open(0).size == (40, 40)


def write_shards(root: Path, bad: bool = False) -> None:
    """Two WebDataset shards of digits each for train and validation."""
    for part in ("train", "validation"):
        save_digits(root / "png" / part, 4)
        files = sorted((root / "png" / part).glob("*/*.png"))
        for shard in range(2):
            with tarfile.open(root / f"{part}-{shard:04}.tar", "w") as archive:
                for number, file in enumerate(files[shard::2]):
                    broken = bad and part == "train" and shard == 0 and number == 3
                    for suffix, content in (
                        ("png", b"not an image" if broken else file.read_bytes()),
                        ("cls", file.parent.name.encode()),
                    ):
                        info = tarfile.TarInfo(f"{file.parent.name}_{file.stem}.{suffix}")
                        info.size = len(content)
                        archive.addfile(info, io.BytesIO(content))


def stream_recipe(small, root, **changes):
    options = {"train_split": "train-{0000..0001}.tar|40", "test_split": "validation-{0000..0001}.tar|40"}
    return small(data=f"wds/{root}", data_options=options, num_classes=10, batch_size=8, **changes)


def test_webdataset_shards_stream_through_timms_reader(small, tmp_path):
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    write_shards(tmp_path)
    recipe = stream_recipe(small, tmp_path)
    batches, _ = batches_of(recipe)
    seen = [batches.transform_batch(batch) for batch in batches.epoch(0)]
    assert len(seen) == batches.steps == 5
    assert seen[0][0].shape == (8, 3, 8, 8)
    tested, _ = evaluated(recipe)
    labels = torch.cat([labels for _, labels, _ in tested])
    assert sorted(labels.tolist()) == sorted(list(range(10)) * 4)


def test_a_broken_image_in_a_shard_is_named(small, tmp_path):
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    write_shards(tmp_path, bad=True)
    batches, _ = batches_of(stream_recipe(small, tmp_path))
    with pytest.raises(TrainingError, match=r"train-0000\.tar:\d_\d+ cannot be used: it cannot be read as an image"):
        list(batches.epoch(0))
    batches, data = batches_of(stream_recipe(small, tmp_path, on_bad_image="skip"))
    assert len(list(batches.epoch(0))) == 5
    assert len(data.problems.found) == 1


def test_streams_read_in_turn_leave_timms_reader_untouched(small, tmp_path):
    """Each stream collects its own bad images, and timm's module is not modified."""
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    from timm.data.readers import reader_wds

    before = dict(vars(reader_wds))
    roots = [tmp_path / name for name in ("first", "second")]
    for root in roots:
        write_shards(root, bad=True)
    opened = [batches_of(stream_recipe(small, root, on_bad_image="skip")) for root in roots]
    epochs = [batches.epoch(0) for batches, _ in opened]
    for _ in range(opened[0][0].steps):
        for epoch in epochs:
            next(epoch)
    for root, (_, data) in zip(roots, opened, strict=True):
        (name,) = data.problems.found
        assert name.startswith(f"{root}/train-0000.tar:")
    assert {key for key, value in vars(reader_wds).items() if before.get(key) is not value} == set()


def test_streams_show_no_image_twice(small, tmp_path):
    """Otherwise repeated augmentation would be ignored silently."""
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    write_shards(tmp_path)
    with pytest.raises(TrainingError, match="is a stream: set repeated_augmentation=1"):
        batches_of(stream_recipe(small, tmp_path, repeated_augmentation=3))


def test_a_label_outside_the_classes_of_a_stream_is_named(small, tmp_path):
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    write_shards(tmp_path)
    batches, _ = batches_of(stream_recipe(small, tmp_path).replace(num_classes=9))
    with pytest.raises(TrainingError, match="its label 9 is outside 0 to 8"):
        list(batches.epoch(0))


def test_what_is_not_there_is_named(small, tmp_path):
    with pytest.raises(TrainingError, match="no such folder"):
        open_data(small(data=str(tmp_path / "nowhere")))
    with pytest.raises(TrainingError, match="holds no class folders"):
        open_data(small(data=str(tmp_path)))
    with pytest.raises(TrainingError, match=r"is a stream, which does not tell its classes|needs"):
        open_data(small(data="tfds/mnist"))


# Bad images


@pytest.fixture
def bad_folder(tmp_path):
    """An image folder with one file of every unusable kind in train."""
    save_digits(tmp_path / "train", 4)
    save_digits(tmp_path / "val", 2, skip=4)
    (tmp_path / "train" / "3" / "corrupt.png").write_bytes(b"no image at all")
    whole = next((tmp_path / "train" / "4").glob("*.png"))
    (tmp_path / "train" / "4" / "truncated.png").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (tmp_path / "train" / "5" / "notes.txt").write_text("a file that is no image")
    (tmp_path / "train" / "6" / ".DS_Store").write_text("hidden files are nobody's business")
    (tmp_path / "train" / "empty").mkdir()
    return tmp_path


def test_files_that_are_no_images_and_empty_classes_are_named(small, bad_folder):
    with pytest.raises(TrainingError, match=r"2 images cannot be used; the first is .*notes\.txt: it is no image"):
        open_data(small(data=str(bad_folder)))
    data = open_data(small(data=str(bad_folder), on_bad_image="skip"))
    assert {Path(name).name for name in data.problems.found} == {"notes.txt", "empty"}


@pytest.mark.parametrize(("resident", "workers"), [("yes", 0), ("no", 0), ("no", 2)])
def test_corrupt_and_truncated_images_stop_the_run_by_name(small, bad_folder, resident, workers):
    (bad_folder / "train" / "5" / "notes.txt").unlink()
    (bad_folder / "train" / "empty").rmdir()
    recipe = small(data=str(bad_folder), resident=resident, workers=workers, batch_size=42)

    def read(recipe):
        batches, data = batches_of(recipe)
        return [batches.transform_batch(batch) for batch in batches.epoch(0)], data

    with pytest.raises(TrainingError, match=r"(corrupt|truncated)\.png.*cannot be read as an image.*on_bad_image=skip"):
        read(recipe)
    seen, data = read(recipe.replace(on_bad_image="skip", batch_size=40 if resident == "yes" else 42))
    assert {Path(name).name for name in data.problems.found} == {"corrupt.png", "truncated.png"}
    assert sum(len(images) for images, _ in seen) == 40


def test_a_bad_image_of_the_test_set_is_named_too(small, digit_files, tmp_path):
    save_digits(tmp_path / "train", 2)
    save_digits(tmp_path / "val", 2)
    (tmp_path / "val" / "0" / "x.jpg").write_bytes(b"\xff\xd8\xff")
    batches, _ = evaluated(small(data=str(tmp_path), resident="no"))
    with pytest.raises(TrainingError, match=r"x\.jpg"):
        list(batches)


def test_labels_outside_the_classes_are_counted_and_named(small):
    with pytest.raises(TrainingError, match=r"\d+ images cannot be used; the first is digits image \d+: its label"):
        open_data(small(num_classes=8))
    data = open_data(small(num_classes=8, on_bad_image="skip"))
    assert data.train.labels.max() == 7
    assert len(data.problems.found) == 1797 - sum(len(part) for part in (data.train, data.test))


def test_a_class_that_training_does_not_know_is_named(small, tmp_path):
    save_digits(tmp_path / "train", 2)
    save_digits(tmp_path / "val", 2)
    (tmp_path / "val" / "0").rename(tmp_path / "val" / "zero")
    with pytest.raises(TrainingError, match="its class 'zero' is not among the 10 classes"):
        open_data(small(data=str(tmp_path)))


# Batches


def test_an_epoch_shows_every_image_once_in_a_new_order(small):
    batches, _ = batches_of(small(batch_size=1437))
    (first,), (second,) = list(batches.epoch(0)), list(batches.epoch(1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(1437))
    assert first.tolist() != second.tolist()


def test_processes_share_the_batch_of_one_process(small):
    recipe = small(batch_size=64)
    whole, _ = batches_of(recipe)
    halves = [batches_of(recipe, Ranks(rank, 2))[0] for rank in (0, 1)]
    for together, first, second in zip(whole.epoch(3), halves[0].epoch(3), halves[1].epoch(3), strict=True):
        assert torch.equal(together, torch.cat([first, second]))


def test_repeated_augmentation_puts_an_image_into_a_batch_three_times(small):
    batches, _ = batches_of(small(repeated_augmentation=3, batch_size=60))
    first = next(batches.epoch(0))
    assert torch.equal(first.unique(return_counts=True)[1], torch.full((20,), 3))
    shown = torch.cat(list(batches.epoch(0)))
    assert len(shown.unique()) < 1437 / 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_entered_in_its_middle_goes_on_as_if_never_left(small, digit_files, workers):
    """The number of workers and the starting step must not change the augmentation."""
    recipe = small(
        data=str(digit_files), resident="no", crop="resized", auto_augment="rand-m9-mstd0.5", flip=0.5, batch_size=30,
        erasing=0.5, mixup=0.8, workers=0,
    )  # fmt: skip
    batches, _ = batches_of(recipe, size=24)
    assert isinstance(batches, LoadedTrainBatches)

    def collect(batches, start):
        seen = []
        for step, batch in enumerate(batches.epoch(1, start), start):
            batches.seed(1, step)
            seen.append(batches.transform_batch(batch))
        batches.close()
        return seen

    whole = collect(batches, 0)
    late = collect(batches_of(recipe.replace(workers=workers), size=24)[0], 2)
    assert len(whole) == 4
    for (images, targets), (again, again_targets) in zip(whole[2:], late, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(targets, again_targets)
    assert not torch.equal(whole[0][0], whole[1][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_go_on_with_the_next_epoch(small, digit_files, workers):
    """They are started once, and the batches are those of an epoch that is entered by itself."""
    files = {"data": str(digit_files), "resident": "no", "crop": "resized", "flip": 0.5, "batch_size": 24, "epochs": 3}
    recipe = small(workers=workers, **files)
    others = set(multiprocessing.active_children())
    batches, alone = batches_of(recipe)[0], batches_of(recipe.replace(workers=0))[0]
    assert batches.steps == 5
    processes = set()

    def check(epoch, start=0):
        wanted = alone.epoch(epoch, start)
        loaded = batches.epoch(epoch, start)
        for _ in range(start, batches.steps):  # as the trainer, which does not ask for one more
            assert all(torch.equal(x, y) for x, y in zip(next(loaded), next(wanted), strict=True))
        processes.update(set(multiprocessing.active_children()) - others)
        loaded.close()

    check(0)
    check(1)
    assert len(processes) == workers
    check(1, start=2)
    check(2)
    assert len(processes) == 2 * workers, "an epoch that does not follow begins anew"
    assert next(batches._loading, None) is None, "nothing after the last epoch of the recipe is loaded"
    check(3)
    batches.close()
    assert set(multiprocessing.active_children()) <= others
    check(0)
    batches.close()


def test_batches_that_nobody_closes_end_their_workers(small, digit_files):
    others = set(multiprocessing.active_children())
    files = {"data": str(digit_files), "resident": "no", "crop": "resized", "batch_size": 24}
    batches, _ = batches_of(small(workers=1, **files))
    next(batches.epoch(0))
    assert len(set(multiprocessing.active_children()) - others) == 1
    del batches
    assert set(multiprocessing.active_children()) <= others


def test_a_run_ends_its_workers(small, digit_files, tmp_path):
    files = {"data": str(digit_files), "resident": "no", "crop": "resized", "batch_size": 24}
    others = set(multiprocessing.active_children())
    train(small(epochs=2, workers=1, **files), tmp_path / "whole")
    assert set(multiprocessing.active_children()) <= others
    with pytest.raises(Stopped):
        train(small(epochs=3, workers=1, **files), tmp_path / "cut", stop=lambda: True)
    assert set(multiprocessing.active_children()) <= others


def test_loading_leaves_the_random_numbers_of_the_model_alone(small, digit_files):
    recipe = small(data=str(digit_files), resident="no", crop="resized", batch_size=60, workers=0)
    batches, _ = batches_of(recipe)
    before = torch.get_rng_state()
    list(batches.epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_names_of_a_batch_are_those_of_its_images(small, digit_files):
    for resident in ("yes", "no"):
        batches, data = batches_of(small(data=str(digit_files), resident=resident, batch_size=40))
        labels = [data.classes[i] for i in list(batches.epoch(2))[1][1].tolist()] if resident == "no" else [
            data.classes[int(batches.images.targets[i])] for i in list(batches.epoch(2))[1]
        ]  # fmt: skip
        assert [Path(name).parent.name for name in batches.names(2, 1)] == labels


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("resident", ["auto", "no"])
def test_evaluation_counts_every_image_once_over_all_processes(small, digit_files, processes, resident):
    recipe = small(data=str(digit_files), resident=resident, eval_batch_size=7)
    places, steps = [], set()
    for rank in range(processes):
        batches, _ = evaluated(recipe, Ranks(rank, processes))
        parts = [places for _, _, places in batches]
        steps.add(len(parts))
        places += [p for part in parts for p in part.tolist() if p >= 0]
    assert sorted(places) == list(range(40))
    assert len(steps) == 1, "processes must take the same number of steps, or they would wait for each other"


def test_a_bad_test_image_leaves_the_places_of_the_others(small, tmp_path):
    """Places are indices into the source, because the report uses them to open images."""
    save_digits(tmp_path / "train", 2)
    save_digits(tmp_path / "val", 2)
    (tmp_path / "val" / "0" / "0bad.png").write_bytes(b"x")
    for resident in ("auto", "no"):
        batches, data = evaluated(small(data=str(tmp_path), resident=resident, on_bad_image="skip", eval_batch_size=6))
        for _, labels, places in batches:
            for label, place in zip(labels.tolist(), places.tolist(), strict=True):
                assert place < 0 or data.test.labels[place] == label
        assert len(data.problems.found) == 1


def test_images_outside_class_folders_and_unknown_options_are_named(small, tmp_path):
    save_digits(tmp_path / "train", 2)
    save_digits(tmp_path / "val", 2)
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "loose.png")
    with pytest.raises(TrainingError, match=r"loose\.png cannot be used: it lies outside the class folders"):
        open_data(small(data=str(tmp_path)))
    with pytest.raises(TrainingError, match="synthetic data has no option 'image'"):
        open_data(small(data="synthetic", data_options={"image": 3}))


def test_runs_that_share_a_source_share_its_copy_on_the_device(small):
    recipe = small()
    data = open_data(recipe)
    first, second = (batches_of(recipe.replace(seed=seed), data=data)[0] for seed in (0, 1))
    assert first.images is second.images
    assert batches_of(recipe, size=16, data=data)[0].images is not first.images


def test_small_sets_are_resident_and_others_are_loaded(small, digit_files):
    assert isinstance(batches_of(small())[0], ResidentTrainBatches)
    assert isinstance(batches_of(small(auto_augment="rand-m5"))[0], LoadedTrainBatches)
    assert isinstance(batches_of(small(crop="resized"))[0], LoadedTrainBatches)
    with pytest.raises(TrainingError, match="resident=yes: the images cannot be kept on the device, crop: resized"):
        batches_of(small(crop="resized", resident="yes"))


def test_resident_yes_keeps_larger_sets_while_memory_lasts(small, monkeypatch):
    """A set above the automatic limit could not be kept on a device that has room for it, or would fill it up."""
    monkeypatch.setattr("interlayer.training.data.batches.RESIDENT_BYTES", 1000)
    assert isinstance(batches_of(small())[0], LoadedTrainBatches)
    assert isinstance(batches_of(small(resident="yes"))[0], ResidentTrainBatches)
    monkeypatch.setattr("interlayer.training.data.batches._free_bytes", lambda device: 2000)
    with pytest.raises(TrainingError, match=r"they take .* GiB, and at most .* GiB are used"):
        batches_of(small(resident="yes"))


def test_a_batch_that_cannot_be_cut_is_refused(small):
    with pytest.raises(TrainingError, match="batch_size=2000 is more than the 1437 training images"):
        batches_of(small(batch_size=2000))
    with pytest.raises(TrainingError, match="cannot be cut into 2 processes"):
        batches_of(small(batch_size=63), Ranks(0, 2))


def test_images_of_any_size_are_prepared(small, tmp_path):
    for part in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / part / label).mkdir(parents=True)
            for index, (height, width) in enumerate([(9, 40), (40, 9), (31, 33)]):
                image = Image.new("RGB" if index else "L", (width, height), 128)
                image.save(tmp_path / part / label / f"{index}.{('jpg', 'png', 'webp')[index]}")
    for changes in ({}, {"resident": "no"}, {"crop": "resized"}, {"crop": "none", "resident": "no"}):
        batches, _ = batches_of(small(data=str(tmp_path), batch_size=6, **changes), size=16)
        images, _ = batches.transform_batch(next(batches.epoch(0)))
        assert images.shape == (6, 3, 16, 16)
