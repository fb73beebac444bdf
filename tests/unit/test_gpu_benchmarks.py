"""What the GPU benchmarks say of their figures, and the table that is made of them; no figure is measured here."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benches.gpu import host, limits, run
from benches.gpu.models import LLAMA_3_8B, QWEN3_30B_A3B, random_llm
from benches.gpu.profile import Span, busy_us
from benches.gpu.rows import Row, line, table
from benches.gpu.workload import offline, serve, timed

GPU_MISSING = not torch.cuda.is_available()


def figures(*rows: Row, failure: str = "") -> dict[str, object]:
    return {
        "command": "c", "when": "2026-01-01", "machine": "a GPU", "seconds": 1, "failure": failure,
        "rows": [row.as_json() for row in rows],
    }  # fmt: skip


def test_a_rate_must_reach_what_is_demanded_and_a_time_must_not_exceed_it() -> None:
    assert Row("a", 11.0, "tok/s", 10.0).is_met
    assert not Row("a", 9.0, "tok/s", 10.0).is_met
    assert Row("a", 9.0, "ms", 10.0).is_met
    assert not Row("a", 11.0, "ms", 10.0).is_met
    assert Row("a", 11.0, "ms").is_met is None


def test_the_share_of_the_limit_is_below_one_for_rates_and_times() -> None:
    assert Row("a", 3.0, "TB/s", limit=4.0).of_limit == 0.75
    assert Row("a", 4.0, "ms", limit=3.0).of_limit == 0.75
    assert Row("a", 4.0, "ms").of_limit is None


def test_a_row_survives_its_way_through_json() -> None:
    row = Row("a", 4.0, "ms", 5.0, 6.0, "vLLM", 3.0, {"error": "1e-3"})
    assert Row.of_json(json.loads(json.dumps(row.as_json()))) == row


def test_columns_that_no_row_uses_are_left_out() -> None:
    lines = table([Row("a", 4.0, "ms", more={"x": "1"}), Row("b", 12345.0, "tok/s", 10.0)]).splitlines()
    assert lines[0] == "| what | measured | demanded | x |"
    assert lines[2] == "| a | 4.00 ms |  | 1 |"
    assert lines[3] == "| b | **12,345 tok/s** | ≥ 10.00 |  |"
    assert len({text.count("|") for text in lines}) == 1


def test_a_missed_demand_is_said_so_on_the_terminal() -> None:
    assert "MISSED" in line(Row("a", 11.0, "ms", 10.0))
    assert "MISSED" not in line(Row("a", 9.0, "ms", 10.0))


def test_only_what_is_between_the_markers_is_rewritten(tmp_path: Path) -> None:
    doc = tmp_path / "doc.md"
    doc.write_text(f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n")
    for _ in range(2):
        run.rewrite(doc, "new\n")
        assert doc.read_text() == f"before\n{run.BEGIN}\n\nnew\n\n{run.END}\nafter\n"
    doc.write_text("nothing")
    with pytest.raises(ValueError, match="gpu:begin"):
        run.rewrite(doc, "new")


def test_the_document_of_the_repository_has_the_markers() -> None:
    text = (run.ROOT / "docs" / "performance.md").read_text()
    assert text.count(run.BEGIN) == text.count(run.END) == 1


def test_merged_figures_are_those_of_the_last_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    out, doc = tmp_path / "out.json", tmp_path / "doc.md"
    doc.write_text(run.BEGIN + run.END)
    files[0].write_text(json.dumps({"host": figures(Row("old", 1.0, "ms")), "prefix": figures(Row("kept", 2.0, "ms"))}))
    files[1].write_text(json.dumps({"host": figures(Row("new", 3.0, "ms"), failure="ended with 1")}))
    run.merge(files, out, doc)
    text = doc.read_text()
    assert "| new |" in text
    assert "| kept |" in text
    assert "| old |" not in text
    assert "This run was not complete: it ended with 1." in text


def test_a_name_that_is_no_section_is_refused_with_those_there_are() -> None:
    assert run.chosen("prefix,llama") == ["llama", "prefix"]
    with pytest.raises(ValueError, match="no section nothing; there are llama"):
        run.chosen("nothing")


@pytest.mark.skipif(not GPU_MISSING, reason="sections fail only where there is no GPU")
def test_a_section_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = run.run(["prefill", "decode"], tmp_path / "out.json", None, None)
    assert failed == 2
    found = json.loads((tmp_path / "out.json").read_text())
    assert {name: section["failure"] for name, section in found.items()} == {
        "prefill": "ended with 1",
        "decode": "ended with 1",
    }
    assert "not complete: decode ended with 1" in capfd.readouterr().out


def test_a_section_that_takes_too_long_is_stopped() -> None:
    found = run.run_section("decode", 0.1)
    assert found["failure"] == "was stopped after 0 s"
    assert found["rows"] == []


def test_limits_are_those_that_were_worked_out_by_hand() -> None:
    assert limits.decode_ms(LLAMA_3_8B, 1, 128) == pytest.approx(3.53, abs=0.01)
    assert limits.decode_ms(LLAMA_3_8B, 1, 4096) == pytest.approx(3.66, abs=0.01)
    assert limits.prefill_ms(LLAMA_3_8B, 1, 8192) == pytest.approx(176, abs=0.5)
    assert limits.prefill_ms(LLAMA_3_8B, 8, 2048) == pytest.approx(317, abs=0.5)
    # 48 layers of attention, router and 8 experts, and the head, at one byte pair a weight.
    weights = 48 * (2048 * 72 * 128 + 128 * 2048 + 8 * 3 * 2048 * 768) + 151936 * 2048
    assert limits.decode_ms(QWEN3_30B_A3B, 1, 0) == pytest.approx(2 * weights / 4.25e9, rel=1e-6)


def test_the_offline_workload_is_the_published_one() -> None:
    vector = json.loads((run.ROOT / "tests" / "vectors" / "offline_256.json").read_text())
    work = offline(256)
    assert [[len(ids), params.max_tokens] for ids, params in zip(work.ids, work.params, strict=True)] == vector


def test_static_batches_run_one_after_the_other_and_every_request_is_served() -> None:
    work = offline(6, 3, 9)
    most = 0
    with random_llm("tiny", disable_log_stats=True, backend="cpu") as llm:
        submit = llm.engine.submit

        def noted(submissions: Any) -> Any:
            nonlocal most
            assert llm.stats()["num_running"] == llm.stats()["num_waiting"] == 0
            most = max(most, len(submissions))
            return submit(submissions)

        with patch.object(llm.engine, "submit", noted):
            served = serve(llm, work, batch=2, poll=0.0)
    assert most == 2
    assert served.tokens == work.outputs
    assert len(served.first) == 6
    assert max(served.first) <= served.last


def test_a_steps_host_time_is_the_sum_of_what_the_loop_does() -> None:
    (row,) = host.rows("tiny", 4, disable_log_stats=True, backend="cpu")
    assert row.unit == "ms"
    parts = [float(row.more[f"{name}, ms"]) for name in ("schedule", "launch", "draw", "read back", "commit")]
    assert 0 < max(parts) <= row.measured + 0.001


def test_idle_time_around_the_copies_of_plans_is_told_from_that_inside_of_steps() -> None:
    spans = []
    for step in range(40):
        begin = 100.0 * step
        spans += [
            Span(begin + 5, begin + 10, "Memcpy HtoD"),
            Span(begin + 12, begin + 50, "a"),
            Span(begin + 51, begin + 100, "b"),
        ]
    between, at_all = host.idle_shares(spans)
    assert between == pytest.approx(0.07, abs=0.005)
    assert at_all == pytest.approx(0.08, abs=0.005)
    assert busy_us(spans) == 40 * (5 + 38 + 49)


def test_an_engine_leaves_nothing_behind_for_the_next_one_to_run_beside() -> None:
    def measured() -> weakref.ref[Any]:
        with random_llm("tiny", disable_log_stats=True, backend="cpu") as llm:
            timed(llm, [[1, 2, 3]], 2)
            return weakref.ref(llm.engine._started.runner)

    kept = measured()
    gc.collect()
    assert kept() is None


def test_a_section_writes_each_row_when_it_is_there(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sections = {
        "tiny": run.Section("t", "prefix", 60, {"model": "tiny", "requests": 3, "shared": 64, "backend": "cpu"})
    }
    with (
        patch.object(run, "SECTIONS", sections),
        patch("sys.argv", ["run", "--child", "tiny", "--out", str(out)]),
    ):
        run.main()
    rows = [Row.of_json(json.loads(said)) for said in out.read_text().splitlines()]
    assert [row.unit for row in rows] == ["ms", "ms", "ms", "times", "x"]
    assert rows[3].measured == pytest.approx(rows[1].measured / rows[0].measured)
