"""The benchmark of recomputation: fewer layers between checkpoints take less memory, on both backends that can."""

import pytest

from benchmarks import recompute
from settings import PRESETS


def test_layers_between_checkpoints():
    assert recompute.between(1) == [0]
    assert recompute.between(4) == [0, 1, 2]
    assert recompute.between(12) == [0, 1, 2, 4, 8]


@pytest.mark.parametrize("backend", ["engine", "torch"])
def test_rows(monkeypatch, backend):
    monkeypatch.setitem(PRESETS, "tiny", dict(n_layer=4, n_head=2, n_embd=32, block_size=32, batch_size=8))
    monkeypatch.setattr(recompute, "seconds", lambda steps, *_, **__: {layers: [1.0, 2.0] for layers in steps})
    rows = {row.case: row for row in recompute.rows(backend, "bf16", "tiny", device="cpu")}
    assert list(rows) == [f"recompute/{backend}/bf16/{n}/{kind}" for n in (1, 2) for kind in ("memory", "time")]
    one, two = (rows[f"recompute/{backend}/bf16/{n}/memory"] for n in (1, 2))
    assert one.ours < two.ours < one.theirs == two.theirs
    assert one.ratio > 1.3
    assert rows[f"recompute/{backend}/bf16/1/time"].ours == 1500.0
