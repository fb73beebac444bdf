"""The padded decode step of a CUDA graph, run without one under Triton's interpreter: the same tokens as torch gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, startup
from octavo.engine.plan import StepPlan
from octavo.ops.cuda import CudaOps
from octavo.sampling.device import DeviceSampler
from octavo.startup import Started
from octavo.worker.device_inputs import DeviceInputs
from octavo.worker.draws import StepDraws
from octavo.worker.graphs import Size, StepGraphs, decode_sizes, mixed_sizes, sharing_sizes
from octavo.worker.model_runner import ModelRunner
from octavo.worker.shared_prefix import SharedPrefix

PROMPTS = [[(i * (j + 3)) % 300 + 10 for i in range(5 + 6 * j)] for j in range(3)]
MIXED = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=4, top_k=20, logprobs=2, max_tokens=7, ignore_eos=True),
]
MIXED_SIZES = [Size(4, 16), Size(4, 64)]


def tokens(llm: LLM) -> list[list[int]]:
    return [choice.token_ids for output in llm.generate(PROMPTS, MIXED, use_tqdm=False) for choice in output.outputs]


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines whose steps take their inputs from kernels, in fp32 on the CPU; lists the rows of the replayed steps."""
    replayed: list[int] = []
    sizes = [Size(1, 1), Size(2, 2), Size(4, 4), *request.param]
    plain = startup.start

    def start(config: Any) -> Started:
        started = plain(config)
        runner = started.runner
        inputs = DeviceInputs(runner.state, started.cache.max_model_len * 4)
        started.runner = ModelRunner(
            started.model.decoder, runner.state, runner.sampler, started.cache.num_blocks, inputs
        )
        started.runner.capture(StepPlan(started.core), sizes)
        graphs = started.runner._graphs
        assert graphs is not None
        run = graphs.run

        def noted(plan: StepPlan, **hints: bool) -> Any:
            found = run(plan, **hints)
            if found is not None:
                replayed.append(plan.num_rows)
            return found

        monkeypatch.setattr(graphs, "run", noted)
        return started

    monkeypatch.setattr("octavo.llm_engine.start", start)
    monkeypatch.setattr(startup, "_ops", lambda config: CudaOps("cpu", torch.float32))
    return replayed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the graphs themselves are tested")
@pytest.mark.parametrize(
    ("interpreted", "settings"),
    [([], {}), (MIXED_SIZES, {"max_num_batched_tokens": 8}), (MIXED_SIZES, {"max_in_flight": 2})],
    ids=["decode", "mixed, chunks", "mixed, in flight"],
    indirect=["interpreted"],
)
def test_padded_decode_steps_give_the_tokens_of_the_plain_path(
    make_llm: Callable[..., LLM],
    tiny_model: Any,
    interpreted: list[int],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(
        str(tiny_model), backend="cpu", disable_log_stats=True, max_model_len=64, max_num_seqs=4, **settings
    ) as llm:
        found = tokens(llm)
    assert 1 in interpreted
    assert settings or {1, 2, 3} == set(interpreted), "steps of three rows are padded to four"
    monkeypatch.undo()
    with LLM(str(tiny_model), backend="reference", dtype="float32", disable_log_stats=True) as llm:
        assert found == tokens(llm)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the graphs themselves are tested")
@pytest.mark.parametrize("interpreted", [MIXED_SIZES], indirect=True)
def test_draws_of_padded_rows_give_the_tokens_of_the_torch_sampler(
    make_llm: Callable[..., LLM],
    tiny_model: Any,
    interpreted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    run = StepDraws.run

    def noted(draws: StepDraws, rows: int) -> Any:
        drawn.append(rows)
        return run(draws, rows)

    monkeypatch.setattr(StepDraws, "run", noted)
    monkeypatch.setattr(
        startup,
        "_sampler",
        lambda config, model, rows: DeviceSampler(
            model.spec.vocab_size, config.logprobs_mode, max_rows=rows, device=torch.device("cpu")
        ),
    )
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=3),
        SamplingParams(temperature=1.1, seed=4, top_k=20, logprobs=2, max_tokens=2, ignore_eos=True),
    ]
    with LLM(
        str(tiny_model), backend="cpu", disable_log_stats=True, max_model_len=64, max_num_seqs=4, max_in_flight=2
    ) as llm:
        found = llm.generate(PROMPTS, params, use_tqdm=False)
    assert drawn
    assert len(drawn) < len(interpreted), "steps with log-probabilities are drawn one by one"
    monkeypatch.undo()
    for one, other in zip(found, make_llm().generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the graphs themselves are tested")
@pytest.mark.parametrize("interpreted", [[Size(4, 4, shares_keys=True)]], indirect=True)
def test_rows_that_begin_alike_take_the_graph_for_that_and_get_the_same_tokens(
    make_llm: Callable[..., LLM], tiny_model: Any, interpreted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hints: list[bool] = []
    run = StepGraphs.run

    def noted(graphs: StepGraphs, plan: StepPlan, *, shares_keys: bool = False) -> Any:
        hints.append(shares_keys)
        return run(graphs, plan, shares_keys=shares_keys)

    monkeypatch.setattr(StepGraphs, "run", noted)
    monkeypatch.setattr("octavo.worker.model_runner.SharedPrefix", partial(SharedPrefix, least_tokens=16))
    alike = [[*PROMPTS[2][:16], j, j] for j in range(20, 24)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(tiny_model), backend="cpu", disable_log_stats=True, max_model_len=64, max_num_seqs=4) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(alike, greedy, use_tqdm=False)]
        apart = hints.count(True)
        llm.generate([*PROMPTS, PROMPTS[2][::-1]], greedy, use_tqdm=False)
    assert apart >= 3
    assert hints.count(True) == apart, "the others share nothing"
    monkeypatch.undo()
    expected = make_llm().generate(alike, greedy, use_tqdm=False)
    assert found == [output.outputs[0].token_ids for output in expected]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the graphs themselves are tested")
@pytest.mark.parametrize("interpreted", [MIXED_SIZES], indirect=True)
@pytest.mark.usefixtures("interpreted")
def test_kernels_of_small_graphs_are_compiled_after_a_step_of_a_large_one(tiny_model: Any) -> None:
    one = SamplingParams(temperature=0, max_tokens=1)
    with LLM(str(tiny_model), backend="cpu", disable_log_stats=True, max_model_len=64, max_num_seqs=4) as llm:
        llm.generate([list(range(10, 50))], one, use_tqdm=False)
        runner = llm.engine._started.runner
        assert runner.inputs.buffers.logits_indices.max() == 39
        with torch.inference_mode():
            runner._graphs._compile([Size(4, 16)])


def test_sizes_of_mixed_steps_have_room_for_more_tokens_than_rows() -> None:
    for most in (1, 8, 100, 256):
        sizes = mixed_sizes(most, 1024)
        assert len(set(sizes)) == len(sizes)
        assert max(size.tokens for size in sizes) == 1024
        assert {size.rows for size in sizes} == {min(8, most), most}
        assert not any(size.is_decode for size in sizes)


def test_numbers_of_rows_rise_to_the_most_that_run_at_once() -> None:
    for most in (1, 2, 3, 7, 16, 100, 256, 4096):
        sizes = decode_sizes(most)
        rows = [size.rows for size in sizes]
        assert all(size.is_decode for size in sizes)
        assert rows == sorted(set(rows))
        assert rows[-1] == min(most, 512)
        sharing = sharing_sizes(most)
        assert all(size.is_decode and size.shares_keys for size in sharing)
        assert sharing[-1].rows == rows[-1]
        assert all(after - before <= max(8, before / 3) for before, after in itertools.pairwise(rows))
