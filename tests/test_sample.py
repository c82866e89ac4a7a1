"""Sampling, from stand-ins for a model whose distribution is known."""

import json
import shutil

import numpy as np
import pytest

import sample
import train
from base.errors import BadInput
from model.generate import generate, probabilities
from run import checkpoint
from run.folder import save

V = 6
LOGITS = np.array([0.5, -1.0, 2.0, 0.0, 1.0, -3.0], dtype=np.float32)


def constant(tokens: np.ndarray) -> np.ndarray:
    """The same distribution after every context."""
    return LOGITS[None]


def after_last(tokens: np.ndarray) -> np.ndarray:
    """A distribution that depends on the last token; the likeliest is the next number."""
    return np.roll(LOGITS, tokens[0, -1] + 1 - 2)[None]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_temperature_zero_takes_the_likeliest():
    for seed in (0, 1):
        assert list(generate(after_last, [3], 8, 7, temperature=0, seed=seed)) == [4, 5, 0, 1, 2, 3, 4]


def test_the_same_seed_gives_the_same_tokens_and_another_one_others():
    first, again, other = (list(generate(after_last, [0], 8, 50, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_count_of_tokens_is_what_was_asked():
    assert len(list(generate(constant, [0], 8, 13))) == 13
    assert list(generate(constant, [0], 8, 0)) == []


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution(temperature):
    n, expected = 20_000, softmax(LOGITS.astype(np.float64) / temperature)
    drawn = np.bincount(list(generate(constant, [0], 8, n, temperature, seed=3)), minlength=V)
    assert chi_square(drawn, n * expected) < 20.5  # 99.9 % quantile of 5 degrees of freedom


def test_each_token_is_drawn_given_the_one_before():
    n, expected = 5000, softmax(LOGITS.astype(np.float64))
    tokens = [0, *generate(after_last, [0], 8, n, temperature=1.0, seed=3)]
    distances = np.bincount((np.diff(tokens) + 1) % V, minlength=V)  # after_last shifts LOGITS by the token before
    assert chi_square(distances, n * expected) < 20.5


def test_large_logits_do_not_overflow():
    tokens = generate(lambda tokens: 1e4 * LOGITS[None], [0], 8, 5, temperature=1.0)
    assert list(tokens) == [2] * 5


def test_a_full_context_drops_its_oldest_half():
    seen = []

    def remember(tokens):
        assert tokens.dtype == np.int64
        seen.append(tokens.tolist())
        return after_last(tokens)

    list(generate(remember, [1, 2, 3], 4, 4, temperature=0))
    assert seen == [[[1, 2, 3]], [[1, 2, 3, 4]], [[4, 5]], [[4, 5, 0]]]


def test_a_long_start_is_cut_too_and_left_as_it_was():
    start, seen = [0, 1, 2, 3, 4, 5], []
    list(generate(lambda tokens: seen.append(tokens.tolist()) or after_last(tokens), start, 2, 1, temperature=0))
    assert seen == [[[4, 5]]]
    assert start == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    def broken(tokens):
        logits = LOGITS[None].copy()
        logits[0, 1] = bad
        return logits

    with pytest.raises(BadInput):
        list(generate(broken, [0], 8, 1, temperature))


# ---- the distribution


def test_top_k_keeps_the_k_likeliest():
    p = probabilities(LOGITS, 1.0, top_k=2)
    assert np.flatnonzero(p).tolist() == [2, 4]
    assert p[[2, 4]] == pytest.approx(softmax(LOGITS[[2, 4]].astype(np.float64)), rel=1e-12)


@pytest.mark.filterwarnings("error")
def test_a_temperature_of_next_to_nothing_takes_the_likeliest_without_a_warning():
    assert probabilities(LOGITS, 1e-320).argmax() == 2
    assert probabilities(LOGITS, 1e-320)[2] == 1.0


def test_top_k_beyond_the_vocabulary_is_the_vocabulary():
    assert probabilities(LOGITS, 1.0, top_k=1000).tolist() == probabilities(LOGITS, 1.0).tolist()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, [2]), (0.5, [2]), (0.6, [2, 4]), (0.88, [0, 2, 4]), (1.0, [0, 1, 2, 3, 4, 5])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept):
    whole = probabilities(LOGITS, 1.0)
    p = probabilities(LOGITS, 1.0, top_p=top_p)
    assert np.flatnonzero(p).tolist() == kept
    assert p[kept] == pytest.approx(whole[kept] / whole[kept].sum(), rel=1e-12)
    assert whole[kept].sum() >= top_p - 1e-12
    assert whole[kept[:-1]].sum() < top_p


def test_drawn_tokens_follow_the_cut_distribution():
    n, p = 20_000, probabilities(LOGITS, 0.7, top_k=4, top_p=0.95)
    drawn = np.bincount(list(generate(constant, [0], 8, n, 0.7, top_k=4, top_p=0.95, seed=3)), minlength=V)
    kept = p > 0
    assert drawn[~kept].sum() == 0
    assert chi_square(drawn[kept], n * p[kept]) < 16.3  # 99.9 % quantile of 3 degrees of freedom


# ---- the script


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run whose best checkpoint is not its last: the learning rate of the last steps undoes the first ones."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(300)))
    flags = f"--device cpu --corpus {text} --out {folder / 'run'} --dtype fp32 --n-layer 1 --n-head 1 --n-embd 16"
    flags += " --block-size 16 --batch-size 8 --steps 4 --eval-every 2 --lr 1e-2 --warmup 0"
    assert train.main(flags.split()) == 0
    return folder / "run"


def text_of(capsys, *argv: str) -> str:
    status = sample.main(list(argv))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def test_the_same_seed_gives_the_same_text(run_folder, capsys):
    first, again, other = (
        text_of(capsys, "--checkpoint", str(run_folder), "--prompt", "7 times", "--tokens", "40", "--seed", seed)
        for seed in "112"
    )
    assert first == again != other
    assert first.startswith("7 times")
    assert len(first) == len("7 times") + 40 + 1


def test_every_sample_is_another_one(run_folder, capsys):
    text = text_of(capsys, "--checkpoint", str(run_folder), "--prompt", "9 ", "--tokens", "30", "--num-samples", "3")
    samples = text.removesuffix("\n").split("\n\n9 ")
    assert len(samples) == 3
    assert len(set(samples)) == 3


def test_a_run_folder_means_its_best_and_then_its_last_checkpoint(run_folder, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    greedy = ["--tokens", "20", "--temperature", "0", "--prompt", "1"]
    best, last = (text_of(capsys, "--checkpoint", str(run_folder / f"step-{step}"), *greedy) for step in (2, 4))
    (copy / "best.json").write_text('{"step": 2}')
    assert text_of(capsys, "--checkpoint", str(copy), *greedy) == best
    (copy / "best.json").unlink()
    assert text_of(capsys, "--checkpoint", str(copy), *greedy) == last


def test_an_empty_prompt_starts_from_a_newline(run_folder, capsys):
    greedy = ["--checkpoint", str(run_folder), "--tokens", "20", "--temperature", "0"]
    assert "\n" + text_of(capsys, *greedy, "--prompt", "") == text_of(capsys, *greedy, "--prompt", "\n")


def test_a_prompt_longer_than_the_context_is_cropped_with_a_note(run_folder, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("3 times 4 is 12. " * 5)
    arguments = ["--checkpoint", str(run_folder), "--prompt-file", str(prompt), "--tokens", "5"]
    assert sample.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith(prompt.read_text())
    assert err == "note: the model sees the last 16 of 85 prompt tokens\n"


def test_unknown_characters_are_named_or_skipped(run_folder, capsys):
    arguments = ["--checkpoint", str(run_folder), "--tokens", "5", "--prompt", "1 é 2"]
    assert sample.main(arguments) == 2
    assert "character 'é' at position 2 is not in the vocabulary" in capsys.readouterr().err
    assert text_of(capsys, *arguments, "--unknown", "skip").startswith("1  2")


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--temperature -1", "--temperature -1: must be a finite number, at least 0"),
        ("--temperature nan", "--temperature nan: must be a finite number, at least 0"),
        ("--temperature inf", "--temperature inf: must be a finite number, at least 0"),
        ("--top-k 0", "--top-k 0: must be at least 1"),
        ("--top-p 0", "--top-p 0: must be above 0 and at most 1"),
        ("--top-p 1.5", "--top-p 1.5: must be above 0 and at most 1"),
        ("--tokens 0", "--tokens 0: must be at least 1"),
        ("--num-samples 0", "--num-samples 0: must be at least 1"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--temperature 0 --top-k 3", "--top-k: does nothing at --temperature 0"),
        ("--prompt a --prompt-file b", "--prompt-file: cannot be combined with --prompt"),
        ("--prompt a --checkpoint nowhere", "nowhere: no checkpoint there"),
        ("--prompt a --unknown maybe", "--unknown maybe: use one of error, skip"),
    ],
)
def test_bad_input_is_one_line(flags, fault, capsys):
    assert sample.main(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sample.py: error: {fault}")


def test_another_tokenizer_than_the_model_s_is_refused(run_folder, tmp_path, capsys):
    copy = tmp_path / "step"
    shutil.copytree(run_folder / "step-4", copy)
    tokenizer = json.loads((copy / "minigpt_tokenizer.json").read_text())
    tokenizer["characters"] = tokenizer["characters"][:-1] + "~"
    (copy / "minigpt_tokenizer.json").write_text(json.dumps(tokenizer))
    assert sample.main(["--checkpoint", str(copy), "--prompt", "1"]) == 2
    assert "minigpt_tokenizer.json: damaged, its sha256 is not the manifest's" in capsys.readouterr().err


def test_damaged_weights_are_an_error_and_no_text(run_folder, tmp_path, capsys):
    weights, sizes, tokenizer = checkpoint.load_model(run_folder / "step-4")
    weights["ln_f.weight"] = np.full_like(weights["ln_f.weight"], np.nan)
    arrays = {"model": weights, "optimizer": {"step": np.array(0)}}
    manifest = checkpoint.read_manifest(run_folder / "step-4")
    folder = save(tmp_path, 1, arrays, sizes | {"dropout": 0.0}, tokenizer, manifest)
    assert sample.main(["--checkpoint", str(folder), "--prompt", "1"]) == 2
    assert "logits are not finite" in capsys.readouterr().err


def test_a_terminal_is_asked_for_prompts_until_it_ends(run_folder, monkeypatch, capsys):
    prompts = iter(["1 ", "2 "])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(prompts, None) or (_ for _ in ()).throw(EOFError))
    assert sample.main(["--checkpoint", str(run_folder), "--tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 ")
    assert "\n2 " in out


def test_a_hugging_face_gpt2_folder_is_sampled_like_its_own_model(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "minigpt_tokenizer.json").write_text('{"kind": "byte"}')
    ours = text_of(
        capsys,
        "--checkpoint",
        str(tmp_path),
        "--prompt",
        "ab",
        "--tokens",
        "12",
        "--temperature",
        "0",
        "--dtype",
        "fp32",
    )
    tokens = theirs.generate(
        torch.tensor([list(b"ab")]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert ours == bytes(tokens[0].tolist()).decode("utf-8", "replace") + "\n"
