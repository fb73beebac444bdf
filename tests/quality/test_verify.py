"""`octavo verify`: agrees about right models, finds what is wrong with wrong ones, and says what it could not find out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.config import EngineConfig
from octavo.quality import oracle as oracles
from octavo.quality import verify as verifying
from octavo.quality.measures import EXACT_LOGPROB, distance
from octavo.quality.oracle import ModelOracle, NoOracle, TokenizerOracle, Truth, check_loadable
from octavo.quality.report import at_least, at_most
from octavo.quality.texts import sample_text
from octavo.quality.traces import TOP, Trace, engine_config, run_engine, split_text
from octavo.quality.verify import first_difference
from octavo.text import load_tokenizer
from tests.engine.conftest import make_tiny_model

TOKENS = ["--tokens", "300", "--max-model-len", "200"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def run_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    status, out = run(*arguments, "--json")
    return status, json.loads(out)


def test_a_right_model_is_verified_on_both_paths(tiny: Path) -> None:
    status, found = run_json(str(tiny), *TOKENS)
    assert (status, found["verdict"]) == (0, "ok")
    assert {check["verdict"] for check in found["checks"]} == {"ok"}
    assert {check["part"] for check in found["checks"]} == {"tokenizer", "exact path", "as it runs (cpu)"}
    assert found["tokens"] == 300 - 2  # nothing stands before the first token of each of the two sequences
    exact = next(check for check in found["checks"] if check["what"].startswith("largest"))
    assert 0 < exact["value"] < EXACT_LOGPROB


def test_the_path_as_it_runs_is_left_out_when_it_is_the_exact_one(tiny: Path) -> None:
    status, found = run_json(str(tiny), *TOKENS, "--backend", "reference", "--dtype", "float32")
    assert status == 0
    assert {check["part"] for check in found["checks"]} == {"tokenizer", "exact path"}


def test_the_table_is_plain_when_piped_and_ends_with_the_verdict(tiny: Path) -> None:
    status, out = run(str(tiny), *TOKENS)
    assert status == 0
    assert "\x1b" not in out
    assert re.search(r"tokenizer +texts with other ids +0 of \d+", out)
    assert out.strip().split("\n")[-1] == "verified: octavo agrees with transformers on this machine"


def test_weights_that_differ_by_two_percent_in_one_matrix_are_found(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] *= 1.02
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(verifying, "ModelOracle", lambda _, threads: ModelOracle(tmp_path, threads))
    status, found = run_json(str(tiny), *TOKENS)
    assert (status, found["verdict"]) == (1, "differs")
    assert [c["verdict"] for c in found["checks"] if c["what"].startswith("largest")] == ["differs"]


def test_another_model_differs_in_every_measure(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_tiny_model(tmp_path, seed=1)
    monkeypatch.setattr(verifying, "ModelOracle", lambda _, threads: ModelOracle(other, threads))
    status, found = run_json(str(tiny), *TOKENS)
    assert status == 1
    assert [c["verdict"] for c in found["checks"] if c["part"] == "tokenizer"] == ["ok"]
    failed = {(c["part"], c["what"]) for c in found["checks"] if c["verdict"] == "differs"}
    assert {what for part, what in failed if part != "exact path"} >= {"mean divergence, nats", "same likeliest token"}


def test_other_ids_are_shown_with_their_tokens(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = definition["model"]["merges"]
    definition["model"]["merges"] = merges[::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    monkeypatch.setattr(verifying, "TokenizerOracle", lambda _: TokenizerOracle(tmp_path))
    status, found = run_json(str(tiny), *TOKENS)
    assert status == 1
    assert found["checks"][0]["verdict"] == "differs"
    assert re.search(r"token \d+, after .*:\n  octavo +\d+ '.*\n  transformers +\d+ '", found["notes"][0])


def test_the_first_difference_names_the_end_of_the_shorter_list(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    ids = tokenizer.encode("abc")
    shown = first_difference(tokenizer, "abc", ids, ids[:-1])
    assert shown.endswith("transformers  nothing more")
    assert f"token {len(ids) - 1}, after" in shown


def test_without_transformers_the_message_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NoOracle, match=r"transformers is not installed; .* pip install 'octavo\[verify\]'"):
        run(str(tiny))


def test_too_little_memory_is_not_verified_and_says_how_much_is_needed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(verifying, "run_engine", lambda *_: pytest.fail("loaded a model that does not fit"))
    status, found = run_json(str(tiny), *TOKENS)
    assert (status, found["verdict"]) == (2, "not verified")
    assert re.search(r"needs about 1.\d+ GB, 1.00 kB are free", found["checks"][1]["measured"])


def test_a_model_that_transformers_cannot_load_is_not_verified(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("some_future_type")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    status, found = run_json(str(tiny), *TOKENS)
    assert status == 2
    assert "some_future_type" in found["checks"][1]["measured"]


@pytest.mark.parametrize(
    ("architecture", "key", "tensor", "said"),
    [
        ("granite", None, "token_embd.weight", "architecture 'granite'"),
        ("llama", None, "rope_freqs.weight", "ignores rope_freqs.weight"),
        ("llama", "llama.rope.scaling.factor", "token_embd.weight", "ignores llama.rope.scaling.factor"),
        ("llama", "split.count", "token_embd.weight", "are split"),
        ("llama", None, "token_embd.weight", None),
    ],
)
def test_gguf_files_that_transformers_would_misread_have_no_oracle(
    tmp_path: Path, architecture: str, key: str | None, tensor: str, said: str | None
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if key is not None:
        writer.add_uint32(key, 2)
    writer.add_tensor(tensor, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if said is None:
        check_loadable(path)
        return
    with pytest.raises(NoOracle, match=said):
        check_loadable(path)


def test_the_reader_of_gguf_files_is_left_as_it_was_and_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "Größe", "漢字"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = gguf.GGUFReader.__dict__["_build_fields"]
    with oracles._fast_gguf_reader():
        fast = gguf.GGUFReader(path)
    assert type(fast.data) is np.ndarray
    assert gguf.GGUFReader.__dict__["_build_fields"] is plain
    slow = gguf.GGUFReader(path)
    assert fast.fields.keys() == slow.fields.keys()
    assert all(fast.fields[name].contents() == slow.fields[name].contents() for name in slow.fields)
    np.testing.assert_array_equal(fast.tensors[0].data, slow.tensors[0].data)


def test_windows_cover_the_text_once(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    windows = split_text(tokenizer, sample_text(), 333, 100)
    assert [token for window in windows for token in window] == tokenizer.encode(sample_text())[:333]
    assert [len(window) for window in windows] == [100, 100, 100, 33]


class WithBeginning:
    """Every character is a token; 1 stands before a text."""

    bos_token_id = 1

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return [1] * add_special + [ord(character) for character in text]


def test_each_window_has_the_beginning_token_of_the_model() -> None:
    windows = split_text(WithBeginning(), "abcdefg", 6, 4)  # type: ignore[arg-type]
    assert windows == [[1, *b"abc"], [1, *b"def"]]


def test_traces_are_what_the_oracle_says_in_chunks_side_by_side_and_after_a_cached_prefix(tiny: Path) -> None:
    windows = [[3 + (i * j) % 300 for i in range(5, 5 + length)] for j, length in ((7, 130), (11, 90), (13, 2))]
    settings = engine_config(
        EngineConfig(model=str(tiny), max_model_len=200, backend="reference", dtype="float32"), 200
    )
    assert settings.max_num_batched_tokens < max(map(len, windows))
    done: list[int] = []
    traces = run_engine(settings, windows, done.append)
    given = [trace for trace in traces if not trace.answered]
    answered = [trace for trace in traces if trace.answered]
    assert [list(trace.tokens) for trace in given] == windows
    assert [trace.tokens[: trace.first] for trace in answered] == [tuple(windows[0][:n]) for n in (40, 75, 110)]
    assert sum(done) >= sum(map(len, windows))
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    for trace, truth in zip(traces, ModelOracle(tiny, 1).truths(traces, lambda _: None), strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([trace.tokens])).logits[0].log_softmax(-1)[trace.first - 1 : -1]
        own = rows.gather(1, torch.tensor(trace.tokens[trace.first :])[:, None])[:, 0]
        np.testing.assert_allclose(trace.own, own, atol=1e-4)
        np.testing.assert_allclose(truth.own, own, atol=1e-4)
        np.testing.assert_allclose(trace.logprobs, rows.topk(TOP).values, atol=1e-4)
        np.testing.assert_allclose(truth.logprobs, rows.gather(1, torch.from_numpy(trace.ids)), atol=1e-4)


def arrays(seed: int, vocabulary: int, top: int, noise: float) -> tuple[Trace, Truth, np.ndarray, np.ndarray]:
    """A trace and truth of whole distributions, which are returned too: `[T, V]`, truth then engine."""
    rng = np.random.default_rng(seed)
    truth = np.log(rng.dirichlet(np.full(vocabulary, 0.3), 50) + 1e-12)
    engine = truth + noise * rng.standard_normal(truth.shape)
    engine -= np.log(np.exp(engine).sum(-1, keepdims=True))
    ids = np.argsort(-engine, axis=-1)[:, :top]
    tokens = rng.integers(0, vocabulary, 51)
    own = tokens[1:, None]
    pick = np.take_along_axis
    trace = Trace(tuple(tokens.tolist()), 1, pick(engine, own, 1)[:, 0], ids, pick(engine, ids, 1), answered=False)
    return trace, Truth(pick(truth, own, 1)[:, 0], pick(truth, ids, 1), truth.argmax(-1)), truth, engine


@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_measures_equal_those_of_the_whole_distributions(noise: float) -> None:
    whole_trace, whole_truth, p, q = arrays(0, 60, 60, noise)
    kl = (np.exp(p) * (p - q)).sum(-1)
    found = distance([whole_trace], [whole_truth])
    assert found.mean_divergence == pytest.approx(kl.mean(), abs=1e-9)
    assert found.max_divergence == pytest.approx(kl.max(), abs=1e-9)
    assert found.same_best == np.mean(p.argmax(-1) == q.argmax(-1))
    assert found.max_logprob_difference == pytest.approx(np.abs(p - q).max())
    own = np.array(whole_trace.tokens[1:])[:, None]
    expected = np.exp((np.take_along_axis(p, own, 1) - np.take_along_axis(q, own, 1)).mean()) - 1
    assert found.perplexity_difference == pytest.approx(expected)
    part = distance(*([x] for x in arrays(0, 60, 20, noise)[:2]))
    assert 0.5 * kl.mean() < part.mean_divergence <= kl.mean() + 1e-9


def test_answers_of_the_engine_do_not_count_in_the_perplexity() -> None:
    trace, truth, *_ = arrays(1, 30, 10, 0.1)
    answer = Trace(trace.tokens, 1, trace.own - 5.0, trace.ids, trace.logprobs, answered=True)
    with_answer, alone = distance([trace, answer], [truth, truth]), distance([trace], [truth])
    assert with_answer.perplexity == alone.perplexity
    assert with_answer.max_logprob_difference > alone.max_logprob_difference


def test_what_is_no_number_differs() -> None:
    assert at_most("p", "w", float("nan"), 1.0, ".1f").verdict == "differs"
    assert at_least("p", "w", float("nan"), 0.0, ".1f").verdict == "differs"
    assert at_most("p", "w", 1.0, 1.0, ".1f").verdict == "ok"
