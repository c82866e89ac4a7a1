"""Checkpoints opened by transformers, and transformers' models here: small random weights, no network."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import sample
from base.errors import BadInput
from data.tokenizers import ByteTokenizer
from model.config import GPTConfig, initial_weights, parameters
from model.hugging_face import published
from model.minigpt import MiniGPT
from run import checkpoint, folder
from tests.conftest import build

CONFIG = GPTConfig(vocab_size=256, block_size=32, n_layer=2, n_head=2, n_embd=32, dropout=0.1)
TOKENS = np.random.default_rng(0).integers(0, 256, size=(3, 32))
ABOUT = {"best_val": None, "skipped": 0, "consecutive_skips": 0, "tokenizer_fingerprint": ""}
ABOUT |= {key: {} for key in ("settings", "config", "scaler", "corpus", "compute")}


def save(out, weights: dict[str, np.ndarray]):
    """A step folder with these weights."""
    arrays = {"model": weights, "optimizer": {"step": np.array(0)}}
    return folder.save(out, 1, arrays, asdict(CONFIG), ByteTokenizer().describe(), ABOUT)


def theirs(folder=None):
    """transformers' model of a folder, or one of their own with random weights."""
    transformers = pytest.importorskip("transformers")
    if folder:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
        assert not any(report.values())  # nothing missing, nothing left over
        return model.eval()
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


def tensors(folder) -> dict[str, bytes]:
    """Name -> dtype, shape and bytes, under the names that both of us read."""
    loaded = safetensors.numpy.load_file(folder / "model.safetensors")
    return {n.removeprefix("transformer."): (a.dtype, a.shape, a.tobytes()) for n, a in loaded.items()}


def assert_same_logits(ours: MiniGPT, their_model) -> None:
    with torch.no_grad():
        tokens = torch.from_numpy(TOKENS)
        torch.testing.assert_close(ours(tokens), their_model(tokens).logits, rtol=0, atol=1e-5)


def test_a_step_folder_opens_in_transformers_with_our_logits(tmp_path):
    ours = MiniGPT.from_weights(CONFIG, initial_weights(CONFIG, 1)).eval()
    assert_same_logits(ours, theirs(save(tmp_path, initial_weights(CONFIG, 1))))


def test_a_folder_of_transformers_opens_here_with_their_logits(tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path)
    ours = MiniGPT.from_pretrained(tmp_path)
    assert not ours.training
    assert_same_logits(ours, model)


def test_both_generate_the_same_text_at_temperature_zero(tmp_path):
    """With positions that weigh enough to make more than one token repeated."""
    weights = {name: 20 * w if name == "wpe.weight" else w for name, w in initial_weights(CONFIG, 1).items()}
    folder = save(tmp_path, weights)
    ours = MiniGPT.from_pretrained(folder)

    @torch.no_grad()
    def logits(tokens):
        return ours(torch.from_numpy(tokens))[:, -1].numpy()

    got = list(sample.generate(logits, TOKENS[0, :5], 32, 20, temperature=0))
    prompt = torch.from_numpy(TOKENS[:1, :5])
    expected = theirs(folder).generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert got == expected[0, 5:].tolist()
    assert len(set(got)) > 3


def test_there_and_back_no_byte_changes(tmp_path):
    """transformers' folder -> ours -> transformers' -> ours: the weights keep their bits."""
    theirs().save_pretrained(tmp_path / "a")
    weights, _, _ = checkpoint.load_model(tmp_path / "a")
    ours = save(tmp_path / "b", weights)
    theirs(ours).save_pretrained(tmp_path / "c")
    assert tensors(tmp_path / "a") == tensors(ours) == tensors(tmp_path / "c")


@pytest.mark.parametrize("compiled", [False, True])
def test_names_on_disk_are_gpt2s_whatever_wraps_the_model(compiled):
    """torch.compile's wrapper would call them _orig_mod.h.0…, DistributedDataParallel's module.h.0…"""
    backend = build("torch", "fp32", CONFIG, compile=compiled)
    names = [p.name for p in parameters(CONFIG)]
    state = backend.state()
    assert sorted(state["model"]) == sorted(names)
    moments = [f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names]
    assert sorted(state["optimizer"]) == sorted([*moments, "step"])


# ---- published models by name


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A huggingface_hub whose network is a folder with a small GPT-2."""
    theirs().save_pretrained(tmp_path / "snapshot")
    asked = []

    def hf_hub_download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(tmp_path / "snapshot" / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download))
    monkeypatch.chdir(tmp_path)
    return asked


def test_gpt2_by_name_comes_from_the_hub(hub):
    assert_same_logits(MiniGPT.from_pretrained("gpt2"), theirs())
    assert hub == [("openai-community/gpt2", "config.json"), ("openai-community/gpt2", "model.safetensors")]


def test_a_folder_of_that_name_goes_before_the_hub(hub, tmp_path):
    (tmp_path / "gpt2").mkdir()
    assert published("gpt2") is None
    assert hub == []


def test_without_the_package_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # what import makes an ImportError of
    assert sample.main(["--checkpoint", "gpt2", "--prompt", "a"]) == 2
    line = "sample.py: error: gpt2: needs huggingface_hub: pip install huggingface_hub, or name a folder\n"
    assert capsys.readouterr().err == line


def test_without_a_network_one_line_says_so(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*arguments):  # what the package raises where HF_HUB_OFFLINE is set and its cache is empty
        raise hub.errors.LocalEntryNotFoundError("no connection\nand much more")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hf_hub_download", offline)
    with pytest.raises(BadInput, match=r"^gpt2: cannot be downloaded \(no connection\): .*$"):
        published("gpt2")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"n_head": 0}, "n_head is 0"),
        ({"n_head": 3}, "not divisible by n_head 3"),
        ({"n_embd": -32}, "n_embd is -32"),
        ({"n_layer": 3}, "h.2.mlp.c_fc.weight"),
        ({"n_positions": 64}, "wpe.weight"),
        ({"vocab_size": 255}, "wte.weight"),
    ],
    ids=str,
)
def test_a_model_that_is_not_computed_here_is_refused_in_one_line(changes, line, tmp_path):
    folder = save(tmp_path, initial_weights(CONFIG, 0))
    (folder / "manifest.json").unlink()  # as a folder of transformers, whose files have no hashes
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=line):
        checkpoint.load_model(folder)


def test_bf16_files_are_refused_in_one_line(tmp_path):
    folder = save(tmp_path, initial_weights(CONFIG, 0))
    (folder / "manifest.json").unlink()
    safetensors.torch.save_file({"wte.weight": torch.zeros(2, 2).bfloat16()}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="BF16: save the model in fp32"):
        checkpoint.load_model(folder)


@pytest.mark.parametrize("hashes", [None, [], "x", {}, {"config.json": 5}, {"other": "00"}])
def test_a_manifest_without_the_hashes_is_one_line(tmp_path, hashes):
    model = save(tmp_path, initial_weights(CONFIG, 0))
    manifest = json.loads((model / "manifest.json").read_text())
    (model / "manifest.json").write_text(json.dumps(manifest | {"sha256": hashes}))
    with pytest.raises(BadInput, match=r"manifest\.json: damaged, it has no sha256 of config\.json"):
        MiniGPT.from_pretrained(model)


def test_a_damaged_step_folder_is_refused_by_from_pretrained(tmp_path):
    model = save(tmp_path, initial_weights(CONFIG, 0))
    raw = bytearray((model / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (model / "model.safetensors").write_bytes(raw)
    with pytest.raises(BadInput, match="its sha256 is not the manifest's"):
        MiniGPT.from_pretrained(model)
