"""The table of parameters, their first values, and the FLOP count."""

import hashlib

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from model.config import GPTConfig, initial_weights, parameter_count, parameters
from model.cost import PEAK_TFLOPS, flops_per_token, peak_flops
from model.minigpt import MiniGPT
from settings import PRESETS

TINY = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)
TINY_SHA256 = "252daaf9724ecb962c4a8978796aa28bb27a27f98afac61ef44cca226e52d76a"


def preset(name: str, vocab_size: int) -> GPTConfig:
    sizes = {key: PRESETS[name][key] for key in ("block_size", "n_layer", "n_head", "n_embd")}
    return GPTConfig(vocab_size=vocab_size, **sizes)


def sha256(weights: dict[str, np.ndarray]) -> str:
    """Of names and values in model order, values as little-endian fp32 whatever this machine has."""
    digest = hashlib.sha256()
    for name, values in weights.items():
        digest.update(name.encode() + values.astype("<f4").tobytes())
    return digest.hexdigest()


# ---- the table


def test_names_and_shapes_are_those_of_transformers_gpt2():
    sizes = dict(vocab_size=11, n_positions=8, n_layer=2, n_head=2, n_embd=16)
    theirs = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).transformer
    linear = (".attn.", ".mlp.")  # Conv1D there: (in, out)
    expected = {
        name: tuple(p.shape[::-1]) if any(part in name for part in linear) else tuple(p.shape)
        for name, p in theirs.named_parameters()
    }
    assert {p.name: p.shape for p in parameters(TINY)} == expected


def test_the_module_has_the_parameters_of_the_table_in_its_order():
    own = [(name, tuple(p.shape)) for name, p in MiniGPT(TINY).named_parameters()]
    assert own == [(p.name, p.shape) for p in parameters(TINY)]


def test_gpt2_has_124_439_808_parameters():
    assert parameter_count(preset("gpt2", vocab_size=50257)) == 124_439_808


def test_names_are_unique():
    names = [p.name for p in parameters(preset("gpt2", vocab_size=50257))]
    assert len(names) == len(set(names)) == 2 + 12 * 12 + 2


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_whole_heads(name):
    assert PRESETS[name]["n_embd"] % PRESETS[name]["n_head"] == 0


def test_matrices_decay_and_vectors_do_not():
    for p in parameters(TINY):
        assert p.decay == (len(p.shape) == 2), p.name


# ---- first values


def test_first_values_do_not_change_from_version_to_version():
    assert sha256(initial_weights(TINY, seed=1337)) == TINY_SHA256


def test_the_same_seed_draws_the_same_bits():
    assert sha256(initial_weights(TINY, seed=1)) == sha256(initial_weights(TINY, seed=1))


def test_first_values_are_fp32_with_the_shapes_of_the_table():
    weights = initial_weights(TINY, seed=0)
    assert list(weights) == [p.name for p in parameters(TINY)]
    for p in parameters(TINY):
        assert weights[p.name].dtype == np.float32, p.name
        assert weights[p.name].shape == p.shape, p.name


def test_a_deeper_model_shares_all_but_the_scale_of_its_residual_projections():
    shallow = initial_weights(TINY, seed=5)
    deep = initial_weights(GPTConfig(11, 8, n_layer=8, n_head=2, n_embd=16), seed=5)
    for name, values in shallow.items():
        scale = 2.0 if name.endswith("c_proj.weight") else 1.0  # 4 times as deep: sqrt(4) times as small
        np.testing.assert_array_equal(deep[name] * np.float32(scale), values, err_msg=name)


def test_another_seed_draws_other_values():
    one, other = initial_weights(TINY, seed=1), initial_weights(TINY, seed=2)
    for p in parameters(TINY):
        if not isinstance(p.init, str):
            assert not np.isin(one[p.name], other[p.name]).any(), p.name


def test_no_two_parameters_share_their_values():
    drawn = [w for name, w in initial_weights(TINY, seed=1).items() if len(w.shape) == 2 and "c_proj" not in name]
    values = np.concatenate([w.ravel() for w in drawn])
    assert len(np.unique(values)) > 0.999 * len(values)


def test_normal_values_have_the_table_s_mean_and_deviation():
    config = GPTConfig(vocab_size=65, block_size=64, n_layer=3, n_head=4, n_embd=64)
    weights = initial_weights(config, seed=1337)
    for name, values in weights.items():
        if values.ndim < 2:
            continue
        std = 0.02 / np.sqrt(2 * 3) if name.endswith("c_proj.weight") else 0.02
        n = values.size  # the errors of n draws: std / sqrt(n) of the mean, 1 / sqrt(2 n) of the deviation
        assert abs(values.mean()) < 5 * std / np.sqrt(n), name
        assert abs(values.std() / std - 1) < 5 / np.sqrt(2 * n), name


def test_vectors_start_at_one_or_zero():
    for name, values in initial_weights(TINY, seed=0).items():
        if values.ndim == 1:
            expected = 1.0 if name.split(".")[-2].startswith("ln_") and name.endswith("weight") else 0.0
            assert (values == expected).all(), name


# ---- FLOPs


def test_flops_per_token_by_hand():
    # Per token, forward and backward: 6 for each of the weights below, and 12 T C for each layer's attention.
    V, T, C, L = 11, 8, 16, 2
    layer = 12 * C * C + 13 * C  # four matrices; their biases and two LayerNorms
    assert flops_per_token(TINY) == 6 * (V * C + L * layer + 2 * C) + 12 * L * T * C


def test_flops_per_token_against_torch_s_counter():
    # The counter sees matrix products only; the rule counts 6 for every vector's element too. Attention's products are
    # counted whole, as the rule does: half of them is masked. The math kernel recomputes nothing in backward.
    gpt = MiniGPT(TINY)
    tokens = torch.zeros((3, TINY.block_size), dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        gpt(tokens, tokens).mean().backward()
    vectors = sum(p.shape[0] for p in parameters(TINY) if len(p.shape) == 1)
    assert counter.get_total_flops() == (flops_per_token(TINY) - 6 * vectors) * tokens.numel()


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A40", 150),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_peak_of_a_known_card(device_name, tflops):
    assert peak_flops(device_name, "bf16") == tflops * 1e12


def test_peak_is_not_guessed():
    assert peak_flops("AMD EPYC", "bf16") is None
    assert peak_flops("NVIDIA H100 PCIe", "fp32") is None


def test_no_card_is_hidden_by_a_shorter_name_before_it():
    names = list(PEAK_TFLOPS)
    for n, name in enumerate(names):
        assert not any(earlier in name for earlier in names[:n]), name


@pytest.mark.parametrize(
    "name",
    ["RTX A1000", "NVIDIA RTX A4000", "NVIDIA L40", "NVIDIA T400", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC"],
)
def test_a_card_that_only_sounds_like_a_known_one_has_no_peak(name):
    assert peak_flops(name, "bf16") is None
