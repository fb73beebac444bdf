"""A tiny model that chats, commands as processes, and a terminal to drive them in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from octavo import LLM
from tests.engine.conftest import make_tiny_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
EXACT = ["--backend", "reference", "--dtype", "float32"]
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a chat template and a long context."""
    folder = make_tiny_model(tmp_path_factory.mktemp("chat"), max_position_embeddings=16384)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama without a chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def small_llm(chat_model: Path) -> Iterator[LLM]:
    """An engine of it with room for 200 tokens, for tests that need no process."""
    with LLM(str(chat_model), backend="reference", dtype="float32", disable_log_stats=True, max_model_len=200) as llm:
        yield llm


def octavo(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        input=stdin,
        capture_output=True,
        timeout=180,
        check=False,
        env={**os.environ, **ENVIRONMENT, **environment},
    )


class Terminal:
    """A command in a pseudo-terminal that answers as a real one does, and what its screen shows."""

    def __init__(self, arguments: list[str], environment: dict[str, str], rows: int = 50, columns: int = 100) -> None:
        # The terminal's own size counts: the test runner may say another.
        ours = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "octavo", *arguments],
            env={**ours, **ENVIRONMENT, "TERM": "xterm-256color", **environment},
            dimensions=(rows, columns),
            timeout=60,
        )
        self.screen = pyte.Screen(columns, rows)
        # Programs ask where the cursor is.
        self.screen.write_process_input = self.child.send  # type: ignore[method-assign]
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def line(self) -> str:
        """The line of the cursor."""
        return self.screen.display[self.screen.cursor.y].rstrip()

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Reads until the condition holds."""
        deadline = time.monotonic() + 90
        while not condition():
            try:
                data = self.child.read_nonblocking(65536, timeout=1)
            except pexpect.TIMEOUT:
                data = b""
            except pexpect.EOF:
                data = b""
                if condition():
                    return
                raise AssertionError(f"ended while waiting for {what}; the screen shows:\n{self.text}") from None
            self.raw += data
            self._stream.feed(data)
            assert time.monotonic() < deadline, f"no {what}; the screen shows:\n{self.text}"

    def wait_for(self, text: str) -> None:
        self.wait(lambda: text in self.text, repr(text))

    def prompt(self) -> None:
        """Waits for an empty prompt."""
        self.wait(lambda: self.line == ">>>", "prompt")

    def enter(self, *lines: str) -> str:
        """Types lines at the prompt, waits for the next prompt, and returns what was shown meanwhile."""
        self.prompt()
        self.send("\x0c")  # a clean screen
        self.wait(lambda: self.screen.cursor.y == 0, "clean screen")
        for line in lines:
            self.send(line + "\r")
        self.wait(lambda: self.line == ">>>" and self.screen.cursor.y > 0, "next prompt")
        return self.text

    def resize(self, rows: int, columns: int) -> None:
        self.child.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def kill(self) -> None:
        """Ends the program if it still runs; pexpect's own way gives a killed process a tenth of a second."""
        if self.child.isalive():
            os.kill(self.child.pid, signal.SIGKILL)
            self.child.wait()
        self.child.close()

    def end(self) -> int:
        """Waits for the end and returns the exit status."""
        self.wait(lambda: not self.child.isalive(), "end")
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -(self.child.signalstatus or 0)


@pytest.fixture
def terminal(chat_model: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts chats in terminals, which are gone after the test."""
    made: list[Terminal] = []

    def start(*arguments: str, **environment: str) -> Terminal:
        command = ["chat", str(chat_model), *EXACT, *arguments]
        made.append(Terminal(command, {"XDG_STATE_HOME": str(tmp_path), **environment}))
        return made[-1]

    yield start
    for one in made:
        one.kill()
