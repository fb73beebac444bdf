"""`/v1/completions`: what is said in return is what the engine makes of the same request in this process."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM, SamplingParams
from octavo.batch.bodies import parse_completion_body
from octavo.batch.replies import Echo, completion_reply
from tests.server.running import Server

PROMPT = "the art of the tart"


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    engine = LLM(str(model), backend="reference", dtype="float32", disable_log_stats=True)
    yield engine
    engine.shutdown()


def expected(llm: LLM, body: dict[str, Any]) -> dict[str, Any]:
    """What the batch writer replies to the body: another implementation of the protocol over the same engine."""
    parsed = parse_completion_body(body, llm.engine.default_sampling_params())
    tokenizer = llm.engine.require_tokenizer()
    llm.engine.core.reset_prefix_cache()
    submissions = [llm.engine.submission(prompt, parsed.params) for prompt in parsed.prompts]
    with llm.engine.submit(submissions) as batch:
        outputs = batch.collect(lambda _: None)
    echoes = None
    if parsed.echo:
        ids = [output.prompt_token_ids for output in outputs]
        texts = [
            p.text if p.text is not None else tokenizer.decode(i) for p, i in zip(parsed.prompts, ids, strict=True)
        ]
        pieces = [[tokenizer.token_bytes(token) for token in i] for i in ids]
        echoes = [Echo(text, piece) for text, piece in zip(texts, pieces, strict=True)]
    return completion_reply("x", "tiny", outputs, echoes)


def without_extras(reply: dict[str, Any]) -> dict[str, Any]:
    choices = [{k: v for k, v in choice.items() if k != "stop_reason"} for choice in reply["choices"]]
    usage = {**reply["usage"], "prompt_tokens_details": None}
    return {"object": reply["object"], "model": reply["model"], "choices": choices, "usage": usage}


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "negative seed": {"seed": -3},
    "choices": {"seed": 1, "n": 3},
    "logprobs": {"seed": 1, "logprobs": 3},
    "echo": {"seed": 1, "echo": True},
    "echo with logprobs": {"seed": 2, "echo": True, "logprobs": 2, "n": 2},
    "token ids": {"prompt": [40, 41, 300, 42], "seed": 3, "echo": True, "logprobs": 0},
    "batch": {"prompt": ["a", "the tart", [50, 60]], "seed": 4, "n": 2, "logprobs": 1},
    "penalties": {"temperature": 0, "presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"seed": 5, "logit_bias": {"70": 100, "71": -100}, "max_tokens": 4},
    "bans": {"seed": 5, "bad_words": ["a", "or"], "allowed_token_ids": list(range(60, 110))},
    "stop string": {"seed": 11, "temperature": 1.2, "stop": ["e", "o", "A"], "max_tokens": 64},
    "stop string included": {
        "seed": 11,
        "stop": ["e", "A"],
        "include_stop_str_in_output": True,
        "max_tokens": 64,
        "logprobs": 1,
    },
    "stop ids": {"seed": 6, "stop_token_ids": list(range(40, 140)), "min_tokens": 3, "max_tokens": 64},
    "no end": {"seed": 6, "ignore_eos": True, "max_tokens": 40, "logit_bias": {"1": 50}},
    "the model's end": {"seed": 6, "logit_bias": {"1": 100}, "skip_special_tokens": False},
    "truncated": {"prompt": [50, 60, 70, 80], "truncate_prompt_tokens": 2, "seed": 1, "echo": True},
    "empty text": {"prompt": "", "temperature": 0},
    "long": {"prompt": list(range(3, 303)) * 1, "max_tokens": 1000, "seed": 9, "ignore_eos": True},
    "null is not given": {"temperature": 0, "stop": None, "seed": None, "logprobs": None, "stream": None},
    "what clients send to a service": {"temperature": 0, "user": "me", "metadata": {"a": "b"}},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_reply_is_what_the_engine_gives_in_this_process(name: str, server: Server, llm: LLM) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, **BODIES[name]}
    if "seed" not in body:
        body["temperature"] = 0
    reply = server.post("/v1/completions", body)
    assert reply.status == 200, reply.text
    assert without_extras(reply.body) == without_extras(expected(llm, body))


@pytest.mark.parametrize("name", BODIES)
def test_joined_events_are_the_reply(name: str, server: Server) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 0, **BODIES[name], "return_token_ids": True}
    body["seed"] = body["seed"] or 0
    whole = server.post("/v1/completions", body).body
    events = list(server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert len({chunk["id"] for chunk in events}) == 1
    assert all(chunk["object"] == "text_completion" and chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [t for part in own for t in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        # One event for each token, and one more for the prompt if it is repeated.
        assert len(own) == len(choice["token_ids"]) + bool(body.get("echo"))
        if choice["logprobs"] is not None:
            for field in choice["logprobs"]:
                assert [x for part in own for x in part["logprobs"][field]] == choice["logprobs"][field]


def test_the_official_client_completes_and_streams(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "seed": 1, "logprobs": 2, "n": 2}
    whole = client.completions.create(**arguments)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    streamed = ["", ""]
    usage = None
    for chunk in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_a_seeded_request_does_not_depend_on_its_neighbours(server: Server) -> None:
    body = {"prompt": PROMPT, "seed": 42, "temperature": 0.8, "max_tokens": 16, "return_token_ids": True}
    alone = server.post("/v1/completions", body).body["choices"][0]["token_ids"]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        neighbours = [pool.submit(server.post, "/v1/completions", {**body, "seed": None}) for _ in range(8)]
        among = pool.submit(server.post, "/v1/completions", body).result().body["choices"][0]["token_ids"]
        others = [one.result().body["choices"][0]["token_ids"] for one in neighbours]
    assert among == alone
    assert len({tuple(ids) for ids in others}) > 1, "requests without a seed differ"


def test_choices_differ_and_are_reproducible(server: Server) -> None:
    body = {"prompt": PROMPT, "seed": 1, "temperature": 1, "n": 3, "max_tokens": 12}
    texts = [[choice["text"] for choice in server.post("/v1/completions", body).body["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_a_cached_prompt_is_told_and_changes_nothing(server: Server) -> None:
    body = {"prompt": list(range(100, 180)), "temperature": 0, "max_tokens": 4, "cache_salt": "of this test alone"}
    first, second = (server.post("/v1/completions", body).body for _ in range(2))
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert first["choices"] == second["choices"]
    other = server.post("/v1/completions", {**body, "cache_salt": "another"}).body
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_sampling_parameters_are_those_of_the_model_unless_given(start: Any, llm: LLM) -> None:
    running = start("--override-generation-config", '{"temperature": 0, "max_new_tokens": 5}')
    told = running.get("/v1/models").body["data"][0]["default_sampling_params"]
    assert told["temperature"] == 0
    assert told["max_new_tokens"] == 5
    reply = running.post("/v1/completions", {"prompt": PROMPT, "return_token_ids": True}).body
    greedy = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0]
    assert reply["choices"][0]["token_ids"] == greedy.token_ids
