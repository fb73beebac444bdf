"""Outputs that must be of a form: JSON, expressions, choices, grammars; with everything else a request can ask for."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from octavo.errors import ParameterError
from octavo.outputs import RequestOutput

MakeLLM = Callable[..., LLM]
SETTINGS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "disable_log_stats": True}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'start: "[" item ("," item)* "]"\nitem: /[a-z]{1,3}/\n'


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    engine = LLM(str(tiny_model), **SETTINGS)
    yield engine
    engine.shutdown()


def params(constraint: dict[str, Any], **kwargs: Any) -> SamplingParams:
    values = {"max_tokens": 200, "seed": 1, **kwargs}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), **values)


def run(llm: LLM, constraint: dict[str, Any], prompt: Any = "tart", **kwargs: Any) -> RequestOutput:
    return llm.generate(prompt, params(constraint, **kwargs), use_tqdm=False)[0]


def holds(constraint: dict[str, Any], text: str) -> bool:
    """Judges a finished text by other means than those that made it."""
    ((kind, value),) = constraint.items()
    if kind == "choice":
        return text in value
    if kind == "regex":
        return re.fullmatch(value, text) is not None
    if kind == "grammar":
        return re.fullmatch(r"\[[a-z]{1,3}(,[a-z]{1,3})*\]", text) is not None
    schema = {"type": "object"} if kind == "json_object" else value
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


CONSTRAINTS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": json.dumps(PERSON)},
    {"regex": r"[0-9]{3}-[a-c]{2,5}( é)?"},
    {"choice": ["red", "green", "a longer one", "😀漢ďก"]},
    {"grammar": LIST},
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: next(iter(constraint)))
@pytest.mark.parametrize(
    "drawn", [{"temperature": 0}, {"temperature": 1.5}, {"temperature": 1, "top_k": 3, "top_p": 0.8}]
)
def test_an_output_that_ends_is_of_the_form(llm: LLM, constraint: dict[str, Any], drawn: dict[str, Any]) -> None:
    judged = {"json": json.loads(constraint["json"])} if isinstance(constraint.get("json"), str) else constraint
    finished = 0
    for seed in range(4):
        (choice,) = run(llm, constraint, seed=seed, **drawn).outputs
        if choice.finish_reason == "stop":
            assert holds(judged, choice.text), choice.text
            finished += 1
        else:
            assert choice.finish_reason == "length"
            assert len(choice.token_ids) == 200
    assert finished or constraint == {"grammar": LIST}


leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-99, 99),
        st.integers(0, 50),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(-9, 9), st.text('aé"\\ 1', max_size=4), st.none()), min_size=1, max_size=3),
    ),
    st.just({"type": "string", "pattern": "^[ab]{1,3}$"}),
    st.just({"const": {"x": [1, "é"]}}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(fields: dict[str, Any], optional: bool) -> dict[str, Any]:
        names = list(fields)
        required = names[: len(names) // 2] if optional else names
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(st.sampled_from(["a", "bc", "é", 'q"']), inner, max_size=3), st.booleans())


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@given(schema=schemas, seed=st.integers(0, 1000))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_json_of_a_random_schema_is_valid(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    (choice,) = run(llm, {"json": schema}, seed=seed, temperature=1.2, max_tokens=400).outputs
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.text), schema, jsonschema.Draft202012Validator)


def test_a_schema_that_asks_for_nothing_asks_for_an_object(llm: LLM) -> None:
    for constraint in ({"json": {}}, {"json": {"title": "x"}}, {"json_object": True}):
        (choice,) = run(llm, constraint, temperature=0, max_tokens=64).outputs
        assert choice.text.startswith("{")


def test_text_of_several_bytes_a_character_streams_whole(tiny_model: Path) -> None:
    text = "😀漢ďก"
    engine = AsyncLLM(str(tiny_model), **SETTINGS)

    async def main() -> list[str]:
        texts = []
        async for output in engine.generate("x", params({"choice": [text]}, logprobs=3)):
            texts.append(output.outputs[0].text)
        return texts

    try:
        texts = asyncio.run(main())
    finally:
        engine.shutdown()
    assert texts[-1] == text
    assert all(text.startswith(part) for part in texts)


def test_choices_of_one_prompt_each_follow_the_grammar_for_themselves(llm: LLM) -> None:
    found = run(llm, {"regex": "[a-f]{1,9}"}, n=6, temperature=1.5, max_tokens=30).outputs
    assert all(re.fullmatch("[a-f]{1,9}", choice.text) for choice in found)
    assert len({choice.text for choice in found}) > 1
    again = run(llm, {"regex": "[a-f]{1,9}"}, n=6, temperature=1.5, max_tokens=30).outputs
    assert [choice.token_ids for choice in again] == [choice.token_ids for choice in found]


def test_the_same_tokens_with_one_and_two_steps_in_flight_and_after_preemption(make_llm: MakeLLM) -> None:
    constraints = [{"json": PERSON}, {"grammar": LIST}, {"regex": "([a-z]{2} ){30}"}, {"choice": ["red", "green"]}]
    prompts = [f"{'tart ' * (3 * i)}{i}" for i in range(8)]
    every = [
        params(constraints[i % 4], temperature=i % 2, seed=i, max_tokens=90, presence_penalty=0.5 * (i % 3))
        for i in range(8)
    ]
    # Between them, some without a grammar.
    every[5] = SamplingParams(max_tokens=80, seed=5)

    def tokens(**kwargs: Any) -> tuple[list[list[int]], LLM]:
        engine = make_llm(**kwargs)
        outputs = engine.generate(prompts, every, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], engine

    plain, _ = tokens(max_in_flight=1)
    assert tokens(max_in_flight=2)[0] == plain
    assert tokens(max_in_flight=3, max_num_seqs=3)[0] == plain
    assert tokens(max_num_batched_tokens=8)[0] == plain
    for in_flight in (1, 2):
        small, engine = tokens(max_in_flight=in_flight, num_gpu_blocks_override=16)
        assert small == plain
        assert engine.stats()["preemptions"] > 0


def test_a_cached_prefix_changes_nothing(llm: LLM) -> None:
    prompt = "tart " * 40
    first, second = (run(llm, {"json": PERSON}, prompt, temperature=0) for _ in range(2))
    assert second.num_cached_tokens > 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_stop_string_ends_an_output_before_its_grammar_does(llm: LLM) -> None:
    (whole,) = run(llm, {"regex": "[a-z]{40}"}, temperature=0).outputs
    stop = whole.text[10:12]
    (cut,) = run(llm, {"regex": "[a-z]{40}"}, temperature=0, stop=stop).outputs
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_logprobs_of_what_a_grammar_forbids_are_told_and_can_be_written_as_json(llm: LLM) -> None:
    (choice,) = run(llm, {"choice": ["red", "green"]}, logprobs=5, temperature=1).outputs
    assert choice.logprobs is not None
    values = [entry.logprob for position in choice.logprobs for entry in position.values()]
    json.dumps(values, allow_nan=False)
    assert min(values) > -1000, "they are of the raw distribution, which a grammar does not change"


def test_a_request_whose_grammar_and_bans_leave_no_token_fails_alone(llm: LLM) -> None:
    bans = {token: -100.0 for token in range(3, 320) if "r" in llm.engine.require_tokenizer().decode([token])}
    failed, other = llm.generate(
        ["a", "b"], [params({"choice": ["red"]}, logit_bias=bans), SamplingParams(max_tokens=4)], use_tqdm=False
    )
    assert failed.outputs[0].finish_reason == "error"
    assert "no token that can be drawn" in (failed.error or "")
    assert len(other.outputs[0].token_ids) == 4
    assert run(llm, {"choice": ["red"]}).outputs[0].text == "red"


@pytest.mark.parametrize("param", ["ignore_eos", "min_tokens"])
def test_what_would_go_on_behind_the_end_of_a_grammar_is_refused(param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        params({"choice": ["red"]}, **{param: True if param == "ignore_eos" else 3})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({}, "structured_outputs"),
        ({"json": PERSON, "regex": "a"}, "structured_outputs"),
        ({"json": ""}, "structured_outputs.json"),
        ({"json": "[1"}, "structured_outputs.json"),
        ({"json": [1]}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"regex": 3}, "structured_outputs.regex"),
        ({"regex": "a\\"}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "red"}, "structured_outputs.choice"),
        ({"grammar": " "}, "structured_outputs.grammar"),
    ],
)
def test_a_constraint_of_a_wrong_form_is_refused_by_its_name(constraint: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(**constraint)
    assert caught.value.param == param


HOSTILE: list[dict[str, Any]] = [
    {"regex": "("},
    {"regex": "a" * 300_000},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"type": "string", "pattern": "("}},
    {"json": {"type": "nonsense"}},
    {"grammar": "start: missing"},
    {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
]


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs_and_stalls_nobody(llm: LLM) -> None:
    done = threading.Event()
    texts: list[str] = []

    def others() -> None:
        while not done.is_set():
            texts.append(run(llm, {"choice": ["red", "green"]}).outputs[0].text)

    beside = threading.Thread(target=others)
    beside.start()
    try:
        for constraint in HOSTILE:
            with pytest.raises(ParameterError) as caught:
                run(llm, constraint)
            assert caught.value.param == f"structured_outputs.{next(iter(constraint))}"
            assert "\n" not in str(caught.value)
    finally:
        done.set()
        beside.join()
    assert set(texts) <= {"red", "green"}
    assert texts


def test_an_engine_without_a_tokenizer_refuses_a_grammar(make_llm: MakeLLM) -> None:
    with pytest.raises(ParameterError, match="tokenizer"):
        run(make_llm(skip_tokenizer_init=True), {"choice": ["red"]}, [3, 4])
