"""Start, load, disconnects, a full queue, and the end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Server, events

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def test_health_answers_while_the_model_loads_and_requests_are_told_to_wait(start: Callable[..., Server]) -> None:
    running = start(ready=False)
    assert running.get("/health").status == 200
    reply = running.post("/v1/completions", LONG)
    if not any("octavo: ready" in line for line in running.lines):
        assert running.get("/ready").status in (200, 503)
    assert reply.status in (200, 503)
    if reply.status == 503:
        assert reply.error["code"] == "model_loading"
        assert int(reply.headers["retry-after"]) > 0
    running.wait_ready()
    assert running.post("/v1/completions", {**LONG, "max_tokens": 1}).status == 200


def test_the_front_never_loads_torch(server: Server) -> None:
    maps = open(f"/proc/{server.process.pid}/maps").read()  # noqa: SIM115
    assert "_core" in maps
    assert "libtorch" not in maps
    assert "libtorch" in open(f"/proc/{server.engine_pid()}/maps").read()  # noqa: SIM115


def test_an_engine_shows_itself_by_its_name(server: Server) -> None:
    line = Path(f"/proc/{server.engine_pid()}/cmdline").read_bytes().rstrip(b"\0").decode()
    assert line.startswith("octavo engine /")


def test_a_model_that_does_not_exist_ends_the_server_with_one_line() -> None:
    running = Server.start("no-such-model", "--port", "0", ready=False)
    assert running.process.wait(60) == 2
    assert "no-such-model" in running.wait_line("no-such-model")
    assert not any("Traceback" in line for line in running.lines)


def test_a_port_that_is_taken_ends_the_server_with_one_line(server: Server) -> None:
    with pytest.raises(AssertionError, match="cannot listen at"):
        Server.start("no-such-model", "--port", str(server.port), ready=False)


def test_events_come_one_by_one_while_the_engine_works(server: Server) -> None:
    stream = server.stream("/v1/completions", LONG)
    next(stream)
    # The engine is far from its end when the first token is here.
    other = server.post("/v1/completions", {**LONG, "max_tokens": 1})
    assert other.status == 200
    assert sum(1 for _ in stream) == 399


def wait_idle(server: Server) -> None:
    """Until nothing is left of earlier requests: a request for every sequence that may run has room."""
    end = time.monotonic() + 60
    while server.post("/v1/completions", {"prompt": [5], "max_tokens": 1, "n": 6}).status == 429:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_clients_that_leave_take_their_requests_along(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "4", "--max-queued-requests", "2")
    for number in range(60):
        body = {**LONG, "stream": number % 2 == 0}
        connection = running.connect()
        connection.request(
            "POST", "/v1/completions", str(body).replace("'", '"').replace("True", "true").replace("False", "false")
        )
        if number % 3 == 0 and body["stream"]:
            connection.getresponse().readline()
        elif number % 3 == 1:
            time.sleep(0.01)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    wait_idle(running)


def test_a_full_queue_refuses_at_once_and_finishes_what_it_took(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "2", "--max-queued-requests", "2")
    barrier = threading.Barrier(12)

    def ask(_: int) -> Any:
        barrier.wait()
        return running.post("/v1/completions", LONG)

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(ask, range(12)))
    taken = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 429]
    assert len(taken) >= 4
    assert len(taken) + len(refused) == 12
    assert len(refused) >= 1
    assert all(reply.body["usage"]["completion_tokens"] == 400 for reply in taken)
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert {reply.error["type"] for reply in refused} == {"rate_limit_error"}
    too_many = running.post("/v1/completions", {**LONG, "n": 5})
    assert too_many.status == 400, "it would never fit"


@pytest.mark.parametrize(("limit", "whole"), [("60", True), ("0", False)])
def test_sigterm_refuses_new_requests_and_lets_running_ones_finish_in_time(
    start: Callable[..., Server], limit: str, whole: bool
) -> None:
    running = start("--shutdown-timeout", limit)
    streams = [running.send("POST", "/v1/completions", {**LONG, "stream": True}) for _ in range(4)]
    firsts = [next(events(stream)) for stream in streams]
    assert len(firsts) == 4
    running.process.send_signal(signal.SIGTERM)
    if whole:
        running.wait_line("shutting down")
        reply = running.post("/v1/completions", LONG)
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        assert running.get("/ready").status == 503
        assert running.get("/health").status == 200
    for stream in streams:
        rest = list(events(stream))
        if whole:
            assert len(rest) == 399
            assert rest[-1]["choices"][0]["finish_reason"] == "length"
        else:
            assert rest[-1]["error"]["code"] == "shutting_down"
    assert running.process.wait(30) == 0


def test_a_second_signal_ends_at_once(start: Callable[..., Server]) -> None:
    running = start("--shutdown-timeout", "600")
    stream = running.send("POST", "/v1/completions", {**LONG, "stream": True})
    assert next(events(stream))
    running.process.send_signal(signal.SIGINT)
    running.wait_line("shutting down")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(30) in (0, 130)


def test_the_engine_ends_with_its_front(start: Callable[..., Server]) -> None:
    running = start()
    engine = running.engine_pid()
    running.process.kill()
    running.process.wait(30)
    end = time.monotonic() + 30
    while is_alive(engine):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_with_a_certificate_the_server_speaks_tls_and_nothing_else(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    files = [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([*made, *files], check=True, capture_output=True)
    running = start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), ready=False)
    assert any("listening at https://" in line for line in running.lines)
    running.wait_line("octavo: ready")
    context = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", running.port, timeout=60, context=context)
    for _ in range(2):  # one connection, kept
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": 3, "stream": True}))
        assert len(list(events(connection.getresponse()))) == 3
    with pytest.raises((http.client.HTTPException, OSError)):
        running.get("/health")


@pytest.mark.parametrize("wrong", ["missing.pem", "empty.pem"])
def test_a_certificate_that_cannot_be_read_ends_the_server_with_one_line(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "empty.pem").write_text("")
    path = str(tmp_path / wrong)
    with pytest.raises(AssertionError, match="TLS cannot be had"):
        Server.start("no-such-model", "--port", "0", "--ssl-certfile", path, "--ssl-keyfile", path, ready=False)
