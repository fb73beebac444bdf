"""The engine process dies or hangs, and no client sees it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from tests.server.running import Server

TOKENS = 160
KILLER_TOKEN = 319
"""A prompt with this token is fatal to the faulty engine."""


def bodies(count: int) -> list[dict[str, Any]]:
    """Different requests: greedy and drawn, with penalties, choices, log-probabilities, stops and echo."""
    draw = random.Random(7)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1, "temperature": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"seed": 2, "n": 2, "logprobs": 2},
        {"seed": 3, "stop": ["zq", "\u0000"], "min_tokens": 20},
        {"seed": 4, "echo": True, "logprobs": 1},
        {"seed": 5, "logit_bias": {"5": -100, "7": 3}, "top_k": 50},
    ]
    found = []
    for number in range(count):
        prompt = [draw.randrange(3, 300) for _ in range(draw.randrange(2, 60))]
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        found.append({**body, **kinds[number % len(kinds)], "stream": number % 4 != 3})
    return found


def ask(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a reply, whole: text, ids, log-probabilities, how it ended."""
    if not body["stream"]:
        reply = server.post("/v1/completions", body)
        assert reply.status == 200, reply.text
        return [tidy(choice) for choice in reply.body["choices"]]
    choices: dict[int, dict[str, Any]] = {}
    for event in server.stream("/v1/completions", body):
        assert "error" not in event, event
        (choice,) = event["choices"]
        known = choices.setdefault(
            choice["index"], {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
        )
        assert known["finish_reason"] is None, "nothing comes after the end"
        known["text"] += choice["text"]
        known["token_ids"] += choice["token_ids"]
        known["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
        known["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def tidy(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
    return {**{name: choice[name] for name in ("text", "token_ids", "finish_reason")}, "logprobs": logprobs}


def ask_all(server: Server, all_bodies: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    with ThreadPoolExecutor(len(all_bodies)) as pool:
        return list(pool.map(lambda body: ask(server, body), all_bodies))


def without_values(replies: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [[{**choice, "logprobs": len(choice["logprobs"])} for choice in reply] for reply in replies]


def assert_same(found: list[list[dict[str, Any]]], expected: list[list[dict[str, Any]]]) -> None:
    """The same tokens, texts and ends; log-probabilities to the last digits of their arithmetic."""
    assert without_values(found) == without_values(expected)
    for reply, other in zip(found, expected, strict=True):
        for choice, same in zip(reply, other, strict=True):
            assert choice["logprobs"] == pytest.approx(same["logprobs"], abs=1e-4)


def deaths(server: Server) -> int:
    return sum("starting it again" in line for line in server.lines)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_streams_go_on_when_the_engine_is_killed(start: Callable[..., Server], kills: int) -> None:
    running = start("--max-num-seqs", "16")
    # An answer that is not streamed may have to wait for many starts of the engine.
    running.patience = 1200
    requests = bodies(32)
    undisturbed = ask_all(running, requests)
    stop, draw = threading.Event(), random.Random(kills)
    killed = 0

    def kill_at_random() -> None:
        nonlocal killed
        while killed < kills and not stop.wait(draw.uniform(0.0, 1.5)):
            if running.get("/ready").status == 200:
                os.kill(running.engine_pid(), signal.SIGKILL)
                killed += 1
                running.wait_count("starting it again", killed)
                # Started, not yet ready, or at work again: all moments are tried.
                if draw.random() < 0.7:
                    running.wait_ready()

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_at_random)
        rounds = 0
        while rounds == 0 or not killer.done():
            assert_same(ask_all(running, requests), undisturbed)
            rounds += 1
        stop.set()
        killer.result()
    assert deaths(running) >= kills


def test_an_engine_that_hangs_is_replaced(start: Callable[..., Server]) -> None:
    running = start("--engine-timeout", "2")
    requests = bodies(8)
    undisturbed = ask_all(running, requests)
    with ThreadPoolExecutor(1) as pool:
        replies = pool.submit(ask_all, running, requests)
        time.sleep(0.3)
        os.kill(running.engine_pid(), signal.SIGSTOP)
        assert_same(replies.result(), undisturbed)
    assert running.get("/ready").status == 200
    assert deaths(running) <= 1


def test_a_new_engine_can_be_asked_for_and_nobody_notices(start: Callable[..., Server]) -> None:
    running = start()
    requests = bodies(8)
    undisturbed = ask_all(running, requests)
    before = running.engine_pid()
    with ThreadPoolExecutor(1) as pool:
        replies = pool.submit(ask_all, running, requests)
        time.sleep(0.3)
        running.process.send_signal(signal.SIGHUP)
        running.wait_count("octavo: the engine is ready again", 1)
        assert_same(replies.result(), undisturbed)
    assert running.engine_pid() != before


FAULTY = f"""
import os, sys
import numpy as np
from octavo.worker.model_runner import ModelRunner

forward = ModelRunner.forward

def fatal(self, plan):
    prompts = {{init.slot: init.tokens[: init.integer("num_prompt_tokens")] for init in plan.slot_inits()}}
    slots = {{slot for slot, prompt in prompts.items() if {KILLER_TOKEN} in prompt}}
    self.fatal_slots = (getattr(self, "fatal_slots", set()) - {{int(s) for s in plan.freed_slots}}) | slots
    if self.fatal_slots & {{int(s) for s in plan.rows("slot")}}:
        os._exit(17)
    return forward(self, plan)

ModelRunner.forward = fatal
from pathlib import Path
from octavo.engine_process import main
sys.exit(main(Path(sys.argv[1])))
"""

FRONT = """
import json, sys
from octavo.cli.serve import run_front
sys.exit(run_front(json.loads(sys.argv[1])))
"""


@pytest.fixture
def faulty(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Any:
    """A server of so many replicas that each die whenever they compute a prompt with `KILLER_TOKEN`."""
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    config = EngineConfig(model=str(model), backend="reference", dtype="float32", disable_log_stats=True)
    arguments = {
        "host": "127.0.0.1",
        "port": 0,
        "model": str(model),
        "served_model_name": ["tiny"],
        "api_key": [],
        "allowed_origin": [],
        "tls": None,
        "unknown_fields": "reject",
        "max_body_bytes": 1 << 20,
        "max_queued_requests": 100,
        "shutdown_timeout": 1.0,
        "engine_timeout": 30.0,
        "data_parallel_size": request.param,
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
        "engine_command": [sys.executable, str(script)],
        "engine_config": asdict(config),
    }
    running = Server.start(json.dumps(arguments), command=(sys.executable, "-c", FRONT))
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("faulty", "others"),
    [(1, 8), (2, 8), pytest.param(1, 31, marks=pytest.mark.slow), pytest.param(2, 31, marks=pytest.mark.slow)],
    indirect=["faulty"],
)
def test_a_request_that_kills_the_engine_is_found_and_the_others_finish(faulty: Server, others: int) -> None:
    faulty.patience = 600
    requests = bodies(others)
    undisturbed = ask_all(faulty, requests)
    deadly = {"prompt": [5, KILLER_TOKEN, 6], "max_tokens": 20}
    with ThreadPoolExecutor(3) as pool:
        replies = pool.submit(ask_all, faulty, requests)
        time.sleep(0.1)
        dead = pool.submit(faulty.post, "/v1/completions", deadly)
        dead_stream = pool.submit(lambda: list(faulty.stream("/v1/completions", deadly)))
        assert_same(replies.result(), undisturbed)
        assert dead.result().status == 500
        assert dead.result().error["type"] == "server_error"
        (event,) = dead_stream.result()
        assert event["error"]["type"] == "server_error"
    assert faulty.post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status == 200
