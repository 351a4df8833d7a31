"""Tests that common uses of timm models work with attached mechanisms. Each test is one such use."""

import copy
import io
import multiprocessing
import os
import pickle
import socket

import pytest
import safetensors.torch
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import interlayer
from interlayer.hosts import attached_blocks

MODELS = {
    "resnet18": {},
    "efficientnet_b0": {},
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 6},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "drop_path_rate": 0.0},
    "pvt_v2_b0": {},
}
CNN_AND_VIT = ["resnet18", "vit_tiny_patch16_224"]
MECHANISMS = ["mrla_light", "mrla_base"]
SLOW = pytest.mark.slow


def make(name, mechanism="mrla_base", **options):
    model = timm.create_model(name, **{"num_classes": 5, **MODELS[name], **options})
    return interlayer.attach(model, mechanism, image_size=64)


def with_frozen_batch_norms(model):
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def images(batch=2, size=(64, 64)):
    return torch.randn(batch, 3, *size)


@pytest.mark.parametrize(
    ("name", "wrapped_first"),
    [(name, True) for name in MODELS] + [(name, False) for name in ("resnet18", "efficientnet_b0", "pvt_v2_b0")],
)
def test_features_only(name, wrapped_first):
    """Features are plain tensors with the shapes of timm and depend on the attention."""
    plain = timm.create_model(name, features_only=True, **MODELS[name]).eval()
    expected = plain(images())
    if wrapped_first:
        model = timm.create_model(name, features_only=True, **MODELS[name])
        model = interlayer.attach(model, "mrla_base", image_size=64).eval()
    else:
        model = timm.create_model(f"{name}_mrla_base", features_only=True).eval()
    features = model(images())
    assert [f.shape for f in features] == [f.shape for f in expected]
    assert all(type(f) is torch.Tensor for f in features)
    assert model.feature_info.channels() == plain.feature_info.channels()
    interlayer.load_backbone(model, plain.state_dict())
    x = images()
    assert not torch.allclose(model(x)[-1], plain(x)[-1])


@pytest.mark.parametrize("name", MODELS)
def test_features_only_with_chosen_indices(name):
    count = len(timm.create_model(name, **MODELS[name]).feature_info)
    model = timm.create_model(name, features_only=True, out_indices=(0, count - 2), **MODELS[name])
    model = interlayer.attach(model, "mrla_light", image_size=64)
    assert len(model(images())) == 2


@pytest.mark.parametrize("name", MODELS)
def test_forward_intermediates(name):
    model = make(name).eval()
    x = images()
    final, intermediates = model.forward_intermediates(x)
    assert all(type(f) is torch.Tensor and f.dim() == 4 for f in intermediates)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.forward_head(final), model(x))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_forward_intermediates_in_mid_stage_of_a_vit(mechanism):
    model = make("vit_tiny_patch16_224", mechanism).eval()
    x = images()
    seen = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda m, args, output, i=i: seen.__setitem__(i, output))
    options = {"indices": [0, 2, 5], "output_fmt": "NLC", "return_prefix_tokens": True, "intermediates_only": True}
    for i, (patches, prefix) in zip([0, 2, 5], model.forward_intermediates(x, **options), strict=True):
        whole = torch.cat((prefix, patches), dim=1)
        assert torch.equal(whole, seen[i][:])
    no_prefix = timm.create_model("vit_tiny_patch16_224", img_size=64, class_token=False, global_pool="avg", depth=6)
    no_prefix = interlayer.attach(no_prefix, mechanism)
    for feature in no_prefix.forward_intermediates(x, output_fmt="NLC", intermediates_only=True):
        assert type(feature) is torch.Tensor
    kept = model.prune_intermediate_layers([0, 2])
    assert kept == [0, 2]
    assert type(model.forward_features(x)) is torch.Tensor, "pruning in mid-stage must leave a plain tensor"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_gradient_checkpointing_gives_the_same_gradients(name, mechanism):
    model = with_frozen_batch_norms(make(name, mechanism).train())  # recomputing updates running statistics twice
    x = images()
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enabled)
        model(x).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], gradient, msg=parameter)


@pytest.mark.parametrize("mechanism", [*MECHANISMS, *(pytest.param(m, marks=SLOW) for m in ("mla", "mrla_linear"))])
@pytest.mark.parametrize("name", CNN_AND_VIT)
def test_compile_without_a_graph_break(name, mechanism):
    model = make(name, mechanism).eval()
    x = images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        pytest.param("swin_tiny_patch4_window7_224", "paper", marks=pytest.mark.slow),
        ("pvt_v2_b0", "published"),
        ("resnet18", "paper"),
        ("resnet18", "published"),
        pytest.param("swin_tiny_patch4_window7_224", "published", marks=pytest.mark.slow),
        pytest.param("pvt_v2_b0", "paper", marks=pytest.mark.slow),
    ],
)
def test_compiled_training_gives_the_same_gradients(name, reading):
    model = timm.create_model(name, num_classes=5, **MODELS[name])
    model = interlayer.attach(model, "mrla_light", reading=reading, image_size=64).train()
    x = images()
    model(x).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[parameter].grad, gradient, msg=parameter)


def test_compiled_intermediates_and_checkpoints_of_a_vit():
    model = make("vit_tiny_patch16_224").train()
    x = images()
    compiled = torch.compile(
        lambda x: model.forward_intermediates(x, indices=[0, 5], intermediates_only=True),
        backend="aot_eager",
        fullgraph=True,
    )
    for a, b in zip(compiled(x), model.forward_intermediates(x, indices=[0, 5], intermediates_only=True), strict=True):
        torch.testing.assert_close(a, b)
    model(x).square().sum().backward()
    expected = model.patch_embed.proj.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing(True)
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(model.patch_embed.proj.weight.grad, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", MODELS)
def test_compile_with_inductor(name, mechanism):
    model = make(name, mechanism).eval()
    x = images()
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", CNN_AND_VIT)
def test_export(name, mechanism):
    model = make(name, mechanism).eval()
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    x = images(3)
    torch.testing.assert_close(program.module()(x), model(x))
    file = io.BytesIO()
    torch.export.save(program, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue()))
    torch.testing.assert_close(loaded.module()(x), model(x))


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("resnet18", "mrla_light"),
        ("vit_tiny_patch16_224", "mrla_base"),
        pytest.param("resnet18", "mrla_base", marks=SLOW),
        pytest.param("vit_tiny_patch16_224", "mrla_light", marks=SLOW),
    ],
)
def test_onnx(name, mechanism, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make(name, mechanism).eval()
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (images(),), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = images()
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(x), atol=1e-4, rtol=1e-3)


def _ddp_worker(rank, port, name, mechanism, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = make(name, mechanism).eval()  # batch statistics would differ between one process and two
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    torch.manual_seed(1)
    x = images(4)
    for _ in range(2):  # a parameter without a gradient makes the second step fail
        optimizer.zero_grad()
        parallel(x[rank::2]).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("resnet18", "mrla_light"),
        ("vit_tiny_patch16_224", "mrla_base"),
        pytest.param("resnet18", "mrla_base", marks=pytest.mark.slow),
        pytest.param("vit_tiny_patch16_224", "mrla_light", marks=pytest.mark.slow),
        pytest.param("resnet18", "rla", marks=pytest.mark.slow),
    ],
)
def test_ddp_in_two_processes_is_one_process_with_both_batches(name, mechanism, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_ddp_worker, args=(r, port, name, mechanism, tmp_path)) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    torch.manual_seed(0)
    model = make(name, mechanism).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    torch.manual_seed(1)
    x = images(4)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for parameter, value in model.state_dict().items():
            torch.testing.assert_close(saved[parameter], value, msg=parameter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base", "mla", "mrla_linear"])
@pytest.mark.parametrize("name", CNN_AND_VIT)
def test_autocast(name, mechanism, dtype):
    model = make(name, mechanism).train()
    x = images()
    model.eval()
    exact = model(x)
    with torch.autocast("cpu", dtype):
        output = model(x)
        loss = output.float().square().mean()
    loss.backward()
    assert (output.float() - exact).norm() / exact.norm() < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    carried = []
    second = next(iter(attached_blocks(model)))[1]
    second.register_forward_hook(lambda m, args, out: carried.append(out))
    with torch.autocast("cpu", dtype):
        model(x)
    memory = carried[0].memories["mrla"]
    maps = memory if isinstance(memory, torch.Tensor) else memory[0 if mechanism == "mla" else 1][0]
    if mechanism != "mla" or name == "resnet18":  # MLA in a transformer keeps its LayerNorm's float32
        assert maps.dtype == dtype, "the memory must not be wider than the maps"


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_channels_last(mechanism):
    model = make("resnet18", mechanism).eval()
    x = images()
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    seen = []
    model.layer3[1].register_forward_hook(lambda m, args, out: seen.append(out))
    torch.testing.assert_close(model(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5, rtol=1e-5)
    assert seen[0].is_contiguous(memory_format=torch.channels_last), "a block must not fall back to another format"


@pytest.mark.parametrize("name", MODELS)
def test_deepcopy_and_pickle(name):
    model = make(name).eval()
    x = images()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(model(x), expected), "the copy must share nothing"
        interlayer.detach(other)


def test_deepcopy_of_a_vit_of_any_size_reads_its_own_patch_embedding():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, dynamic_img_size=True)
    model = interlayer.attach(model, "mrla_base").eval()
    other = copy.deepcopy(model)
    assert other.blocks[0].interlayer_layout.patch_embed is other.patch_embed
    assert other(images(size=(32, 96))).shape == (2, 5)


def test_whole_model_through_torch_save(tmp_path):
    model = make("resnet18").eval()
    torch.save(model, tmp_path / "model.pt")
    other = torch.load(tmp_path / "model.pt", weights_only=False)
    x = images()
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_safetensors(name, tmp_path):
    model, other = make(name).eval(), make(name).eval()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    x = images()
    assert torch.equal(other(x), model(x))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", MODELS)
def test_batch_of_one(name, mechanism):
    model = with_frozen_batch_norms(make(name, mechanism).train())  # they cannot train on maps of one element
    model(images(1)).sum().backward()


@pytest.mark.parametrize("size", [(64, 96), (65, 91), (33, 64)])
@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "convnext_atto", "pvt_v2_b0"])
def test_non_square_and_odd_images(name, size):
    model = make(name).eval()
    assert model(images(size=size)).shape == (2, 5)


@pytest.mark.parametrize("name", MODELS)
def test_without_a_classifier(name):
    model = make(name, num_classes=0).eval()
    assert model(images()).shape == (2, model.num_features)
    model.reset_classifier(3)
    assert model(images()).shape == (2, 3)


def test_a_loop_that_knows_nothing_but_timm():
    """A third-party training script with `import interlayer` as its only change."""
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model = timm.create_model("resnet18_mrla_light", pretrained=False, num_classes=3, in_chans=1, drop_path_rate=0.1)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9, weight_decay=1e-4, layer_decay=0.9)
    ema = ModelEmaV3(model, decay=0.5)
    x, labels = torch.randn(6, 1, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = []
    for _ in range(16):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        losses.append(loss.item())
    assert sum(losses[-4:]) < sum(losses[:4])
    assert ema.module(x).shape == (6, 3)
