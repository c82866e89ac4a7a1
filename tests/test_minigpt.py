"""The model against transformers' GPT-2, its causality, gradient accumulation, and what the torch backend alone has."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from base.errors import BadInput
from model import torch_backend
from model.minigpt import MiniGPT
from tests.conftest import CONFIG, assert_close, batches, random_weights

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}


def random_gpt(precision: str = "fp32") -> MiniGPT:
    return MiniGPT.from_weights(CONFIG, random_weights()).to(PRECISIONS[precision])


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


# ---- the same function as transformers' GPT-2


def transformers_gpt2(weights: dict[str, np.ndarray]) -> GPT2LMHeadModel:
    sizes = dict(vocab_size=11, n_positions=8, n_layer=2, n_head=2, n_embd=16, bos_token_id=0, eos_token_id=0)
    no_dropout = dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    config = GPT2Config(**sizes, **no_dropout, activation_function="gelu_new", attn_implementation="eager")
    gpt2 = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in gpt2.transformer.named_parameters():
            parameter.copy_(in_their_layout(name, torch.from_numpy(weights[name])))
    return gpt2


def in_their_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Conv1D keeps the weights of its linear layers as (in, out)."""
    return tensor.T if (".attn." in name or ".mlp." in name) and name.endswith("weight") else tensor


# fp32: a few dozen roundings of 6e-8 in another order. fp64: far below that, yet above rounding, so nothing is hidden.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-10)])
def test_logits_loss_and_every_gradient_are_those_of_transformers_gpt2(precision, tolerance):
    x, y = tensors(*batches(batch_size=4).get("train", 0, 0))
    gpt = random_gpt(precision)
    gpt2 = transformers_gpt2(random_weights()).to(PRECISIONS[precision])

    logits, their_logits = gpt(x), gpt2(x).logits
    assert_close("logits", logits, their_logits, tolerance)
    losses, their_losses = gpt(x, y), F.cross_entropy(their_logits.transpose(1, 2), y, reduction="none").mean(1)
    assert_close("losses of rows", losses, their_losses, tolerance)

    losses.mean().backward()
    their_losses.mean().backward()
    ours, theirs = gradients(gpt), gradients(gpt2.transformer)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(f"gradient of {name}", gradient, in_their_layout(name, theirs[name]), tolerance)


def test_rows_shorter_than_a_block_are_those_of_transformers_gpt2():
    x, _ = tensors(*batches(batch_size=2, block_size=3).get("train", 0, 0))
    assert_close("logits", random_gpt()(x), transformers_gpt2(random_weights())(x).logits, 1e-5)


def test_a_later_token_does_not_change_earlier_logits():
    gpt = random_gpt()
    x, _ = tensors(*batches(batch_size=2).get("train", 0, 0))
    before = gpt(x)
    for position in range(1, CONFIG.block_size):
        changed = x.clone()
        changed[:, position] = (changed[:, position] + 1) % CONFIG.vocab_size
        after = gpt(changed)
        assert torch.equal(after[:, :position], before[:, :position]), f"position {position}"
        assert not torch.equal(after[:, position:], before[:, position:]), f"position {position}"


def test_a_row_does_not_change_other_rows():
    gpt = random_gpt("fp64")
    x, y = tensors(*batches(batch_size=3).get("train", 0, 0))
    alone = torch.cat([gpt(x[row : row + 1], y[row : row + 1]) for row in range(3)])
    assert_close("losses", gpt(x, y), alone, 1e-12)


# ---- accumulation


def accumulated(precision: str, micros: int, batch_size: int) -> dict[str, torch.Tensor]:
    """The gradients of one step made of `micros` micro-batches, as train.py sums them."""
    gpt = random_gpt(precision)
    for micro in range(micros):
        x, y = tensors(*batches(batch_size).get("train", 0, micro))
        (gpt(x, y).mean() / micros).backward()
    return gradients(gpt)


# The sums over rows are taken in another order: in fp32, a few roundings of 6e-8 (up to 6e-7 was seen).
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 3e-6), ("fp64", 1e-12)])
def test_four_micro_batches_of_8_give_the_gradients_of_one_batch_of_32(precision, tolerance):
    whole = accumulated(precision, micros=1, batch_size=32)
    for name, gradient in accumulated(precision, micros=4, batch_size=8).items():
        assert_close(name, gradient, whole[name], tolerance)


# ---- weights by name


def test_a_model_is_made_of_copies_of_its_weights_and_can_be_copied():
    weights = random_weights()
    state = torch.random.get_rng_state()
    gpt = MiniGPT.from_weights(CONFIG, weights)
    assert torch.equal(torch.random.get_rng_state(), state), "weights were drawn that nobody uses"
    for name, parameter in gpt.named_parameters():
        assert parameter.requires_grad, name
        assert parameter.detach().numpy().tobytes() == weights[name].tobytes(), name
    assert not list(gpt.buffers())
    other = copy.deepcopy(gpt)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter += 1
    for name, parameter in other.named_parameters():
        assert parameter.detach().numpy().tobytes() == weights[name].tobytes(), name
    assert weights["ln_f.weight"].tobytes() == random_weights()["ln_f.weight"].tobytes()


def test_loaded_weights_keep_every_bit_of_fp64_in_an_fp64_model():
    gpt = MiniGPT(CONFIG).double()
    gpt.load_weights(random_weights(np.float64))
    for name, parameter in gpt.named_parameters():
        assert parameter.detach().numpy().tobytes() == random_weights(np.float64)[name].tobytes(), name


# ---- hardware


@pytest.mark.parametrize("device", ["tpu", "", "cpu:1", "cuda:x", "meta"])
def test_an_unknown_device_is_bad_input(device):
    with pytest.raises(BadInput, match=f"--device {device}: unknown device"):
        torch_backend.hardware(device, "fp32", "auto")


def test_a_forced_emulation_is_named_in_the_header():
    assert "--emulation on" in torch_backend.hardware("cpu", "bf16", "on").how
