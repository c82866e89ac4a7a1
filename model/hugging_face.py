"""GPT-2 as Hugging Face keeps it: config.json, the weights' names and layout, and the published models by name."""

import re
from importlib import import_module
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from base import files
from base.errors import BadInput

CONV1D = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")  # kept as (in, out)
NOT_WEIGHTS = re.compile(r"(^lm_head\.weight|\.attn\.bias|\.attn\.masked_bias)$")  # the tied head; old causal masks
LARGEST = 2**20  # a size beyond this is taken for damage
PUBLISHED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def config_of(config: dict) -> dict:
    """transformers' GPT2Config for GPTConfig's fields, so that transformers opens a step folder as it lies."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config["vocab_size"],
        "n_positions": config["block_size"],
        "n_embd": config["n_embd"],
        "n_layer": config["n_layer"],
        "n_head": config["n_head"],
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": config["dropout"],
        "attn_pdrop": config["dropout"],
        "resid_pdrop": config["dropout"],
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def read_config(config: dict, path: Path) -> dict:
    """GPTConfig's fields without dropout, from a GPT2Config. BadInput where this project cannot compute that model."""
    ours = {"vocab_size": "vocab_size", "n_positions": "block_size"} | {n: n for n in ("n_layer", "n_head", "n_embd")}
    for key in ours:
        if type(config.get(key)) is not int:
            raise BadInput(f"{path}: {key} is missing or not a number: use another checkpoint")
        if not 1 <= config[key] <= LARGEST:
            raise BadInput(f"{path}: {key} is {config[key]}: must be between 1 and {LARGEST}")
    if config["n_embd"] % config["n_head"]:
        raise BadInput(f"{path}: n_embd {config['n_embd']} is not divisible by n_head {config['n_head']}")
    supported = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new",),
        "layer_norm_epsilon": (1e-5,),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "n_inner": (None, 4 * config["n_embd"]),
    }
    for key, values in supported.items():
        if config.get(key, values[0]) not in values:
            raise BadInput(f"{path}: {key} is {config[key]!r}, and only {values[0]!r} is known here")
    return {name: config[key] for key, name in ours.items()}


def shapes(sizes: dict) -> dict[str, tuple[int, ...]]:
    """The shapes that a model of these sizes has, of a few weights that show every size: {name: shape}."""
    C, last = sizes["n_embd"], sizes["n_layer"] - 1
    embeddings = {"wte.weight": (sizes["vocab_size"], C), "wpe.weight": (sizes["block_size"], C)}
    return embeddings | {f"h.{layer}.mlp.c_fc.weight": (4 * C, C) for layer in (0, last)}


def weights_of(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our weights in GPT-2's layout, which keeps its linear layers ("Conv1D") as (in, out). Views, no copies."""
    return {name: w.T if CONV1D.search(name) else w for name, w in weights.items()}


def read_weights(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights by our names and in our layout, from GPT-2's. The tied head's copy and old causal masks are left out."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    weights = {name: tensor for name, tensor in weights.items() if not NOT_WEIGHTS.search(name)}
    return {name: np.ascontiguousarray(w.T) if CONV1D.search(name) else w for name, w in weights.items()}


def load(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    """The weights by our names and GPTConfig's fields without dropout, from a folder of transformers' or a step folder.

    Hashes are checked where a manifest lies beside the files. BadInput where weights and config.json do not fit.
    """
    manifest = folder / "manifest.json"
    has_manifest = manifest.is_file()
    hashes = files.read_json(manifest).get("sha256") if has_manifest else None

    def read(name: str) -> bytes:
        if not has_manifest:
            return files.read(folder / name)
        if not isinstance(hashes, dict) or not isinstance(hashes.get(name), str):
            raise BadInput(f"{manifest}: damaged, it has no sha256 of {name}: use another checkpoint")
        return files.read_checked(folder / name, hashes[name])

    sizes = read_config(files.parse_json(read("config.json"), folder / "config.json"), folder / "config.json")
    weights = read_weights(tensors(read("model.safetensors"), folder / "model.safetensors"))
    for name, shape in shapes(sizes).items():  # before a model of those sizes is made
        if name not in weights or weights[name].shape != shape:
            there = weights[name].shape if name in weights else "no such tensor"
            raise BadInput(f"{folder}: {name}: config.json wants {shape}, model.safetensors has {there}")
    return weights, sizes


def tensors(content: bytes, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, which was read from `path`."""
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise BadInput(f"{path}: not readable as safetensors ({error}): use another checkpoint") from None
    except KeyError as error:  # a number type that NumPy lacks, such as bf16
        raise BadInput(f"{path}: has tensors of type {error.args[0]}: save the model in fp32") from None


def published(name: str) -> Path | None:
    """The folder of a published GPT-2 by its name, in huggingface_hub's cache; it is downloaded if it is not there yet.

    None where the name is not one of PUBLISHED, or where a folder of that name lies here. BadInput says why a download
    failed.
    """
    if name not in PUBLISHED or Path(name).exists():
        return None
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise BadInput(f"{name}: needs huggingface_hub: pip install huggingface_hub, or name a folder") from None
    try:
        paths = [hub.hf_hub_download(f"openai-community/{name}", file) for file in ("config.json", "model.safetensors")]
    except Exception as error:  # errors of the package or of its HTTP library; both change from version to version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"{name}: cannot be downloaded ({reason}): try again with a network, or name a folder") from None
    return Path(paths[0]).parent
