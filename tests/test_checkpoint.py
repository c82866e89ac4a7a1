"""One checkpoint on disk."""

import errno
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from base.errors import BadInput
from run import checkpoint
from run.folder import find, save
from tests.checkpoints import (
    ABOUT,
    CONFIG,
    FILES,
    TOKENIZER,
    altered,
    arrays,
    assert_same,
    content,
    fails_at_write,
    pointed,
    replace_model,
    save_step,
)

# ---- writing and reading


def test_arrays_tokenizer_and_manifest_come_back_as_they_were(tmp_path):
    folder = save_step(tmp_path, 7)
    got, tokenizer, manifest = checkpoint.load(folder)
    assert folder == tmp_path / "step-7"
    assert_same(got, arrays(7))
    assert tokenizer == TOKENIZER
    assert manifest["step"] == 7
    assert manifest["best_val"] == 1 / 3


def test_saving_leaves_the_arrays_alone(tmp_path):
    state = arrays(1)
    save(tmp_path, 1, state, asdict(CONFIG), TOKENIZER, ABOUT)
    assert_same(state, arrays(1))


def test_a_step_folder_holds_json_and_safetensors_and_no_pickle(tmp_path):
    folder = save_step(tmp_path, 1)
    assert content(folder).keys() == FILES
    for name, raw in content(folder).items():
        if name.endswith(".json"):
            json.loads(raw)
        else:
            header_length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + header_length])
            assert len(raw) == 8 + header_length + max(t["data_offsets"][1] for t in header.values() if "dtype" in t)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    one, other = save_step(tmp_path / "one", 3), save_step(tmp_path / "other", 3)
    assert content(one) == content(other)


def test_an_existing_step_is_replaced(tmp_path):
    save_step(tmp_path, 5, seed=1)
    save_step(tmp_path, 5, seed=2)
    assert_same(checkpoint.load(tmp_path / "step-5")[0], arrays(2))
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", "latest.json"}


# ---- failures in the middle


WRITES = 7  # five files, latest.json, best.json


def test_a_save_writes_this_many_files(tmp_path, monkeypatch):
    fails_at_write(monkeypatch, WRITES)
    save_step(tmp_path, 1, best=True)


@pytest.mark.parametrize("call", range(WRITES))
def test_after_a_failed_save_the_previous_checkpoints_load(tmp_path, monkeypatch, call):
    save_step(tmp_path, 1, best=True)
    save_step(tmp_path, 2)
    with monkeypatch.context() as full_disk:
        fails_at_write(full_disk, call)
        with pytest.raises(OSError, match="No space"):
            save_step(tmp_path, 3, best=True)
    for step in (1, 2):
        assert_same(checkpoint.load(tmp_path / f"step-{step}")[0], arrays(step))
    latest = find(str(tmp_path))
    assert_same(checkpoint.load(latest)[0], arrays(int(latest.name.removeprefix("step-"))))
    assert pointed(tmp_path, "best.json") == 1
    save_step(tmp_path, 3)
    assert find(str(tmp_path)).name == "step-3"


def test_a_failed_save_says_what_it_needs_and_what_is_free(tmp_path, monkeypatch):
    needed = sum(map(len, content(save_step(tmp_path, 1)).values()))
    fails_at_write(monkeypatch, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(checkpoint.NotSaved) as error:
        save_step(tmp_path, 1)
    words = f"step 1 is not saved: No space left on device: {needed:,} bytes needed, 4,096 free in {tmp_path}"
    assert str(error.value) == words


@pytest.mark.parametrize("call", range(WRITES))
def test_a_failed_save_leaves_no_temporary(tmp_path, monkeypatch, call):
    save_step(tmp_path, 1)
    fails_at_write(monkeypatch, call)
    with pytest.raises(OSError, match="No space"):
        save_step(tmp_path, 2, best=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"step-1", "step-2", "latest.json"}


def test_a_failed_replacement_leaves_the_step_as_it_was(tmp_path, monkeypatch):
    save_step(tmp_path, 1, seed=5)
    fails_at_write(monkeypatch, 4)
    with pytest.raises(OSError, match="No space"):
        save_step(tmp_path, 1, seed=6)
    assert_same(checkpoint.load(tmp_path / "step-1")[0], arrays(5))


def test_a_replacement_that_cannot_be_renamed_leaves_the_step_as_it_was(tmp_path, monkeypatch):
    save_step(tmp_path, 1, seed=5)
    rename = Path.rename

    def no_rename_into_place(path: Path, target: Path):
        if path.suffix == ".tmp":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", no_rename_into_place)
        with pytest.raises(checkpoint.NotSaved, match="Permission denied"):
            save_step(tmp_path, 1, seed=6)
    assert_same(checkpoint.load(tmp_path / "step-1")[0], arrays(5))


# ---- damage


@pytest.mark.parametrize("name", sorted(FILES))
def test_an_altered_byte_is_refused_and_its_file_named(tmp_path, name):
    folder = save_step(tmp_path, 1)
    size = (folder / name).stat().st_size
    for _ in altered(folder / name, masks=[0x80], places=[0, 9, size // 2, size - 1]):
        with pytest.raises(BadInput) as error:
            checkpoint.load(folder)
        assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_truncated_file_is_refused_and_named(tmp_path, name):
    folder = save_step(tmp_path, 1)
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    with pytest.raises(BadInput) as error:
        checkpoint.load(folder)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_refused_and_named(tmp_path, name):
    folder = save_step(tmp_path, 1)
    (folder / name).unlink()
    with pytest.raises(BadInput) as error:
        checkpoint.load(folder)
    assert str(folder / name) in str(error.value)


def test_a_manifest_with_any_byte_altered_is_refused_or_means_the_same(tmp_path):
    folder = save_step(tmp_path, 1)
    manifest = checkpoint.read_manifest(folder)
    for _ in altered(folder / "manifest.json", masks=[0x01]):
        with suppress(BadInput):
            assert checkpoint.read_manifest(folder) == manifest


def test_a_pointer_with_any_bit_altered_is_refused(tmp_path):
    save_step(tmp_path, 1)
    for _ in altered(tmp_path / "latest.json", masks=[1 << bit for bit in range(8)]):
        with pytest.raises(BadInput):
            checkpoint.load(find(str(tmp_path)))


@pytest.mark.parametrize("version", [0, 1, None])
def test_another_format_version_is_refused(tmp_path, version):
    folder = save_step(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))
    with pytest.raises(BadInput, match=f"version {version}.* reads 2"):
        checkpoint.load(folder)


# ---- Hugging Face


def test_weights_as_transformers_names_them_are_read(tmp_path):
    folder = save_step(tmp_path, 1)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {f"transformer.{name}": array for name, array in tensors.items()}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    for layer in range(CONFIG.n_layer):
        tensors[f"transformer.h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 12, 12), dtype=np.float32))
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, dtype=np.float32)
    replace_model(folder, safetensors.numpy.save(tensors))
    assert_same(checkpoint.load(folder)[0], arrays(1))


def test_a_model_file_that_is_no_safetensors_is_refused(tmp_path):
    folder = save_step(tmp_path, 1)
    replace_model(folder, b"a pickle, say, whose hash is right")
    with pytest.raises(BadInput, match="safetensors"):
        checkpoint.load(folder)


def test_arrays_that_do_not_lie_in_c_order_are_saved_by_value(tmp_path):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    odd = {"a": matrix.T, "b": matrix[:, ::-1], "c": np.broadcast_to(matrix[0], (4, 3)), "d": np.asfortranarray(matrix)}
    folder = save(tmp_path, 1, {"model": odd, "optimizer": odd}, asdict(CONFIG), TOKENIZER, ABOUT)
    arrays, _, _ = checkpoint.load(folder)
    for kind in arrays:
        for name, array in odd.items():
            assert np.array_equal(arrays[kind][name], array), (kind, name)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{}", b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("name", ["manifest.json", "../latest.json"])
def test_json_of_another_shape_is_damaged_and_no_traceback(tmp_path, name, content):
    folder = save_step(tmp_path, 1)
    (folder / name).write_bytes(content)
    with pytest.raises(BadInput):
        checkpoint.load(find(str(tmp_path)))


def test_a_manifest_that_names_other_files_is_refused(tmp_path):
    folder = save_step(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["../../secret"] = manifest["sha256"].pop("config.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="names other files"):
        checkpoint.load(folder)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_flushed_is_no_fault_but_a_broken_disk_is(tmp_path, monkeypatch, number):
    flush = os.fsync

    def refuse(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(checkpoint.NotSaved, match="Input/output error"):
            save_step(tmp_path, 1)
    else:
        assert checkpoint.damage(save_step(tmp_path, 1)) is None
