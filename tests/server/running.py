"""A server in a process of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120.0


@dataclass
class Reply:
    """An answer that is not a stream."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must have the protocol's form."""
        assert set(self.body) == {"error"}
        error: dict[str, Any] = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error


@dataclass
class Server:
    """`octavo serve` and what it prints."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    port: int = 0
    patience: float = START_SECONDS
    """Seconds that a client waits for the next bytes."""

    @classmethod
    def start(cls, *arguments: str, command: tuple[str, ...] = (), ready: bool = True, **env: str) -> Server:
        """Starts a server on a free port and waits until it listens, and (if `ready`) until the model is loaded."""
        command = command or (sys.executable, "-m", "octavo", "serve")
        process = subprocess.Popen(
            [*command, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **env},
        )
        server = cls(process)
        listening = threading.Event()
        threading.Thread(target=server._read, args=(listening,), daemon=True).start()
        if not listening.wait(START_SECONDS) or not server.port:
            process.kill()
            raise AssertionError(f"no server: {server.lines}")
        if ready:
            server.wait_ready()
        return server

    def _read(self, listening: threading.Event) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            found = re.search(r"listening at https?://[^ ]*:(\d+)", line)
            if found:
                self.port = int(found[1])
                listening.set()
        listening.set()

    def wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self.get("/ready").status != 200:
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < end, self.lines
            time.sleep(0.05)

    def wait_line(self, text: str) -> str:
        """Waits until the server has printed a line with `text`."""
        end = time.monotonic() + START_SECONDS
        while True:
            for line in self.lines:
                if text in line:
                    return line
            assert time.monotonic() < end, self.lines
            time.sleep(0.02)

    def wait_count(self, text: str, count: int) -> None:
        """Waits until the server has printed `count` lines with `text`."""
        end = time.monotonic() + START_SECONDS
        while sum(text in line for line in self.lines) < count:
            assert time.monotonic() < end, self.lines
            time.sleep(0.02)

    def wait_idle(self) -> bool:
        """Waits until the engine has let go of every request; False if it does not."""
        end = time.monotonic() + START_SECONDS
        names = ("num_requests_running", "num_requests_waiting")
        while time.monotonic() < end:
            text = self.get("/metrics").text
            counts = [re.findall(rf"^octavo:{name}{{.*}} (\d+)$", text, re.MULTILINE) for name in names]
            if all(found and set(found) == {"0"} for found in counts):
                return True
            time.sleep(0.02)
        return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Sends a request and returns the answer with its body unread; a body that is not bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        response = self.send(method, path, body, headers)
        text = response.read().decode()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, text)

    def get(self, path: str, **kwargs: Any) -> Reply:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any, **kwargs: Any) -> Reply:
        return self.request("POST", path, body, **kwargs)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, parsed strictly; it must end with `[DONE]`."""
        response = self.send("POST", path, {**body, "stream": True})
        if response.status != 200:
            raise AssertionError(response.read().decode())
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield from events(response)

    def engine_pid(self) -> int:
        """The process that runs the model."""
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> list[int]:
        """The processes that run the model, one for each replica."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for path in children.parent.parent.glob("*/children") for pid in path.read_text().split()]

    def stop(self) -> int:
        """Ends the server as an operator does; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Events of a stream: each is one `data:` line and an empty line, the last is `[DONE]`."""
    while True:
        line = response.readline().decode()
        assert line.startswith("data: "), repr(line)
        assert line.endswith("\n")
        assert response.readline() == b"\n"
        data = line.removeprefix("data: ").strip()
        if data == "[DONE]":
            assert response.read() == b""
            return
        yield json.loads(data)
