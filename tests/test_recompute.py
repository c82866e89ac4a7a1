"""The benchmark of recomputation: fewer layers between checkpoints take less memory, on both backends that can."""

import pytest

from benchmarks import recompute
from settings import PRESETS, Settings


@pytest.mark.parametrize(("n_layer", "counts"), [(1, [0]), (4, [0, 1, 2]), (12, [0, 1, 2, 4, 8])])
def test_the_layers_between_checkpoints_are_powers_of_two(n_layer, counts):
    assert recompute.layer_counts(n_layer) == counts


@pytest.mark.parametrize("backend", ["engine", "torch"])
def test_recomputing_more_takes_less_memory(monkeypatch, backend):
    monkeypatch.setitem(PRESETS, "tiny", dict(n_layer=4, n_head=2, n_embd=32, block_size=32))
    monkeypatch.setattr(recompute, "time_in_turns", lambda steps, *_, **__: {name: [1.0, 2.0] for name in steps})
    settings = Settings(
        backend=backend, device="cpu", dtype="bf16", preset="tiny", batch_size=8, loss_scaling="on", kernel="off"
    )
    rows = {row.case: row for row in recompute.compare(settings)}
    assert list(rows) == [f"recompute/{backend}/bf16/{n}/{kind}" for n in (1, 2) for kind in ("memory", "time")]
    one, two = (rows[f"recompute/{backend}/bf16/{n}/memory"] for n in (1, 2))
    assert one.ours < two.ours < one.theirs == two.theirs
    assert one.ratio > 1.3
    assert rows[f"recompute/{backend}/bf16/1/time"].ours == 1500.0
