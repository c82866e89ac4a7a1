"""One line a flag: what stands there is what the command line, a preset, a checkpoint and a resumed run do with it."""

from dataclasses import fields, replace

import pytest

from amp.formats import FORMATS
from base.flags import name_of, out_of_bounds, type_of
from data.tokenizers import TOKENIZERS
from model.backends import MODULES
from settings import PRESETS, Settings, flags_with, saved_flags

RULES = ("changes", "schedule", "harmless", "fixed", "refused", "again", "once")
FIELDS = {f.name: f for f in fields(Settings)}


def choices(name: str) -> set[str]:
    return set(FIELDS[name].metadata["choices"])


def test_choices_are_those_of_the_rooms_that_define_them():
    """settings.py is below these rooms and cannot ask them."""
    assert choices("backend") == set(MODULES)
    assert choices("tokenizer") == set(TOKENIZERS)
    assert choices("dtype") == {"auto", "adopted", *FORMATS}
    assert choices("preset") == {"auto", *PRESETS}


def test_every_flag_has_a_rule_for_resumed_runs():
    assert sorted(flags_with(*RULES)) == sorted(FIELDS)
    assert {*saved_flags()} == {*FIELDS} - {*flags_with("again", "once")}


def test_flags_of_one_process_are_not_saved():
    assert set(flags_with("again")) == {"device", "compile", "recompute", "deterministic"}
    assert set(flags_with("once")) == {"out", "resume", "overwrite", "verify_resume"}


def test_the_defaults_and_every_preset_are_within_bounds():
    for preset in PRESETS.values():
        assert out_of_bounds(replace(Settings(), **preset)) == []


def test_every_number_has_a_bound():
    without = [name for name, f in FIELDS.items() if type_of(f) in (int, float) and not f.metadata["bounds"]]
    assert without == []


def test_the_preset_cpu_and_the_defaults_are_one_set_of_numbers():
    """The table of presets in DESIGN: 4 layers, 4 heads, 128 channels, a context of 64, characters."""
    cpu = replace(Settings(), **PRESETS["cpu"])
    assert cpu == Settings()
    assert (cpu.n_layer, cpu.n_head, cpu.n_embd, cpu.block_size, cpu.tokenizer) == (4, 4, 128, 64, "char")
    assert (cpu.batch_size, cpu.lr, cpu.warmup, cpu.steps, cpu.beta2) == (12, 4e-3, 100, 2000, 0.99)


def test_the_preset_gpt2_has_gpt2_s_sizes_and_tokens():
    preset = replace(Settings(), **PRESETS["gpt2"])
    assert (preset.n_layer, preset.n_head, preset.n_embd, preset.block_size) == (12, 12, 768, 1024)
    assert TOKENIZERS[preset.tokenizer].vocab_size == 50257


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_flags_that_there_are(preset):
    assert PRESETS[preset].keys() <= FIELDS.keys(), [name_of(name) for name in PRESETS[preset]]
