"""`/v1/embeddings`, by the official client and by hand."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from octavo import LLM
from tests.server.running import Server

TEXTS = ["a tart", "the other day", "x"]


@pytest.fixture(scope="module")
def vectors(model: Path) -> Any:
    """What the engine gives in this process."""
    with LLM(str(model), backend="reference", dtype="float32", disable_log_stats=True) as llm:
        yield {
            (pooling, text): llm.embed(text, pooling=pooling)[0].outputs.embedding
            for pooling in ("last", "mean")
            for text in TEXTS
        }


def test_the_official_client_gets_the_vectors_of_the_engine_in_order(client: openai.OpenAI, vectors: Any) -> None:
    # The client asks for base64 and decodes it.
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    assert [entry.index for entry in reply.data] == [0, 1, 2]
    assert [entry.object for entry in reply.data] == ["embedding"] * 3
    for text, entry in zip(TEXTS, reply.data, strict=True):
        assert entry.embedding == pytest.approx(vectors["last", text], abs=1e-5)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 3
    assert reply.model == "tiny"


def test_base64_is_the_floats(server: Server, vectors: Any) -> None:
    body = {"model": "tiny", "input": TEXTS[0], "pooling": "mean"}
    floats = server.post("/v1/embeddings", body).body["data"][0]["embedding"]
    coded = server.post("/v1/embeddings", {**body, "encoding_format": "base64"}).body["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(np.array(floats))
    assert floats == pytest.approx(vectors["mean", TEXTS[0]], abs=1e-5)
    assert np.linalg.norm(floats) == pytest.approx(1, abs=1e-6)


def test_token_ids_are_prompts_and_dimensions_are_cut_before_the_scaling(server: Server) -> None:
    tokens = server.post("/tokenize", {"prompt": TEXTS[0]}).body["tokens"]
    replies = [
        server.post("/v1/embeddings", {"input": given, "user": "me"}).body["data"][0]["embedding"]
        for given in (TEXTS[0], tokens, [tokens])
    ]
    assert replies[1] == pytest.approx(replies[0])
    assert replies[2] == pytest.approx(replies[0])
    cut = server.post("/v1/embeddings", {"input": tokens, "dimensions": 5}).body["data"][0]["embedding"]
    kept = np.array(replies[0][:5])
    assert cut == pytest.approx(kept / np.linalg.norm(kept), abs=1e-6)
    raw = server.post("/v1/embeddings", {"input": tokens, "normalize": False}).body["data"][0]["embedding"]
    assert np.linalg.norm(raw) > 1.5
    assert np.array(raw) / np.linalg.norm(raw) == pytest.approx(np.array(replies[0]), abs=1e-6)


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("input", {"input": None}),
        ("input", {"input": []}),
        ("input", {"input": [[]]}),
        ("input", {"input": [""]}),
        ("input", {"input": [320]}),
        ("input", {"input": [-1]}),
        ("input", {"input": {"a": 1}}),
        ("input", {"input": [5] * 512}),
        ("dimensions", {"dimensions": 0}),
        ("dimensions", {"dimensions": 49}),
        ("dimensions", {"dimensions": "5"}),
        ("encoding_format", {"encoding_format": "hex"}),
        ("pooling", {"pooling": "cls"}),
        ("normalize", {"normalize": 1}),
        ("priority", {"priority": 1 << 40}),
        ("stream", {"stream": True}),
        ("max_tokens", {"max_tokens": 3}),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(server: Server, param: str, change: dict[str, Any]) -> None:
    reply = server.post("/v1/embeddings", {"input": "a", **change})
    assert reply.status == 400, reply.text
    assert reply.error["param"] == param
    assert server.post("/v1/embeddings", {"input": "a"}).status == 200


def test_the_longest_prompt_that_leaves_room_for_a_token_is_embedded(server: Server) -> None:
    assert server.post("/v1/embeddings", {"input": [5] * 511}).status == 200
    assert server.post("/v1/embeddings", {"input": [5] * 600, "truncate_prompt_tokens": -1}).status == 200
    refused = server.post("/v1/embeddings", {"input": [5] * 512})
    assert refused.error["code"] == "context_length_exceeded"


def test_many_inputs_are_one_reply_and_leave_nothing_behind(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "80")
    inputs = [[3 + (number * 7 + place) % 300 for place in range(1 + number * 5 % 150)] for number in range(60)]
    together = running.post("/v1/embeddings", {"input": inputs, "pooling": "mean"})
    assert together.status == 200, together.text
    for number in (0, 1, 29, 59):
        alone = running.post("/v1/embeddings", {"input": inputs[number], "pooling": "mean"}).body["data"][0]
        assert together.body["data"][number]["embedding"] == pytest.approx(alone["embedding"], abs=1e-5)
    connection = running.connect()
    connection.request("POST", "/v1/embeddings", json.dumps({"input": inputs}), {"Content-Type": "application/json"})
    connection.close()
    assert running.wait_idle()
