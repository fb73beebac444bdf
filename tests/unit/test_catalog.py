"""From what a user writes after `--model` to files: paths, built-in names, and the downloads behind them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models import built_in
from octavo.models.built_in import BUILT_IN, BuiltIn, WheelMember
from octavo.models.catalog import ModelNotFoundError, resolve_model

CONTENT = bytes(range(256)) * 1000
CUTS = (0, 70_000, 70_001, 200_000, len(CONTENT))
TOY = BuiltIn(
    name="toy",
    file="toy.gguf",
    parts=tuple(WheelMember(f"toy-part{n}==1.0", f"toy_part{n}/data/toy.gguf.part{n}") for n in range(4)),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    megabytes=1,
    description="A toy (its own terms)",
)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of built-in files, and `toy` as a built-in model."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(BUILT_IN, "toy", TOY)
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of wheels that pip takes instead of an index; one for each part of the toy."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for n in range(4):
        write_wheel(folder, n, CONTENT[CUTS[n] : CUTS[n + 1]])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, n: int, content: bytes, member: str | None = None) -> None:
    info = f"toy_part{n}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"toy_part{n}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member or TOY.parts[n].member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: toy-part{n}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_the_parts_of_a_model_are_joined_in_order_and_only_the_whole_file_is_kept(models: Path, wheels: Path) -> None:
    said: list[str] = []
    source = resolve_model("toy", said.append)
    assert source.path == models / "toy.gguf"
    assert source.path.read_bytes() == CONTENT
    assert list(models.iterdir()) == [source.path]
    assert TOY.description in said[0]
    assert resolve_model("toy", said.append) == source
    assert len(said) == 2  # before and after the one download


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda wheels: (wheels / "toy_part2-1.0-py3-none-any.whl").unlink(),
            r"could not download[\s\S]*toy-part2==1\.0",
        ),
        (lambda wheels: write_wheel(wheels, 1, b"other"), "sha256"),
        (lambda wheels: write_wheel(wheels, 3, CONTENT[CUTS[3] :], "elsewhere"), r"has no toy_part3/data"),
    ],
)
def test_a_download_that_fails_leaves_nothing_and_the_next_one_works(
    models: Path, wheels: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(wheels)
    with pytest.raises(ModelError, match=message):
        resolve_model("toy", lambda line: None)
    assert not list(models.iterdir())
    for n in range(4):
        write_wheel(wheels, n, CONTENT[CUTS[n] : CUTS[n + 1]])
    assert resolve_model("toy", lambda line: None).path.read_bytes() == CONTENT


def test_a_download_without_network_says_where_to_put_the_file(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=rf"Without network, put toy\.gguf into {models}"):
        resolve_model("toy", lambda line: None)


def test_what_a_killed_download_left_is_removed_by_the_next(models: Path, wheels: Path) -> None:
    leftover = models / ".toy.gguf.part-killed"
    leftover.mkdir(parents=True)
    (leftover / "toy.gguf").write_bytes(CONTENT[:1000])
    assert resolve_model("toy", lambda line: None).path.read_bytes() == CONTENT
    assert [file.name for file in models.iterdir()] == ["toy.gguf"]


_FETCH = """
import sys
from tests.unit.test_catalog import BUILT_IN, CONTENT, TOY, resolve_model
BUILT_IN["toy"] = TOY
assert resolve_model("toy").path.read_bytes() == CONTENT
"""


def test_processes_that_fetch_at_once_all_get_the_file_and_download_it_once(models: Path, wheels: Path) -> None:
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen([sys.executable, "-c", _FETCH], cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert sum("Downloading toy" in error for error in errors) == 1
    assert [file.name for file in models.iterdir()] == ["toy.gguf"]


def test_a_file_system_without_locks_is_no_obstacle(
    models: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(built_in.fcntl, "flock", refuse)
    assert resolve_model("toy", lambda line: None).path.read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"models/SmolLM2.* cannot be written"):
        resolve_model("smollm2-135m", lambda line: None)


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_a_built_in_model_that_is_on_this_machine_has_the_pinned_checksum(name: str) -> None:
    path = built_in.built_in_path(BUILT_IN[name])
    if not path.is_file():
        pytest.skip(f"{path} has not been fetched")
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == BUILT_IN[name].sha256


# -- paths -----------------------------------------------------------------------------------------------------------


def test_a_folder_whose_only_model_is_a_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("")
    (tmp_path / "model-Q4_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)).path == tmp_path / "model-Q4_0.gguf"


def test_a_link_to_a_gguf_file_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b8f3").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").symlink_to("b8f3")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model.gguf").path == tmp_path / "model.gguf"


def test_a_folder_of_several_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path}/a.gguf, {tmp_path}/b.gguf"):
        resolve_model(str(tmp_path))


def test_safetensors_of_a_folder_are_taken_whatever_else_is_there(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert resolve_model(str(tmp_path)).path == tmp_path


@pytest.mark.parametrize(("name", "message"), [("pytorch_model.bin", "pickles"), ("notes.txt", "no weights")])
def test_a_folder_without_weights_that_may_be_loaded_says_what_it_has(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model(str(tmp_path))
