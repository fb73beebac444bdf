"""What users of other servers reported: text, log-probabilities, memory, histories, ports; each as its whole kind."""

from __future__ import annotations

import json
import math
import os
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Server
from tests.server.test_metrics import scrape

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HIGH_BYTES = list(range(97, 191))
"""Tokens that are single bytes outside of ASCII."""


def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.post(COMPLETIONS, body)
    assert reply.status == 200, reply.text
    choice: dict[str, Any] = reply.body["choices"][0]
    return choice


def joined(server: Server, body: dict[str, Any]) -> tuple[str, str | None]:
    choices = [event["choices"][0] for event in server.stream(COMPLETIONS, body)]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_no_text_are_replaced_and_the_stream_goes_on(server: Server, seed: int) -> None:
    body = {"prompt": "x", "allowed_token_ids": HIGH_BYTES, "max_tokens": 64, "seed": seed, "ignore_eos": True}
    choice = whole(server, body)
    assert "\ufffd" in choice["text"]
    assert joined(server, body) == (choice["text"], "length")


@pytest.mark.parametrize("seed", range(10))
def test_streamed_text_is_that_of_all_ids_together(server: Server, seed: int) -> None:
    body = {
        "prompt": "a tart and",
        "temperature": 3,
        "max_tokens": 40,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    choice = whole(server, body)
    assert joined(server, body)[0] == choice["text"]
    decoded = server.post("/detokenize", {"tokens": choice["token_ids"]}).body["prompt"]
    assert re.sub(r"<(bos|eos|pad)>", "", decoded) == choice["text"]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_or_not_in_streams_as_in_whole_replies(server: Server, skip: bool) -> None:
    body = {
        "prompt": "x",
        "logit_bias": {"2": 20, "1": 20},
        "temperature": 1,
        "seed": 3,
        "max_tokens": 30,
        "ignore_eos": True,
        "skip_special_tokens": skip,
    }
    text = whole(server, body)["text"]
    assert ("<pad>" in text) is not skip
    assert joined(server, body)[0] == text


def test_a_server_without_a_tokenizer_refuses_what_needs_one_and_answers_in_ids(start: Callable[..., Server]) -> None:
    running = start("--skip-tokenizer-init")
    for path, body, param in [
        (COMPLETIONS, {"prompt": [5], "stop": ["x"]}, "stop"),
        (COMPLETIONS, {"prompt": [5], "bad_words": ["x"]}, None),
        (COMPLETIONS, {"prompt": "text"}, None),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}, None),
        ("/v1/embeddings", {"input": "text"}, None),
        ("/tokenize", {"prompt": "x"}, None),
    ]:
        reply = running.post(path, body)
        assert reply.status == 400, (path, body)
        assert "tokenizer" in reply.error["message"] or reply.error["param"] == param
    body = {"prompt": [5], "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    assert len(whole(running, body)["token_ids"]) == 4


# -- ends ------------------------------------------------------------------------------------------------------------


def test_min_tokens_counts_outputs_and_bans_every_end(server: Server) -> None:
    body = {"prompt": [7] * 40, "logit_bias": {"1": 100}, "stop_token_ids": [9], "temperature": 0, "max_tokens": 20}
    for least in (0, 1, 8, 20):
        choice = whole(server, {**body, "min_tokens": least, "return_token_ids": True})
        assert len(choice["token_ids"]) == min(20, least + 1)
        assert choice["finish_reason"] == ("stop" if least < 20 else "length")
    choice = whole(server, {**body, "ignore_eos": True, "return_token_ids": True})
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (20, "length")
    bias = {"9": 100}
    stopped = whole(server, {**body, "logit_bias": bias, "ignore_eos": True})
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", 9), "an end that the user names counts"


def test_every_choice_of_a_stream_has_an_end_of_its_own(server: Server) -> None:
    body = {"prompt": "the", "n": 4, "seed": 11, "max_tokens": 60, "stop": ["e", "a"], "temperature": 1}
    texts, ends = [""] * 4, [None] * 4
    for event in server.stream(COMPLETIONS, body):
        (choice,) = event["choices"]
        assert ends[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert all(ends)
    assert len(set(texts)) > 1
    assert [c["text"] for c in server.post(COMPLETIONS, body).body["choices"]] == texts


# -- log-probabilities -----------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_the_same_cold_cached_and_after_a_longer_prompt(server: Server) -> None:
    prompt = [random.Random(1).randrange(3, 300) for _ in range(100)]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    cold = whole(server, body)["logprobs"]
    again = whole(server, body)["logprobs"]
    whole(server, {"prompt": prompt[:80] + [9] * 60, "max_tokens": 1})
    after = whole(server, body)["logprobs"]
    assert cold["token_logprobs"][0] is None
    assert len(cold["token_logprobs"]) == 101
    assert all(value is not None for value in cold["token_logprobs"][1:])
    for other in (again, after):
        assert other["tokens"] == cold["tokens"]
        assert other["token_logprobs"][1:] == pytest.approx(cold["token_logprobs"][1:], abs=1e-5)


def test_prompt_logprobs_of_a_prompt_in_chunks_are_those_of_a_whole_one(
    server: Server, start: Callable[..., Server]
) -> None:
    cut = start("--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    body = {"prompt": list(range(50, 150)), "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    one, other = whole(server, body)["logprobs"], whole(cut, body)["logprobs"]
    assert one["tokens"] == other["tokens"]
    assert one["token_logprobs"][1:] == pytest.approx(other["token_logprobs"][1:], abs=1e-5)


def test_impossible_tokens_have_a_number_that_json_can_hold(server: Server) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for change in (
        {"echo": True, "logprobs": 5, "top_k": 1},
        {"logprobs": 5, "allowed_token_ids": [5, 6]},
        {"logprobs": 5, "logit_bias": {"5": -100}},
    ):
        reply = server.post(COMPLETIONS, {"prompt": "a tart", "max_tokens": 3, **change})
        assert reply.status == 200
        body = json.loads(reply.text, parse_constant=no_constant)
        found = body["choices"][0]["logprobs"]["token_logprobs"]
        assert all(math.isfinite(value) for value in found if value is not None)


def test_logprobs_are_those_before_temperature_penalties_and_bias(server: Server) -> None:
    body = {"prompt": [40, 41, 42], "max_tokens": 1, "logprobs": 3}
    changes: list[dict[str, Any]] = [
        {"temperature": 0.1},
        {"temperature": 2},
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2},
        {"logit_bias": {"5": 20}},
        {"top_k": 1},
    ]
    first = [whole(server, {**body, "seed": 1, **change})["logprobs"]["top_logprobs"][0] for change in changes]
    plain = whole(server, {**body, "temperature": 0})["logprobs"]["top_logprobs"][0]
    best = sorted(plain.items(), key=lambda item: -item[1])[:3]
    for found in first:
        assert {token: found[token] for token, _ in best} == pytest.approx(dict(best), abs=1e-5)


def test_presence_counts_outputs_alone_and_repetition_the_prompt_too(server: Server) -> None:
    draw = random.Random(3)
    changed = 0
    for _ in range(20):
        prompt = [draw.randrange(3, 300) for _ in range(200)]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 1, "return_token_ids": True}
        plain = whole(server, body)["token_ids"]
        for name in ("presence_penalty", "frequency_penalty"):
            assert whole(server, {**body, name: 2})["token_ids"] == plain, "no output so far"
        changed += whole(server, {**body, "repetition_penalty": 3})["token_ids"] != plain
    assert changed > 0
    body = {"prompt": [60] * 90, "temperature": 0, "max_tokens": 20, "return_token_ids": True, "ignore_eos": True}
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5}):
        cold, cached = (whole(server, {**body, **penalty, "cache_salt": str(penalty)})["token_ids"] for _ in range(2))
        assert cold == cached


@pytest.mark.parametrize("token", [5, 100, 319])
def test_a_bias_rules_every_step(server: Server, token: int) -> None:
    body = {"prompt": "x", "max_tokens": 30, "seed": 5, "temperature": 2, "ignore_eos": True, "return_token_ids": True}
    assert whole(server, {**body, "logit_bias": {str(token): 100}})["token_ids"] == [token] * 30
    banned = whole(server, {**body, "max_tokens": 200, "logit_bias": {str(token): -100}})["token_ids"]
    assert token not in banned


# -- memory and limits -----------------------------------------------------------------------------------------------


def test_requests_that_are_preempted_lose_and_repeat_nothing(start: Callable[..., Server]) -> None:
    roomy, small = start(), start("--num-gpu-blocks-override", "34", "--max-num-seqs", "6")
    bodies = [
        {
            "prompt": [20 + number] * 30,
            "max_tokens": 200,
            "ignore_eos": True,
            "return_token_ids": True,
            "repetition_penalty": 1.1,
            **({"temperature": 0} if number % 2 else {"seed": number, "temperature": 1.2}),
        }
        for number in range(6)
    ]
    wanted = [whole(roomy, body)["token_ids"] for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda body: whole(small, body)["token_ids"], bodies))
    assert found == wanted
    assert scrape(small)['octavo:num_preemptions_total{engine="0"}'] > 0


def test_every_request_has_the_whole_context_however_many_run(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "4")
    length = running.get("/v1/models").body["data"][0]["max_model_len"]
    body = {"prompt": [5] * int(0.9 * length), "max_tokens": length, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda n: running.post(COMPLETIONS, {**body, "seed": n}), range(4)))
    for reply in replies:
        assert reply.status == 200
        assert reply.body["usage"]["total_tokens"] == length
        assert reply.body["choices"][0]["finish_reason"] == "length"


def test_prefixes_are_right_while_blocks_are_evicted_all_the_time(start: Callable[..., Server], server: Server) -> None:
    small = start("--num-gpu-blocks-override", "70", "--max-num-seqs", "8")
    draw = random.Random(5)
    trie = [[draw.randrange(3, 300) for _ in range(40)] for _ in range(4)]
    prompts = []
    for _ in range(80):
        parts = [draw.choice(trie)[: draw.choice([16, 17, 32, 40])] for _ in range(draw.randrange(1, 4))]
        prompts.append([token for part in parts for token in part] + [draw.randrange(3, 300)])
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: whole(small, {**body, "prompt": prompt})["token_ids"], prompts))
    alone = [
        whole(server, {**body, "prompt": prompt, "cache_salt": str(number)})["token_ids"]
        for number, prompt in enumerate(prompts)
    ]
    assert found == alone
    assert small.wait_idle()
    assert scrape(small)['octavo:prefix_cache_hits_total{engine="0"}'] > 0
    assert scrape(small)['octavo:kv_cache_usage_perc{engine="0"}'] == 0


# -- chats -----------------------------------------------------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "a tart"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "r"}],
        [USER, USER],
        [{"role": "developer", "content": "d"}, USER],
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "t"}], "reasoning_content": "r"}, USER],
    ],
)
def test_histories_that_clients_replay_are_taken(server: Server, messages: list[dict[str, Any]]) -> None:
    reply = server.post(CHAT, {"messages": messages, "max_tokens": 2})
    assert reply.status == 200, reply.text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "x",
    ],
)
def test_histories_that_say_nothing_are_refused_and_the_next_request_is_answered(server: Server, messages: Any) -> None:
    for path in (CHAT, "/tokenize"):
        reply = server.post(path, {"messages": messages})
        assert reply.status == 400, reply.text
        assert "Traceback" not in reply.error["message"]
    assert server.post(CHAT, {"messages": [USER], "max_tokens": 1}).status == 200


# -- security --------------------------------------------------------------------------------------------------------


def listening(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, of the process's listening TCP sockets."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


def test_nothing_listens_but_the_api_at_the_address_that_was_asked_for(server: Server) -> None:
    assert listening(server.process.pid) == [f"0100007F:{server.port:04X}"]
    assert listening(server.engine_pid()) == []


def test_the_socket_of_the_engine_is_its_owners_alone(server: Server) -> None:
    sockets = [
        line.split()[-1]
        for line in Path(f"/proc/{server.process.pid}/net/unix").read_text().splitlines()
        if line.endswith("engine.sock")
    ]
    folders = {Path(path).parent for path in sockets}
    assert folders
    for folder in folders:
        assert folder.stat().st_mode & 0o077 == 0


def test_a_client_that_sends_its_body_slowly_holds_nobody_up(server: Server) -> None:
    slow = server.connect()
    slow.putrequest("POST", COMPLETIONS)
    slow.putheader("Content-Length", "1000")
    slow.endheaders()
    slow.send(b'{"prompt"')
    done = threading.Event()

    def ask() -> None:
        assert whole(server, {"prompt": "x", "max_tokens": 2})["text"] is not None
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(60)
    slow.close()
