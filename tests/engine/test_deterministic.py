"""`deterministic=True`: the same tokens and the same log-probabilities to the last bit, whatever else happens.

On a GPU in bf16; elsewhere the same kernels in fp32 under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, startup
from octavo.engine.plan import StepPlan
from octavo.errors import ParameterError
from octavo.ops.cuda import CudaOps
from octavo.startup import Started
from octavo.worker.device_inputs import DeviceInputs
from octavo.worker.graphs import Size
from octavo.worker.model_runner import ModelRunner
from tests.engine.conftest import make_tiny_model

HAS_GPU = torch.cuda.is_available()
Answers = list[list[tuple[int, float]]]


def params(new: int, row: int) -> SamplingParams:
    """Greedy and random rows in turn, with log-probabilities."""
    if row % 2:
        return SamplingParams(temperature=0.9, seed=row, top_p=0.95, logprobs=2, max_tokens=new, ignore_eos=True)
    return SamplingParams(temperature=0, logprobs=2, max_tokens=new, ignore_eos=True)


def answers(llm: LLM, prompts: list[list[int]], new: int, first: int = 0) -> Answers:
    """Each output's tokens with their log-probabilities."""
    asked = [params(new, first + row) for row in range(len(prompts))]
    return [
        [
            (token, position[token].logprob)
            for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in llm.generate(prompts, asked, use_tqdm=False)
    ]


def alone(llm: LLM, prompts: list[list[int]], new: int) -> Answers:
    """One request after the other."""
    return [answers(llm, [prompt], new, row)[0] for row, prompt in enumerate(prompts)]


# -- under the interpreter -------------------------------------------------------------------------------------------

FEW = [[(i * (j + 3)) % 300 + 10 for i in range(5 + 6 * j)] for j in range(3)]
FEW_TOKENS = 5


def interpreted(monkeypatch: pytest.MonkeyPatch, *, graphs: bool, deterministic: bool = True) -> None:
    """CPU engines run the CUDA op set, with inputs from kernels; with `graphs` their steps are padded to sizes."""
    plain = startup.start

    def start(config: Any) -> Started:
        started = plain(config)
        runner = started.runner
        inputs = DeviceInputs(runner.state, started.cache.max_model_len * 4)
        started.runner = ModelRunner(
            started.model.decoder, runner.state, runner.sampler, started.cache.num_blocks, inputs
        )
        if graphs:
            started.runner.capture(StepPlan(started.core), [Size(1, 1), Size(4, 4), Size(4, 16), Size(4, 64)])
        return started

    monkeypatch.setattr("octavo.llm_engine.start", start)
    monkeypatch.setattr(startup, "_ops", lambda *_: CudaOps("cpu", torch.float32, deterministic=deterministic))


@pytest.fixture(scope="module")
def few_alone(tiny_model: Path) -> list[Answers]:
    """What the requests get one by one, once it has been asked for."""
    return []


@pytest.mark.skipif(HAS_GPU, reason="there the device itself is tested")
@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize(
    ("graphs", "settings"),
    [
        # Preemption below has the padded steps too; this one takes minutes in the interpreter.
        pytest.param(True, {"max_in_flight": 2}, marks=pytest.mark.slow),
        (False, {"max_num_batched_tokens": 7}),
        (True, {"num_gpu_blocks_override": 1 + 6, "max_model_len": 48, "block_size": 8}),
    ],
    ids=["padded, in flight", "chunks", "padded, preempted"],
)
def test_requests_get_what_they_get_alone(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_alone: list[Answers],
    graphs: bool,
    settings: dict[str, Any],
) -> None:
    common: dict[str, Any] = {"backend": "cpu", "disable_log_stats": True, "max_model_len": 64, "max_num_seqs": 4}
    if not few_alone:
        with monkeypatch.context() as patched:
            interpreted(patched, graphs=False)
            with LLM(str(tiny_model), **common) as llm:
                few_alone.append(alone(llm, FEW, FEW_TOKENS))
    interpreted(monkeypatch, graphs=graphs)
    with LLM(str(tiny_model), **common | settings) as llm:
        assert answers(llm, FEW, FEW_TOKENS) == few_alone[0]
        if "num_gpu_blocks_override" in settings:
            assert llm.stats()["preemptions"] > 0


# -- on a GPU ---------------------------------------------------------------------------------------------------------

MANY = [[(i * (j + 3)) % 300 + 10 for i in range(3 + 11 * j)] for j in range(17)]
MANY_TOKENS = 40
FAMILIES: dict[str, dict[str, Any]] = {
    "head size 12": {},
    "head size 128": {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 1},
}


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_requests_get_what_they_get_alone(tmp_path: Path, make_llm: Callable[..., LLM], family: str) -> None:
    model = make_tiny_model(tmp_path, **FAMILIES[family])
    common: dict[str, Any] = {"backend": "cuda", "dtype": "bfloat16", "deterministic": True, "max_num_seqs": 32}
    expected = alone(make_llm(model, enforce_eager=True, **common), MANY, MANY_TOKENS)
    for settings in (
        {"enforce_eager": True},
        {},
        {"max_in_flight": 1},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_gpu_blocks_override": 1 + 40, "max_model_len": 384},
        {"enable_prefix_caching": False},
    ):
        llm = make_llm(model, **common | settings)
        assert answers(llm, MANY, MANY_TOKENS) == expected, settings
        assert answers(llm, MANY, MANY_TOKENS) == expected, f"{settings}, with its prefixes cached"
        if "num_gpu_blocks_override" in settings:
            assert llm.stats()["preemptions"] > 0


# -- the argument ------------------------------------------------------------------------------------------------------


def test_a_cpu_engine_does_not_promise_what_it_does_not_keep(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ParameterError, match="deterministic"):
        make_llm(backend="cpu", dtype="auto", deterministic=True)


def test_the_exact_path_keeps_the_promise_anyhow(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(deterministic=True)
    assert answers(llm, FEW, FEW_TOKENS) == alone(llm, FEW, FEW_TOKENS)
