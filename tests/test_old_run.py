"""A run that an earlier version left goes on: tests/old_run/ was made once and never changes.

It is a small fp16 run of 12 steps, some of them skipped, whose step 8 is here. corpus.txt is its text.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import sample
import train
from run import checkpoint
from run.log import read_log
from tests.conftest import numbers

OLD_RUN = Path(__file__).with_name("old_run")


@pytest.fixture
def old_run(tmp_path) -> Path:
    return shutil.copytree(OLD_RUN, tmp_path / "old_run")


def go_on(out: Path, *flags: str) -> None:
    assert train.main(["--resume", str(out), "--corpus", str(OLD_RUN / "corpus.txt"), "--device", "cpu", *flags]) == 0


def change_manifest(folder: Path, **changes) -> None:
    """Other values in a manifest, with its digest; a value of None removes the key."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": checkpoint._digest(manifest)}))


def test_an_old_run_goes_on_as_it_went_on_then(old_run):
    then = read_log(old_run / "log.csv")
    go_on(old_run)
    now = read_log(old_run / "log.csv")
    assert numbers(now[:8]) == numbers(then[:8])
    for row, was in zip(now[8:], then[8:], strict=True):
        assert (row.step, row.lr, row.scale, row.skipped) == (was.step, was.lr, was.scale, was.skipped)
        # On the CPU that made it they are equal; another one adds up in another order, which tips fp16's roundings.
        np.testing.assert_allclose(row.loss, was.loss, rtol=1e-4, err_msg=f"step {row.step}")
    assert now[-1].skipped > then[8].skipped


def test_an_old_checkpoint_is_sampled(capsys):
    flags = ["--checkpoint", str(OLD_RUN), "--prompt", "3 times", "--tokens", "12"]
    assert sample.main([*flags, "--temperature", "0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("3 times")


def test_manifest_keys_of_a_later_version_are_named_and_kept(old_run, capsys):
    change_manifest(old_run / "step-8", world=4)
    go_on(old_run)
    note = f"note    {old_run / 'step-8' / 'manifest.json'}: world: unknown to this version, and kept\n"
    assert note in capsys.readouterr().out
    assert checkpoint.read_manifest(old_run / "step-12")["world"] == 4


def test_manifest_keys_that_came_later_have_defaults(old_run):
    """As checkpoints are that were saved before there were these keys."""
    change_manifest(old_run / "step-8", versions=None, best_val=None)
    assert checkpoint.damage(old_run / "step-8") is None
    go_on(old_run)


def test_files_of_a_later_version_are_checked_and_named(old_run, capsys):
    folder = old_run / "step-8"
    shutil.copy(folder / "config.json", folder / "shards.json")
    hashes = json.loads((folder / "manifest.json").read_text())["sha256"]
    change_manifest(folder, sha256=hashes | {"shards.json": hashes["config.json"]})
    assert checkpoint.damage(folder) is None
    go_on(old_run)
    assert "shards.json: unknown to this version, and left there" in capsys.readouterr().out
    (folder / "shards.json").write_text("{}")
    assert "shards.json: damaged" in checkpoint.damage(folder)
