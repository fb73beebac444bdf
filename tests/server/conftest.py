"""Servers to test with: a tiny random Llama on the exact path, one for all tests that leave it as they found it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.conftest import make_tiny_model
from tests.engine.speaker import make_speaker
from tests.server.running import Server
from tests.server.speaking import Speak

EXACT = ("--backend", "reference", "--dtype", "float32", "--disable-log-stats", "--port", "0")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not loop.last or add_generation_prompt %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random Llama, with a chat template."""
    folder = make_tiny_model(tmp_path_factory.mktemp("served"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    """A server that all tests share."""
    running = Server.start(str(model), *EXACT, "--served-model-name", "tiny", "--served-model-name", "also-tiny")
    yield running
    assert running.stop() == 0, running.lines


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of a test's own, ended after it."""
    started: list[Server] = []

    def make(*arguments: str, **kwargs: object) -> Server:
        started.append(Server.start(str(model), *EXACT, *arguments, **kwargs))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(30)


@pytest.fixture
def speak(tmp_path: Path) -> Iterator[Speak]:
    """Starts servers of models that say a text, ended after the test."""
    started: list[Server] = []

    def make(text: str, template: str, specials: tuple[str, ...]) -> Server:
        folder = make_speaker(tmp_path / str(len(started)), text, template, specials)
        started.append(Server.start(str(folder), *EXACT))
        return started[-1]

    yield make
    for one in started:
        one.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    """The official client."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
