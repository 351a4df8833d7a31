"""Layer attention is dropped for the samples that the block drops (MRLA, appendices B.1.1 and B.4)."""

import copy
import multiprocessing
import os
import socket

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import interlayer
from interlayer.hosts.attach import attached_blocks, attached_mechanisms
from interlayer.hosts.stochastic_depth import forward_with_factors, returns_factors
from interlayer.mechanisms import MRLALight

BATCH = 16


def vit(**options):
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, **options}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, drop_path_rate=0.5, **options)


def efficientnet():
    return timm.create_model("efficientnet_b0", num_classes=5, drop_path_rate=0.5)


NETWORKS = {"efficientnet": efficientnet, "vit": vit}


def images(batch=BATCH):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def observed(model, run=None):
    """Returns, for each attached block, the samples whose last branch was dropped and those without attention."""
    dropped, skipped, handles = {}, {}, []
    for name, block in attached_blocks(model):
        layers = [child for child in block.children() if type(child).__name__ == "DropPath"]
        if not layers or not hasattr(block, "mrla"):
            continue

        def record_factor(module, args, output, name=name):
            dropped[name] = output.reshape(len(output), -1).abs().amax(1) == 0

        def record_sum(module, args, output, name=name):
            skipped[name] = (output[0] == args[0]).flatten(1).all(1)

        handles += [layers[-1].register_forward_hook(record_factor), block.mrla.register_forward_hook(record_sum)]
    (run or model)(images())
    for handle in handles:
        handle.remove()
    return dropped, skipped


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_attention_is_dropped_for_exactly_the_samples_that_the_block_drops(network, mechanism):
    torch.manual_seed(0)
    model = interlayer.attach(NETWORKS[network](), mechanism).train()
    dropped, skipped = observed(model)
    assert len(dropped) == (9 if network == "efficientnet" else 2), "every block with a rate above 0 is observed"
    for name, samples in dropped.items():
        assert torch.equal(samples, skipped[name]), name
    everything = torch.cat(list(dropped.values()))
    assert everything.any(), "at a rate of 0.5 some samples are dropped"
    assert not everything.all(), "at a rate of 0.5 some samples are kept"
    skipped_in_eval = observed(model.eval())[1]
    assert not any(samples.any() for samples in skipped_in_eval.values()), "in eval mode nothing is dropped"


def test_a_draw_of_its_own_disagrees_with_the_block():
    torch.manual_seed(0)
    dropped, skipped = observed(interlayer.attach(efficientnet(), "mrla_light", drop_path="backbone_rate").train())
    assert not torch.equal(torch.cat(list(dropped.values())), torch.cat(list(skipped.values())))


@pytest.mark.parametrize("network", NETWORKS)
def test_the_block_drops_the_same_samples_as_without_a_mechanism(network):
    plain = NETWORKS[network]().train()
    attached = interlayer.attach(copy.deepcopy(plain), "mrla_light", init="identity").train()
    results = []
    for model in (plain, attached):
        torch.manual_seed(7)
        results.append(model(images()))
    torch.testing.assert_close(*results)
    torch.manual_seed(7)
    torch.testing.assert_close(interlayer.detach(attached)(images()), results[0])


def test_kept_samples_are_scaled_as_the_branch():
    torch.manual_seed(0)
    layer = MRLALight(8, channels_per_head=4, drop_path=0.5, shared_drop_path=True).train()
    x = torch.randn(4, 8, 5, 5)
    whole, *_ = layer(x, branch_factor=torch.ones(4))
    halved, *_ = layer(x, branch_factor=torch.tensor([0.0, 2.0, 0.0, 2.0]))
    torch.testing.assert_close(halved - x, (whole - x) * torch.tensor([0.0, 2.0, 0.0, 2.0]).reshape(-1, 1, 1, 1))


def test_resnets_share_their_stochastic_depth_too_and_keep_their_own_option():
    model = timm.create_model("resnet18", num_classes=5, drop_path_rate=0.5)
    model = interlayer.attach(model, "mrla_light", reading="published").train()
    dropped, skipped = observed(model)
    assert len(dropped) == 7
    assert all(torch.equal(samples, skipped[name]) for name, samples in dropped.items())
    own = interlayer.attach(timm.create_model("resnet18", num_classes=5), "mrla_light", drop_path=0.2)
    assert {(m.drop_path.drop_prob, m.reads_branch_factor) for m in attached_mechanisms(own).values()} == {(0.2, False)}


def test_the_draw_is_shared_beside_a_mechanism_inside_the_block():
    torch.manual_seed(0)
    model = interlayer.attach(interlayer.attach(efficientnet(), "eca"), "mrla_light").train()
    dropped, skipped = observed(model)
    assert len(dropped) == 9
    assert all(torch.equal(samples, skipped[name]) for name, samples in dropped.items())


def stage_of_efficientnet():
    model = interlayer.attach(efficientnet(), "mrla_light").train()
    return model.blocks[4], torch.randn(4, model.blocks[4][0].conv_pw.in_channels, 4, 4)


def checkpointed_vit():
    model = interlayer.attach(vit(), "mrla_light").train()
    model.set_grad_checkpointing()
    return model, images(4)


@pytest.mark.parametrize("make", [stage_of_efficientnet, checkpointed_vit])
def test_compiled_whole_the_draws_still_agree(make):
    torch.manual_seed(0)
    model, x = make()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    result = compiled(x)
    result.sum().backward()
    torch.manual_seed(5)
    torch.testing.assert_close(model(x), result, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("network", NETWORKS)
def test_recomputed_draws_agree_under_activation_checkpointing(network):
    model = interlayer.attach(NETWORKS[network](), "mrla_light").train()
    gradients = []
    for checkpointing in (False, True):
        each = copy.deepcopy(model)
        each.set_grad_checkpointing(checkpointing)
        torch.manual_seed(5)
        each(images()).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in each.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-4)


def test_in_mixed_precision_the_factors_take_the_type_of_the_sum():
    model = interlayer.attach(vit(), "mrla_light").train()
    with torch.autocast("cpu", torch.bfloat16):
        dropped, skipped = observed(model)
    assert all(torch.equal(samples, skipped[name]) for name, samples in dropped.items())


def _two_steps(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = interlayer.attach(vit(), "mrla_base").train()
    parallel = DistributedDataParallel(model)
    torch.manual_seed(rank)
    for _ in range(2):  # a parameter without a gradient makes the second step fail
        parallel(images()).square().mean().backward()
    torch.save(observed(model, parallel), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_process_shares_its_own_draws(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_two_steps, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    (first, first_skipped), (second, second_skipped) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(samples, first_skipped[name]) for name, samples in first.items())
    assert all(torch.equal(samples, second_skipped[name]) for name, samples in second.items())
    assert any(not torch.equal(samples, second[name]) for name, samples in first.items())


def test_layers_of_transformers_share_their_draw():
    """Their blocks call one stochastic depth layer twice: the last call is that of the MLP."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8, drop_path_rate=0.5
    )
    torch.manual_seed(0)
    model = interlayer.attach(transformers.Dinov2Model(config), "mrla_light").train()
    calls = []
    block = model.encoder.layer[2]
    block.drop_path.register_forward_hook(lambda module, args, output: calls.append(output == 0))
    block.mrla.register_forward_hook(
        lambda module, args, output: calls.append((output[0] == args[0]).flatten(1).all(1))
    )
    model(pixel_values=images())
    attention, mlp, skipped = calls
    assert torch.equal(mlp, skipped)
    assert not torch.equal(attention, skipped)


@pytest.mark.parametrize(
    "name", ["efficientnet_b0_mrla_light", "deit_tiny_mrla_base", "ceit_tiny_mrla_light", "pvt_v2_b0_mrla_light"]
)
def test_the_papers_models_share_every_draw(name):
    with torch.device("meta"):
        model = timm.create_model(name, drop_path_rate=0.2)
    attached = [block.mrla for _, block in attached_blocks(model)]
    dropped = [mechanism for mechanism in attached if not isinstance(mechanism.drop_path, nn.Identity)]
    assert len(dropped) >= len(attached) - 1, "the rate is 0 in the first block alone"
    assert all(mechanism.reads_branch_factor for mechanism in dropped)


@pytest.mark.parametrize(
    ("name", "drops"),
    [("efficientnet_b0_mrla_light", True), ("ceit_tiny_mrla_light", True), ("deit_tiny_mrla_base", False)],
)
def test_published_models_drop_as_the_authors_programs_do(name, drops):
    """A draw of its own at the rate of the block, and in DeiT none."""
    with torch.device("meta"):
        model = timm.create_model(name, drop_path_rate=0.2, reading="published")
    attached = [block.mrla for _, block in attached_blocks(model)]
    assert not any(mechanism.reads_branch_factor for mechanism in attached)
    assert isinstance(attached[-1].drop_path, nn.Identity) is not drops


class Inherited(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop_path = timm.layers.DropPath(0.5)

    def forward(self, x):
        return super().forward(x)


def test_blocks_whose_draws_cannot_be_read_are_recognized():
    assert not returns_factors(Inherited())
    assert not returns_factors(nn.Sequential(nn.Sequential(timm.layers.DropPath(0.5))))
    block = timm.create_model("convnext_atto", drop_path_rate=0.5).stages[-1].blocks[-1].train()
    assert returns_factors(block)
    output, factors = forward_with_factors(block, torch.randn(8, 320, 4, 4))
    assert output.shape == (8, 320, 4, 4)
    assert [set(factor.tolist()) <= {0.0, 2.0} for factor in factors] == [True]
