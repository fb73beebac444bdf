"""Models of a hub, against one on loopback; each fetch is a process of its own, as the hub's library reads its environment once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.engine.conftest import make_tiny_model
from tests.unit.fake_hub import FakeHub, Repository, running_hub

from octavo.models.hub import HubId, parse_hub_id

CONFIG = {"config.json": b'{"architectures": []}', "tokenizer.json": b'{"model": {}}'}
SINGLE = {**CONFIG, "model.safetensors": b"weights" * 100}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A running hub without repositories."""
    with running_hub() as found:
        yield found


_FETCH = """
import json, sys
from octavo.errors import ModelError
from octavo.models.catalog import resolve_model
for model in sys.argv[1:]:
    try:
        print(json.dumps({"path": str(resolve_model(model).path)}))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))
"""


class Client:
    """A user of a hub, with a cache of its own. What is asked for together, is asked for by one process."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub = hub
        self.home = home

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs Python."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**kept, **settings, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def results(self, models: Sequence[str], **environment: str) -> tuple[list[dict[str, str]], str]:
        """The path or error of each model, and what stood on standard error."""
        result = self.run("-c", _FETCH, *models, **environment)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()], result.stderr

    def fetch_all(self, *models: str, **environment: str) -> list[Path]:
        """Where each model is."""
        found, said = self.results(models, **environment)
        assert all("path" in one for one in found), (found, said)
        return [Path(one["path"]) for one in found]

    def fetch(self, model: str, **environment: str) -> Path:
        """Where the model is."""
        return self.fetch_all(model, **environment)[0]

    def refusals(self, *models: str, **environment: str) -> list[str]:
        """The one-line error of each model, and its name."""
        found, _ = self.results(models, **environment)
        errors = [one["error"] for one in found]
        for model, error in zip(models, errors, strict=True):
            assert error.startswith(f"model={model!r}: ")
            assert "\n" not in error
        return errors

    def refusal(self, model: str, **environment: str) -> str:
        """The one-line error of a model."""
        return self.refusals(model, **environment)[0]

    def partial_files(self) -> list[Path]:
        """Files of downloads that did not end."""
        return list(self.home.rglob("*.incomplete"))


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> Client:
    """A user of `hub` whose cache is empty."""
    return Client(hub, tmp_path / "home")


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"tensor{i}": shard for i, shard in enumerate(shards)}}).encode()


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name", None, None)),
        ("org/name@v1.2", HubId("org/name", "v1.2", None)),
        ("org/name@refs/pr/3", HubId("org/name", "refs/pr/3", None)),
        ("org/name:sub/file.gguf", HubId("org/name", None, "sub/file.gguf")),
        ("org/name@main:file (1).gguf", HubId("org/name", "main", "file (1).gguf")),
        ("name", None),
        ("org/name:file.bin", None),
        ("a/b/c", None),
        ("org/name@", None),
    ],
)
def test_a_hub_id_names_repository_revision_and_file(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected


# -- which files are fetched -----------------------------------------------------------------------------------------


def test_only_the_files_that_the_index_names_are_fetched(hub: FakeHub, client: Client) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    wanted = {
        **CONFIG,
        "model.safetensors.index.json": index(first, second, first),
        first: b"1" * 1000,
        second: b"2" * 1000,
        "generation_config.json": b'{"top_k": 5}',
        "chat_template.jinja": b"{{ messages }}",
    }
    others = {
        "model.safetensors": b"a duplicate",
        "model-00001-of-00001.safetensors": b"of another index",
        "consolidated.safetensors": b"a duplicate",
        "original/consolidated.00.pth": b"a duplicate",
        "pytorch_model.bin": b"a duplicate",
        "onnx/model.onnx": b"a duplicate",
        "name-Q4_0.gguf": b"a duplicate",
        "trainer_state.json": b"{}",
        "modeling_own.py": b"raise SystemExit",
        "README.md": b"#",
    }
    hub.repositories["org/name"] = Repository({"main": {**others, **wanted}})
    folder = client.fetch("org/name")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == wanted
    assert hub.fetched() == sorted(wanted)


def test_the_command_prints_where_the_model_is_and_refuses_in_one_line(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE})
    result = client.run("-m", "octavo", "models", "fetch", "org/name")
    assert result.returncode == 0
    assert (Path(result.stdout.strip()) / "model.safetensors").is_file()
    assert result.stderr.startswith("Downloading 3 files of org/name, ")  # no bars where there is no terminal
    assert result.stderr.count("\n") == 1
    result = client.run("-m", "octavo", "models", "fetch", "org/other")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("octavo: model='org/other': not found")


def test_a_second_start_fetches_nothing(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE})
    folder = client.fetch("org/name")
    hub.requests.clear()
    found, said = client.results(["org/name"])
    assert found == [{"path": str(folder)}]
    assert said == ""
    assert hub.fetched() == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub, client: Client) -> None:
    old = {**CONFIG, "model.safetensors": b"old weights"}
    hub.repositories["org/name"] = repository = Repository({"main": SINGLE, "v1": old, "refs/pr/1": old})
    names = ["org/name", "org/name@v1", "org/name@refs/pr/1", f"org/name@{repository.commit('v1')}"]
    folders = client.fetch_all(*names)
    assert [(folder / "model.safetensors").read_bytes() for folder in folders] == [
        SINGLE["model.safetensors"],
        *[b"old weights"] * 3,
    ]
    assert [folder.name for folder in folders[:3]] == [repository.commit(r) for r in ("main", "v1", "refs/pr/1")]
    hub.requests.clear()
    assert client.fetch_all(*names, HF_HUB_OFFLINE="1") == folders
    assert hub.requests == []


def test_one_gguf_file_can_be_named_also_in_a_folder_and_of_a_revision(hub: FakeHub, client: Client) -> None:
    files = {"a.gguf": b"a", "sub/b [1].gguf": b"b", **SINGLE}
    hub.repositories["org/name"] = Repository({"main": files, "v1": {"a.gguf": b"old"}})
    names = ["org/name:a.gguf", "org/name:sub/b [1].gguf", "org/name@v1:a.gguf"]
    assert [path.read_bytes() for path in client.fetch_all(*names)] == [b"a", b"b", b"old"]
    assert hub.fetched() == ["a.gguf", "sub/b [1].gguf"]
    assert client.fetch("org/name:a.gguf", HF_HUB_OFFLINE="1").read_bytes() == b"a"


def test_all_parts_of_a_split_gguf_file_are_fetched(hub: FakeHub, client: Client) -> None:
    names = [f"Q8_0/name-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    hub.repositories["org/name"] = Repository({"main": {name: name.encode() for name in names}})
    for path in client.fetch_all("org/name", f"org/name:{names[1]}"):
        assert path.name == "name-00001-of-00003.gguf"
        assert sorted(file.name for file in path.parent.iterdir()) == [Path(name).name for name in names]
    del hub.repositories["org/name"].revisions["main"][names[2]]
    assert "lacks Q8_0/name-00003-of-00003.gguf" in client.refusal(f"org/name:{names[0]}")


def test_a_repository_of_gguf_files_asks_which_unless_there_is_one(hub: FakeHub, client: Client) -> None:
    files = {"n-Q4_0.gguf": b"4", "mmproj-n.gguf": b"eye", "README.md": b"#", "config.json": b"{}"}
    hub.repositories["org/name"] = Repository({"main": files})
    assert client.fetch("org/name").read_bytes() == b"4"
    files["n-Q8_0.gguf"] = b"8"
    several, message = client.refusals("org/name", "org/name:n-Q5_0.gguf")
    assert "choose one of its GGUF files: org/name:n-Q4_0.gguf, org/name:n-Q8_0.gguf" in several
    assert "no file 'n-Q5_0.gguf'" in message
    assert "org/name:n-Q8_0.gguf" in message


CANNOT_RUN: list[tuple[dict[str, bytes], str]] = [
    ({**CONFIG, "pytorch_model.bin": b"", "original/consolidated.00.pth": b""}, "pickles"),
    ({**CONFIG, "README.md": b""}, "no weights"),
    ({"model.safetensors": b"", "tokenizer.json": b""}, "no config.json"),
    ({"adapter_model.safetensors": b"", "adapter_config.json": b""}, "adapter"),
    ({**CONFIG, "a.safetensors": b"", "b.safetensors": b""}, "2 safetensors files (a.safetensors, b.safetensors)"),
    ({**CONFIG, "model.safetensors.index.json": index("gone.safetensors")}, "gone.safetensors"),
    ({**CONFIG, "model.safetensors.index.json": b"{"}, "is damaged"),
    ({**CONFIG, "model.safetensors.index.json": b'{"weight_map": {"a": 5}}'}, "do not exist: 5"),
]


def test_a_repository_that_cannot_be_run_says_why_and_no_weights_are_fetched(hub: FakeHub, client: Client) -> None:
    names = [f"org/case{i}" for i in range(len(CANNOT_RUN))]
    for name, (files, _) in zip(names, CANNOT_RUN, strict=True):
        hub.repositories[name] = Repository({"main": files})
    for error, (_, message) in zip(client.refusals(*names), CANNOT_RUN, strict=True):
        assert message in error
    assert set(hub.fetched()) <= {"model.safetensors.index.json"}


# -- access ----------------------------------------------------------------------------------------------------------


def test_a_gated_model_says_to_accept_its_terms_and_a_token_opens_it(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE}, gate="hf_good")
    for environment in ({}, {"HF_TOKEN": "hf_of_somebody_else"}):
        message = client.refusal("org/name", **environment)
        assert f"accept its terms at {hub.url}/org/name and set HF_TOKEN" in message
    assert (client.fetch("org/name", HF_TOKEN="hf_good") / "model.safetensors").is_file()


def test_a_private_or_unknown_model_is_not_found_and_a_token_is_asked_for(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/private"] = Repository({"main": SINGLE}, token="hf_good")
    for message in client.refusals("org/private", "org/nothing"):
        assert f"not found on {hub.url}" in message
        assert "HF_TOKEN" in message
    (private, nothing), _ = client.results(["org/private", "org/nothing"], HF_TOKEN="hf_good")
    assert (Path(private["path"]) / "model.safetensors").is_file()
    assert "not found" in nothing["error"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_points_at_the_token(hub: FakeHub, client: Client, status: int) -> None:
    hub.refuse_all = status
    message = client.refusal("org/name", HF_TOKEN="hf_expired")
    assert "HF_TOKEN" in message
    assert f"status {status}" in message


def test_an_unknown_revision_is_named_even_if_another_one_is_in_the_cache(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE})
    client.fetch("org/name")
    assert "org/name has no revision 'v9'" in client.refusal("org/name@v9")


def test_a_name_that_no_repository_can_have_is_refused_without_asking(hub: FakeHub, client: Client) -> None:
    for message in client.refusals("org/-name", "org/a--b", "org/" + "n" * 200):
        assert "no valid hub id" in message
    assert hub.requests == []


# -- networks that fail ----------------------------------------------------------------------------------------------


def test_a_transfer_that_breaks_off_is_resumed(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE}, broken={"model.safetensors": [300]})
    assert (client.fetch("org/name") / "model.safetensors").read_bytes() == SINGLE["model.safetensors"]
    assert sum(r.startswith("GET") and r.endswith("model.safetensors") for r in hub.requests) == 2


def test_a_transfer_that_cannot_be_resumed_fails_cleanly_and_the_next_one_works(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE}, broken={"model.safetensors": [300, -1]})
    assert "status 500" in client.refusal("org/name")
    assert client.partial_files() == []
    offline = client.refusal("org/name", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline
    assert (client.fetch("org/name") / "model.safetensors").read_bytes() == SINGLE["model.safetensors"]


def test_offline_without_a_copy_says_so_and_asks_nobody(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE})
    assert "HF_HUB_OFFLINE is set and the cache lacks the model" in client.refusal("org/name", HF_HUB_OFFLINE="1")
    assert hub.requests == []


def test_offline_a_copy_that_lacks_a_shard_is_refused_by_the_shards_name(hub: FakeHub, client: Client) -> None:
    shards = {"a.safetensors": b"a" * 500, "b.safetensors": b"b" * 600}
    files = {**CONFIG, "model.safetensors.index.json": index(*shards), **shards}
    hub.repositories["org/name"] = Repository({"main": files})
    (client.fetch("org/name") / "b.safetensors").unlink()
    assert "names files that do not exist: b.safetensors" in client.refusal("org/name", HF_HUB_OFFLINE="1")


def test_a_hub_that_does_not_answer_is_replaced_by_the_cache_with_a_word(hub: FakeHub, client: Client) -> None:
    hub.repositories["org/name"] = Repository({"main": SINGLE})
    folder = client.fetch("org/name")
    nobody = "http://127.0.0.1:9"
    (cached, other), said = client.results(["org/name", "org/other"], HF_ENDPOINT=nobody)
    assert cached == {"path": str(folder)}
    assert f"not fetched from {nobody}" in other["error"]
    assert f"not fetched from {nobody}" in said
    assert "using the copy in the cache" in said
    hub.refuse_all = 503
    assert client.fetch("org/name") == folder


def test_a_model_that_was_fetched_answers_offline(hub: FakeHub, client: Client, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.repositories["org/tiny"] = Repository({"main": files})
    client.fetch("org/tiny")
    hub.requests.clear()
    run = ["-p", "abc", "--temperature", "0", "--max-tokens", "4", "--json", "--backend", "reference"]
    result = client.run("-m", "octavo", "generate", "org/tiny", *run, HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr
    local = client.run("-m", "octavo", "generate", str(folder), *run)
    assert json.loads(result.stdout)["token_ids"] == json.loads(local.stdout)["token_ids"]
    assert hub.requests == []
