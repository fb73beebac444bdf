"""`/openapi.json` says what the server does: every route, every field, and answers of the form that it promises."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Server

SOURCES = Path(__file__).parents[2] / "rust" / "server" / "src"
MESSAGES = [{"role": "user", "content": "hi"}]
# Bodies that are answered soon, for each route that takes one.
LEAST: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": [5, 6], "max_tokens": 1}],
    "/v1/chat/completions": [{"messages": MESSAGES, "max_tokens": 1}],
    "/v1/responses": [{"input": "hi", "max_output_tokens": 1}],
    "/v1/messages": [{"messages": MESSAGES, "max_tokens": 1}],
    "/v1/messages/count_tokens": [{"messages": MESSAGES}],
    "/v1/embeddings": [{"input": [5, 6]}],
    "/tokenize": [{"prompt": "hi"}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [5, 6]}],
}


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    reply = server.get("/openapi.json")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    found: dict[str, Any] = reply.body
    return found


def request_fields(document: dict[str, Any], path: str) -> set[str]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return set(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"])


def candidates(document: dict[str, Any]) -> set[str]:
    """Every name that is a field anywhere: in the document, or in what the sources take out of bodies."""
    text = "".join(path.read_text() for path in (SOURCES / "protocol").glob("*.rs"))
    named = set(re.findall(r'\b(?:body|options|text|reasoning|conversation)\s*\.\w+\(\s*"([a-z_]+)"', text))
    named |= set(re.findall(r'\b(?:number|count)\(\s*body,\s*"([a-z_]+)"', text))
    lists = re.findall(r"for name in \[([^\]]*)\]|WITHOUT_MEANING: &\[&str\] = &\[([^\]]*)\]", text)
    for found in lists:
        named |= set(re.findall(r'"([a-z_]+)"', "".join(found)))
    assert len(named) > 60, "the sources are read another way than they are written"
    return named.union(*(request_fields(document, path) for path in LEAST))


def test_the_document_is_of_this_version_and_has_every_route(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    cargo = (SOURCES.parents[2] / "Cargo.toml").read_text()
    assert f'version = "{document["info"]["version"]}"' in cargo
    routes = re.findall(r'\.route\(\s*"([^"]+)",\s*(get|post)\(', (SOURCES / "app.rs").read_text())
    expected = {(re.sub(r"\{\*(\w+)\}", r"{\1}", path), method) for path, method in routes}
    assert {
        (path, method) for path, item in document["paths"].items() for method in item if method in ("get", "post")
    } == expected
    assert {path for path, item in document["paths"].items() if "post" in item} == set(LEAST)


def test_every_reference_leads_somewhere_and_nothing_is_left_over(document: dict[str, Any]) -> None:
    used = set(re.findall(r'"\$ref": "#/components/(\w+/\w+)"', json.dumps(document)))
    there = {f"{kind}/{name}" for kind in ("schemas", "responses") for name in document["components"][kind]}
    assert used == there


@pytest.mark.parametrize("path", LEAST)
def test_a_route_takes_the_fields_of_the_document_and_no_others(
    server: Server, document: dict[str, Any], path: str
) -> None:
    taken = set()
    for name in sorted(candidates(document) | {"no_such_field"}):
        for least in LEAST[path]:
            # Null is "not given" for a field that there is; a list is what none of those with another name here may be.
            replies = [server.post(path, {name: value} | least) for value in (None, [])]
            if not any("no such field" in reply.text or "it is called" in reply.text for reply in replies):
                taken.add(name)
    assert taken == request_fields(document, path)


@pytest.mark.slow
def test_no_input_that_the_document_allows_or_forbids_breaks_the_server(start: Callable[..., Server]) -> None:
    """Schemathesis makes requests of the document, for OCTAVO_FUZZ_SECONDS or so."""
    assert importlib.metadata.version("schemathesis")
    seconds = int(os.environ.get("OCTAVO_FUZZ_SECONDS", "120"))
    running = start("--max-model-len", "128", "--unknown-fields", "reject")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json", "--checks", checks]
    command += [
        "--phases",
        "fuzzing",
        "--max-time",
        str(seconds),
        "--request-timeout",
        "60",
        "--workers",
        "2",
        "--continue-on-failure",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2_000:]
    assert running.get("/health").status == 200
    assert running.wait_idle()
    assert running.stop() == 0
