"""A run on disk."""

import errno
import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from base import files
from base.errors import BadInput
from data.tokenizers import CharTokenizer
from model.config import GPTConfig, parameters
from run import checkpoint

CONFIG = GPTConfig(vocab_size=5, block_size=12, n_layer=2, n_head=2, n_embd=8, dropout=0.1)
TOKENIZER = CharTokenizer("abcde").describe()
FILES = {
    "config.json",
    "model.safetensors",
    "minigpt_tokenizer.json",
    "optimizer.safetensors",
    "manifest.json",
}
# What train.py adds to a manifest, of the types that it must have.
ABOUT = {"best_val": 1.0, "skipped": 0, "consecutive_skips": 0, "tokenizer_fingerprint": ""}
ABOUT |= {key: {} for key in ("settings", "config", "scaler", "corpus", "compute")}


def arrays(seed: int = 0) -> dict:
    """What Backend.state() returns, with random numbers."""
    random = np.random.default_rng(seed)

    def tensors(prefix=""):
        return {prefix + p.name: random.normal(size=p.shape).astype(np.float32) for p in parameters(CONFIG)}

    moments = tensors("exp_avg.") | tensors("exp_avg_sq.") | {"step": np.array(seed, dtype=np.int64)}
    return {"model": tensors(), "optimizer": moments}


def save(out: Path, step: int, best: bool = False, seed: int | None = None) -> Path:
    """A checkpoint whose arrays are drawn with `seed`, by default the step."""
    state = arrays(step if seed is None else seed)
    return checkpoint.save(out, step, state, asdict(CONFIG), TOKENIZER, ABOUT | {"best_val": 1 / 3}, best)


def assert_same(got: dict, expected: dict) -> None:
    for kind in ("model", "optimizer"):
        assert got[kind].keys() == expected[kind].keys()
        for name, array in expected[kind].items():
            assert got[kind][name].dtype == array.dtype
            assert got[kind][name].shape == array.shape
            assert got[kind][name].tobytes() == array.tobytes()


def content(out: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def folders(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if path.is_dir()}


def pointed(out: Path, name: str) -> int:
    return json.loads((out / name).read_text())["step"]


def altered(path: Path, masks, places=None):
    """Alters one byte after the other, by default all; yields while a byte is altered."""
    raw = path.read_bytes()
    for place, mask in product(range(len(raw)) if places is None else places, masks):
        changed = bytearray(raw)
        changed[place] ^= mask
        path.write_bytes(changed)
        yield place


# ---- writing and reading


def test_arrays_tokenizer_and_manifest_come_back_as_they_were(tmp_path):
    folder = save(tmp_path, 7)
    got, tokenizer, manifest = checkpoint.load(folder)
    assert folder == tmp_path / "step-7"
    assert_same(got, arrays(7))
    assert tokenizer == TOKENIZER
    assert manifest["step"] == 7
    assert manifest["best_val"] == 1 / 3


def test_saving_leaves_the_arrays_alone(tmp_path):
    state = arrays(1)
    checkpoint.save(tmp_path, 1, state, asdict(CONFIG), TOKENIZER, ABOUT)
    assert_same(state, arrays(1))


def test_a_step_folder_holds_json_and_safetensors_and_no_pickle(tmp_path):
    folder = save(tmp_path, 1)
    assert content(folder).keys() == FILES
    for name, raw in content(folder).items():
        if name.endswith(".json"):
            json.loads(raw)
        else:
            header_length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + header_length])
            assert len(raw) == 8 + header_length + max(t["data_offsets"][1] for t in header.values() if "dtype" in t)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    one, other = save(tmp_path / "one", 3), save(tmp_path / "other", 3)
    assert content(one) == content(other)


def test_latest_follows_each_save_and_best_only_the_best(tmp_path):
    save(tmp_path, 1, best=True)
    save(tmp_path, 2)
    assert pointed(tmp_path, "latest.json") == 2
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 1, "val": 1 / 3}
    save(tmp_path, 3, best=True)
    assert pointed(tmp_path, "latest.json") == pointed(tmp_path, "best.json") == 3


def test_the_newest_two_and_the_best_stay(tmp_path):
    save(tmp_path, 9)
    save(tmp_path, 10, best=True)
    for step in (11, 100, 101):  # as words, "100" sorts before "11"
        save(tmp_path, step)
    assert folders(tmp_path) == {"step-10", "step-100", "step-101"}
    save(tmp_path, 102, best=True)
    assert folders(tmp_path) == {"step-101", "step-102"}


def test_the_step_just_saved_stays_also_among_later_ones(tmp_path):
    save(tmp_path, 50)
    save(tmp_path, 60)
    save(tmp_path, 10)  # a run resumed from an early checkpoint
    assert pointed(tmp_path, "latest.json") == 10
    assert_same(checkpoint.load(checkpoint.find(str(tmp_path)))[0], arrays(10))


def test_an_existing_step_is_replaced(tmp_path):
    save(tmp_path, 5, seed=1)
    save(tmp_path, 5, seed=2)
    assert_same(checkpoint.load(tmp_path / "step-5")[0], arrays(2))
    assert {path.name for path in tmp_path.iterdir()} == {"step-5", "latest.json"}


# ---- failures in the middle


def fails_at_write(monkeypatch, call: int) -> None:
    """The disk is full in the middle of the `call`-th file, counted from 0."""
    calls, write = iter(range(1000)), files.write

    def full(path: Path, content: bytes):
        if next(calls) == call:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(files, "write", full)


WRITES = 7  # five files, latest.json, best.json


def test_a_save_writes_this_many_files(tmp_path, monkeypatch):
    fails_at_write(monkeypatch, WRITES)
    save(tmp_path, 1, best=True)


@pytest.mark.parametrize("call", range(WRITES))
def test_after_a_failed_save_the_previous_checkpoints_load(tmp_path, monkeypatch, call):
    save(tmp_path, 1, best=True)
    save(tmp_path, 2)
    with monkeypatch.context() as full_disk:
        fails_at_write(full_disk, call)
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, 3, best=True)
    for step in (1, 2):
        assert_same(checkpoint.load(tmp_path / f"step-{step}")[0], arrays(step))
    latest = checkpoint.find(str(tmp_path))
    assert_same(checkpoint.load(latest)[0], arrays(int(latest.name.removeprefix("step-"))))
    assert pointed(tmp_path, "best.json") == 1
    save(tmp_path, 3)
    assert checkpoint.find(str(tmp_path)).name == "step-3"


def test_a_failed_save_says_what_it_needs_and_what_is_free(tmp_path, monkeypatch):
    needed = sum(map(len, content(save(tmp_path, 1)).values()))
    fails_at_write(monkeypatch, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(checkpoint.NotSaved) as error:
        save(tmp_path, 1)
    words = f"step 1 is not saved: No space left on device: {needed:,} bytes needed, 4,096 free in {tmp_path}"
    assert str(error.value) == words


@pytest.mark.parametrize("call", range(WRITES))
def test_a_failed_save_leaves_no_temporary(tmp_path, monkeypatch, call):
    save(tmp_path, 1)
    fails_at_write(monkeypatch, call)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, best=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"step-1", "step-2", "latest.json"}


def test_a_failed_replacement_leaves_the_step_as_it_was(tmp_path, monkeypatch):
    save(tmp_path, 1, seed=5)
    fails_at_write(monkeypatch, 4)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 1, seed=6)
    assert_same(checkpoint.load(tmp_path / "step-1")[0], arrays(5))


def test_a_replacement_that_cannot_be_renamed_leaves_the_step_as_it_was(tmp_path, monkeypatch):
    save(tmp_path, 1, seed=5)
    rename = Path.rename

    def no_rename_into_place(path: Path, target: Path):
        if path.suffix == ".tmp":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", no_rename_into_place)
        with pytest.raises(checkpoint.NotSaved, match="Permission denied"):
            save(tmp_path, 1, seed=6)
    assert_same(checkpoint.load(tmp_path / "step-1")[0], arrays(5))


# ---- damage


@pytest.mark.parametrize("name", sorted(FILES))
def test_an_altered_byte_is_refused_and_its_file_named(tmp_path, name):
    folder = save(tmp_path, 1)
    size = (folder / name).stat().st_size
    for _ in altered(folder / name, masks=[0x80], places=[0, 9, size // 2, size - 1]):
        with pytest.raises(BadInput) as error:
            checkpoint.load(folder)
        assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_truncated_file_is_refused_and_named(tmp_path, name):
    folder = save(tmp_path, 1)
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    with pytest.raises(BadInput) as error:
        checkpoint.load(folder)
    assert str(folder / name) in str(error.value)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_refused_and_named(tmp_path, name):
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    with pytest.raises(BadInput) as error:
        checkpoint.load(folder)
    assert str(folder / name) in str(error.value)


def test_a_manifest_with_any_byte_altered_is_refused_or_means_the_same(tmp_path):
    folder = save(tmp_path, 1)
    manifest = checkpoint.read_manifest(folder)
    for _ in altered(folder / "manifest.json", masks=[0x01]):
        with suppress(BadInput):
            assert checkpoint.read_manifest(folder) == manifest


def test_a_pointer_with_any_bit_altered_is_refused(tmp_path):
    save(tmp_path, 1)
    for _ in altered(tmp_path / "latest.json", masks=[1 << bit for bit in range(8)]):
        with pytest.raises(BadInput):
            checkpoint.load(checkpoint.find(str(tmp_path)))


@pytest.mark.parametrize("version", [0, 1, None])
def test_another_format_version_is_refused(tmp_path, version):
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": version}))
    with pytest.raises(BadInput, match=f"version {version}.* reads 2"):
        checkpoint.load(folder)


# ---- finding


def test_a_run_folder_means_its_latest_step(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 10)
    assert checkpoint.find(str(tmp_path)) == tmp_path / "step-10"


def test_a_step_folder_means_itself(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 10)
    assert checkpoint.find(str(tmp_path / "step-2")) == tmp_path / "step-2"


def test_auto_means_the_run_in_out(tmp_path):
    save(tmp_path / "one", 1)
    save(tmp_path / "other", 2)
    assert checkpoint.find("auto", str(tmp_path / "one")) == tmp_path / "one" / "step-1"


def test_auto_without_out_means_the_newest_run_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["empty", "newest", "older"]):
        run = Path("runs", name)
        run.mkdir(parents=True)
        if name != "empty":
            save(run, 4 + age)
            os.utime(run / "latest.json", (1e9 - age, 1e9 - age))
    assert checkpoint.find("auto") == Path("runs", "newest", "step-5")


@pytest.mark.parametrize(
    ("wanted", "out", "named"),
    [("auto", None, "runs"), ("auto", "out", "out"), ("missing", None, "missing"), ("empty", None, "empty")],
)
def test_where_there_is_no_checkpoint_the_place_is_named(tmp_path, monkeypatch, wanted, out, named):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(BadInput, match="no checkpoint") as error:
        checkpoint.find(wanted, out)
    assert named in str(error.value)


def test_a_pointer_to_a_step_that_is_gone_is_refused(tmp_path):
    shutil.rmtree(save(tmp_path, 3))
    with pytest.raises(BadInput, match="step-3"):
        checkpoint.load(checkpoint.find(str(tmp_path)))


# ---- removing a run


def test_a_checkpoint_is_recognised_and_a_log_or_a_killed_save_is_none(tmp_path):
    (tmp_path / "log.csv").touch()
    (tmp_path / ".step-2.4711.tmp").mkdir()
    assert not checkpoint.holds_run(tmp_path)
    save(tmp_path, 1)
    (tmp_path / "latest.json").unlink()
    assert checkpoint.holds_run(tmp_path)


def replace(out: Path, step: int) -> Path:
    return checkpoint.save(out, step, arrays(7), asdict(CONFIG), TOKENIZER, ABOUT, replace=True)


def test_replacing_a_run_removes_all_of_it_but_the_new_log(tmp_path):
    save(tmp_path, 30, best=True)
    for name in ("log.csv", "loss.png", "log.csv.old"):
        (tmp_path / name).touch()
    for name in (".step-2.4711.tmp", "step-40.damaged"):
        shutil.copytree(tmp_path / "step-30", tmp_path / name)
    replace(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {"step-20", "latest.json", "log.csv"}
    assert pointed(tmp_path, "latest.json") == 20


@pytest.mark.parametrize("call", range(5))
def test_a_run_is_not_replaced_before_the_new_checkpoint_is_whole(tmp_path, monkeypatch, call):
    save(tmp_path, 30, best=True)
    before = content(tmp_path)
    fails_at_write(monkeypatch, call)
    with pytest.raises(checkpoint.NotSaved):
        replace(tmp_path, 20)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["notes.txt", "step-1.txt", "mine/log.csv", "step-by-step/notes.txt", "step-7/mine.txt"]
)
def test_replacing_a_run_leaves_foreign_files(tmp_path, name):
    save(tmp_path, 1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    replace(tmp_path, 2)
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "step-1").exists()


# ---- going on


def damaged_run(out: Path) -> Path:
    """Checkpoints 1 (best), 2 and 3, of which the newest has one other byte."""
    for step in (1, 2, 3):
        save(out, step, best=step == 1)
    next(altered(out / "step-3" / "model.safetensors", masks=[1], places=[500]))
    return out


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole_and_the_damaged_is_named(tmp_path):
    folder, (line,) = checkpoint.find_intact(str(damaged_run(tmp_path)))
    assert folder == tmp_path / "step-2"
    assert str(tmp_path / "step-3" / "model.safetensors") in line


def test_where_no_checkpoint_is_whole_each_is_named(tmp_path):
    damaged_run(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "manifest.json").unlink()
    with pytest.raises(BadInput) as error:
        checkpoint.find_intact("auto", str(tmp_path))
    assert [f"step-{step}" in line for step, line in zip((3, 2, 1), str(error.value).splitlines(), strict=True)]


@pytest.mark.parametrize("pointer", [None, b"", b'{"step": 1}'])
def test_a_run_goes_on_from_its_newest_checkpoint_whatever_the_pointer_says(tmp_path, pointer):
    """A kill may come between the checkpoint and latest.json."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest.json").unlink()
    if pointer is not None:
        (tmp_path / "latest.json").write_bytes(pointer)
    assert checkpoint.find_intact("auto", str(tmp_path)) == (tmp_path / "step-2", [])


def test_the_damaged_newest_is_set_aside_and_the_pointers_follow(tmp_path):
    save(damaged_run(tmp_path), 3, best=True)
    next(altered(tmp_path / "step-3" / "optimizer.safetensors", masks=[1], places=[500]))
    checkpoint.set_aside_newer(tmp_path, 2)
    assert folders(tmp_path) == {"step-2", "step-3.damaged"}
    assert pointed(tmp_path, "latest.json") == 2
    assert not (tmp_path / "best.json").exists()


def test_a_whole_newer_checkpoint_is_not_set_aside(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    with pytest.raises(BadInput, match="step-2 is newer"):
        checkpoint.set_aside_newer(tmp_path, 1)
    assert folders(tmp_path) == {"step-1", "step-2"}


def test_what_killed_saves_left_is_cleared(tmp_path):
    before = content(save(tmp_path, 1).parent)
    for name in (".step-2.4711.tmp", ".step-1.4711.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    for name in (".latest.json.4711.tmp", ".log.csv.4711.tmp"):
        (tmp_path / name).touch()
    checkpoint.clear_leftovers(tmp_path)
    assert content(tmp_path) == before
    assert folders(tmp_path) == {"step-1"}


def test_a_step_that_was_being_replaced_when_the_process_died_comes_back(tmp_path):
    save(tmp_path, 1).rename(tmp_path / ".step-1.4711.old")
    checkpoint.clear_leftovers(tmp_path)
    assert_same(checkpoint.load(tmp_path / "step-1")[0], arrays(1))


def test_the_log_of_a_run_that_was_not_replaced_after_all_comes_back(tmp_path):
    (tmp_path / "log.csv.old").write_text("old")
    (tmp_path / "log.csv").write_text("new")
    checkpoint.clear_leftovers(tmp_path)
    assert content(tmp_path) == {"log.csv": b"old"}


# ---- Hugging Face


def test_weights_as_transformers_names_them_are_read(tmp_path):
    folder = save(tmp_path, 1)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {f"transformer.{name}": array for name, array in tensors.items()}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    for layer in range(CONFIG.n_layer):
        tensors[f"transformer.h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 12, 12), dtype=np.float32))
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, dtype=np.float32)
    replace_model(folder, safetensors.numpy.save(tensors))
    assert_same(checkpoint.load(folder)[0], arrays(1))


def test_a_model_file_that_is_no_safetensors_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    replace_model(folder, b"a pickle, say, whose hash is right")
    with pytest.raises(BadInput, match="safetensors"):
        checkpoint.load(folder)


def replace_model(folder: Path, raw: bytes) -> None:
    """Other model.safetensors, with its hash in the manifest."""
    (folder / "model.safetensors").write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["model.safetensors"] = hashlib.sha256(raw).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": checkpoint._digest(manifest)}))


def test_arrays_that_do_not_lie_in_c_order_are_saved_by_value(tmp_path):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    odd = {"a": matrix.T, "b": matrix[:, ::-1], "c": np.broadcast_to(matrix[0], (4, 3)), "d": np.asfortranarray(matrix)}
    folder = checkpoint.save(tmp_path, 1, {"model": odd, "optimizer": odd}, asdict(CONFIG), TOKENIZER, ABOUT)
    arrays, _, _ = checkpoint.load(folder)
    for kind in arrays:
        for name, array in odd.items():
            assert np.array_equal(arrays[kind][name], array), (kind, name)


@pytest.mark.parametrize("content", [b"[]", b"null", b"{}", b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("name", ["manifest.json", "../latest.json"])
def test_json_of_another_shape_is_damaged_and_no_traceback(tmp_path, name, content):
    folder = save(tmp_path, 1)
    (folder / name).write_bytes(content)
    with pytest.raises(BadInput):
        checkpoint.load(checkpoint.find(str(tmp_path)))


def test_a_damaged_pointer_does_not_end_a_run(tmp_path):
    save(tmp_path, 1, best=True)
    (tmp_path / "best.json").write_text("")
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert checkpoint.find(str(tmp_path)).name == "step-4"


def test_a_manifest_that_names_other_files_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["../../secret"] = manifest["sha256"].pop("config.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="names other files"):
        checkpoint.load(folder)
