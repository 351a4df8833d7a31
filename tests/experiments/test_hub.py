"""Networks in the format of the Hugging Face Hub: written to a folder, loaded by name, uploaded through the client."""

import json
import os
import re
import subprocess
import sys

import huggingface_hub
import pytest
import safetensors.torch
import timm
import torch
from huggingface_hub import CommitInfo, HfApi, RepoUrl

import interlayer
from interlayer.experiments import TrainedNetwork, load_network
from interlayer.models.build import ModelError, build_network, plain_name, split_name
from interlayer.models.hub import read_stored
from interlayer.training import train

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}


def logits(network, images=IMAGES):
    with torch.no_grad():
        return network.eval()(images)


def store(tmp_path, name, *overrides, model_options=None, **changes):
    """Stores a network with random weights that stand for trained ones; returns it and its folder."""
    network = build_network(name, model_options=model_options, **changes)
    interlayer.save_weights(network, tmp_path / "trained.safetensors")
    given = [f"weights={tmp_path / 'trained.safetensors'}", *overrides]
    given += [f"model_options.{key}={value}" for key, value in (model_options or {}).items()]
    folder = interlayer.save_for_hub(name, tmp_path / "stored", overrides=given, license="mit")
    return network.eval(), folder


def test_a_run_is_stored_and_loaded_by_the_name_of_its_folder(finished_run, tmp_path):
    folder = interlayer.save_for_hub(str(finished_run), tmp_path / "stored")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    again = build_network(f"local-dir:{folder}", pretrained=True)
    images = torch.randn(2, 3, 8, 8)
    trained = TrainedNetwork(finished_run, device=torch.device("cpu"))
    assert torch.equal(logits(again, images), logits(trained.network, images))
    assert split_name(read_stored(f"local-dir:{folder}").name)[1] == [("mrla_light", {"channels_per_head": 8})]
    source = load_network(f"local-dir:{folder}")
    assert source.classes == [str(digit) for digit in range(10)]
    assert source.transform.size == 8
    assert source.transform.mean == trained.transform.mean
    assert tuple(timm.data.resolve_model_data_config(again)["mean"]) == trained.transform.mean


def test_a_run_is_stored_with_the_crop_of_its_own_images(small, tmp_path):
    """A run crops the center. timm crops images of this network in another way, which would change its accuracy."""
    options = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    assert timm.get_pretrained_cfg("vit_base_patch16_clip_384").crop_mode == "squash"
    recipe = small(model="vit_base_patch16_clip_384", model_options=options, epochs=1)
    train(recipe, tmp_path / "run")
    folder = interlayer.save_for_hub(str(tmp_path / "run"), tmp_path / "stored")
    assert load_network(f"local-dir:{folder}").transform.crop_mode == "center"


def test_a_network_with_a_mechanism_can_get_another_head_or_another_mechanism(finished_run, tmp_path):
    folder = interlayer.save_for_hub(str(finished_run), tmp_path / "stored")
    images = torch.randn(2, 3, 8, 8)
    other_head = build_network(f"local-dir:{folder}", pretrained=True, num_classes=3)
    assert logits(other_head, images).shape == (2, 3)
    same = build_network(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(other_head.stem[0].weight, same.stem[0].weight)
    more = build_network(f"local-dir:{folder}+se", pretrained=True)
    assert sum(p.numel() for p in more.parameters()) > sum(p.numel() for p in same.parameters())
    untrained = build_network(f"local-dir:{folder}")
    assert not torch.equal(untrained.stem[0].weight, same.stem[0].weight), (
        "pretrained=False loads no weights, as in timm"
    )
    assert plain_name(f"local-dir:{folder}") == "preresnet20_cifar"


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("resnet10t", None, None),
        ("resnet18_mrla_light", {"reading": "published"}, None),
        ("preresnet20_cifar", {"blocks": 1}, None),
        ("vit_tiny_patch16_224", VIT, 32),
    ],
)
def test_timm_itself_loads_networks_whose_names_it_knows(name, options, size, tmp_path):
    overrides = [f"image_size={size}"] if size else []
    network, folder = store(tmp_path, name, *overrides, model_options=options, num_classes=5, image_size=size)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(logits(again), logits(network))
    assert again.num_classes == again.pretrained_cfg["num_classes"] == 5
    fewer = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=2)
    assert logits(fewer).shape == (2, 2)
    assert torch.equal(logits(build_network(f"local-dir:{folder}", pretrained=True)), logits(network))


def test_a_mechanism_that_started_as_the_identity_is_stored_with_its_options(tmp_path):
    name = "vit_tiny_patch16_224+mrla_light:channels_per_head=8+cb:scaled=true"
    network, folder = store(tmp_path, name, "image_size=32", model_options=VIT, num_classes=5, image_size=32)
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == (
        "vit_tiny_patch16_224+mrla_light:channels_per_head=8,init=identity+cb:scaled=true"
    )
    assert torch.equal(logits(build_network(f"local-dir:{folder}", pretrained=True)), logits(network))
    with pytest.raises(RuntimeError, match="Unknown model"):  # rather than the backbone alone
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_a_stored_network_of_imagenet_still_knows_the_wordnet_ids(tmp_path):
    """Its configuration lists names alone, and the folders of ImageNet are named by id."""
    _, folder = store(tmp_path, "test_resnet")
    classes = load_network(f"local-dir:{folder}").class_names
    assert classes.match(["n01440764", "tench"]) == {"n01440764": 0, "tench": 0}


def test_the_model_card_says_what_the_network_is(finished_run, tmp_path):
    card = (interlayer.save_for_hub(str(finished_run), tmp_path / "digits", license="mit") / "README.md").read_text()
    metadata, text = card.split("---\n")[1:]
    assert "license: mit" in metadata
    assert "- interlayer" in metadata
    accuracy = json.loads((finished_run / "summary.json").read_text())["test"]["accuracy"]
    for expected in (
        "# Model card for digits",
        "preresnet20_cifar+mrla_light:channels_per_head=8",
        f"accuracy: {accuracy:.4f}",
        "epochs: 1",
        "10: 0, 1, 2",
        'build_network("hf-hub:USER/digits", pretrained=True)',
        "title={Cross-Layer Retrospective Retrieving via Layer Attention}",
    ):
        assert expected in text


def test_the_usage_in_the_card_runs(finished_run, tmp_path):
    card = (interlayer.save_for_hub(str(finished_run), tmp_path / "digits") / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL).group(1)
    names = {}
    exec(code.replace("hf-hub:USER/digits", f"local-dir:{tmp_path / 'digits'}"), names)
    assert names["transform"] is not None
    assert not names["model"].training


class RecordingApi(HfApi):
    """A client that keeps what it would send."""

    def __init__(self, *, has_card=False):
        super().__init__(token=False)
        self.has_card, self.sent = has_card, None

    def create_repo(self, repo_id, **options):
        self.created = (repo_id, options)
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def file_exists(self, repo_id, filename, **options):
        return self.has_card

    def upload_folder(self, *, folder_path, ignore_patterns=None, **options):
        self.sent = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        self.ignored = ignore_patterns
        return CommitInfo(
            commit_url="https://huggingface.co/user/digits/commit/0",
            commit_message=options["commit_message"],
            commit_description="",
            oid="0",
        )


def test_uploading_sends_the_files_of_the_folder(finished_run, tmp_path):
    """Only the requests of the Hub's client are replaced; no Hub is needed."""
    api = RecordingApi()
    interlayer.push_to_hub(str(finished_run), "hf-hub:user/digits", private=True, api=api)
    assert api.created == ("user/digits", {"private": True, "exist_ok": True})
    folder = interlayer.save_for_hub(str(finished_run), tmp_path / "digits")
    sent = safetensors.torch.load(api.sent.pop("model.safetensors"))
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert api.sent == {name: (folder / name).read_bytes() for name in ("config.json", "README.md")}
    assert api.ignored is None
    kept = RecordingApi(has_card=True)
    interlayer.push_to_hub(str(finished_run), "user/digits", api=kept)
    assert kept.ignored == ["README.md"], "an existing model card was overwritten"


def test_random_weights_are_not_stored(tmp_path):
    with pytest.raises(ValueError, match=r"resnet10t has no trained weights: give weights=FILE, or pretrained=true"):
        interlayer.save_for_hub("resnet10t", tmp_path / "stored")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(finished_run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists: choose another folder"):
        interlayer.save_for_hub(str(finished_run), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def damaged(folder, name, contents):
    (folder / name).write_bytes(contents)
    return f"local-dir:{folder}"


def test_damaged_folders_give_a_sentence(finished_run, tmp_path):
    with pytest.raises(ModelError, match="absent holds no model: expected config"):
        build_network(f"local-dir:{tmp_path / 'absent'}")
    folder = interlayer.save_for_hub(str(finished_run), tmp_path / "stored")
    config = (folder / "config.json").read_bytes()
    with pytest.raises(interlayer.CheckpointError, match="cannot be read as a checkpoint"):
        build_network(damaged(folder, "model.safetensors", b"no tensors"), pretrained=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"stored holds no weights: expected model\.safetensors"):
        build_network(f"local-dir:{folder}", pretrained=True)
    with pytest.raises(ModelError, match="is not a configuration of a timm model"):
        build_network(damaged(folder, "config.json", b"{"))
    with pytest.raises(ModelError, match="is not a configuration of a timm model"):
        build_network(damaged(folder, "config.json", b'{"model_type": "bert"}'))
    unknown = config.replace(b"preresnet20_cifar", b"preresnet2_cifar")
    with pytest.raises(ModelError, match="unknown model 'preresnet2_cifar'; did you mean preresnet20_cifar"):
        build_network(damaged(folder, "config.json", unknown))


class Executes:
    def __reduce__(self):
        return print, ("code of the checkpoint ran",)


def test_code_in_a_checkpoint_is_not_executed(finished_run, tmp_path, capsys):
    folder = interlayer.save_for_hub(str(finished_run), tmp_path / "stored")
    (folder / "model.safetensors").unlink()
    torch.save(Executes(), folder / "pytorch_model.bin")
    with pytest.raises(interlayer.CheckpointError, match="weights_only"):
        build_network(f"local-dir:{folder}", pretrained=True)
    assert "ran" not in capsys.readouterr().out


OFFLINE = {
    "build_network('hf-hub:user/name', pretrained=True)": "user/name is not on this machine, and 127.0.0.1",
    "build_network('resnet18', pretrained=True)": "give a file of them, weights=FILE",
    "build_network('hf-hub:', pretrained=True)": "has no model id",
    "interlayer.push_to_hub('runs/mine', 'user/name')": "so user/name was not uploaded",
}


def test_offline_there_is_one_sentence_at_once(tmp_path):
    """The Hub's client alone tries for half a minute, and prints every attempt."""
    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}  # nothing listens at this port
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    code = f"""
import time, interlayer
from interlayer.models.build import build_network
for program in {list(OFFLINE)!r}:
    start = time.perf_counter()
    try:
        eval(program)
    except ValueError as error:
        print(error)
    print(time.perf_counter() - start)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200,
        env={**os.environ, **proxies, **variables},
    )  # fmt: skip
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) == 2 * len(OFFLINE)
    for sentence, message, seconds in zip(OFFLINE.values(), lines[::2], lines[1::2], strict=True):
        assert sentence in message
        assert float(seconds) < 15


def test_weights_in_the_cache_are_used_offline(tmp_path, monkeypatch):
    """The cache is laid out as the Hub's client does, so that no request is needed."""
    network = timm.create_model("resnet10t", num_classes=1000)
    repository = timm.get_pretrained_cfg("resnet10t").hf_hub_id
    cache = tmp_path / f"models--{repository.replace('/', '--')}"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    interlayer.save_weights(network, snapshot / "model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    again = build_network("resnet10t", pretrained=True)
    assert torch.equal(again.fc.weight, network.fc.weight)
