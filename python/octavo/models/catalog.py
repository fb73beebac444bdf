"""From what a user writes after `--model` to files on disk: a built-in name, a hub id, a folder, or a `.gguf` file."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.models.built_in import BUILT_IN, Say, built_in_path, cache_folder, fetch_built_in, models_folder
from octavo.models.hub import fetch_from_hub, parse_hub_id
from octavo.models.listing import INDEX, choose_files
from octavo.models.source import ModelNotFoundError, ModelSource

__all__ = [
    "BUILT_IN",
    "DEFAULT_MODEL",
    "ModelNotFoundError",
    "ModelSource",
    "built_in_path",
    "cache_folder",
    "models_folder",
    "resolve_model",
]

DEFAULT_MODEL = "smollm2-135m"


def resolve_model(model: str = DEFAULT_MODEL, say: Say | None = None, *, needs_weights: bool = True) -> ModelSource:
    """Find a model, downloading it if need be.

    Args:
        model: a built-in name, `org/name[@revision]`, `org/name[@revision]:file.gguf`, a folder, or a `.gguf` file. An
            existing path wins over a hub id.
        say: gets one line before and after a download; None: standard error.
        needs_weights: without, a folder that holds no more than a `config.json` will do.

    Raises:
        ModelNotFoundError: nothing of that name, or nothing in it that can be run.
        ModelError: a download that failed or whose checksum differs.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    if model in BUILT_IN:
        return ModelSource(model, fetch_built_in(BUILT_IN[model], say))
    try:
        path = Path(model).expanduser()
        is_folder, is_file = bool(model) and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that no path can have; an unknown user's home
        raise ModelNotFoundError(f"model={model[:80]!r}: {error.args[-1]}") from error
    if is_folder:
        bare = not needs_weights and (path / "config.json").is_file()
        return ModelSource(model, path.absolute() if bare else _in_folder(model, path.absolute()))
    if is_file and path.suffix == ".gguf":
        # Not resolved: in caches of the hub the link has the name, its target has none.
        return ModelSource(model, path.absolute())
    if is_file:
        raise ModelNotFoundError(
            f"model={model!r}: a file must be a .gguf file; pass the folder of a safetensors model"
        )
    hub_id = parse_hub_id(model)
    if hub_id is None or (path.suffix == ".gguf" and hub_id.file is None):
        raise ModelNotFoundError(
            f"model={model!r}: no such folder or file, no hub id (org/name), and no built-in model; "
            f"built in: {', '.join(BUILT_IN)}"
        )
    return ModelSource(model, fetch_from_hub(model, hub_id, say))


def _in_folder(model: str, folder: Path) -> Path:
    """The folder, or the only GGUF model of a folder without safetensors."""
    names = [file.name for file in folder.iterdir() if file.is_file()]
    if any(name.endswith((".safetensors", INDEX)) for name in names):
        return folder
    choice = choose_files(model, names, lambda name: (folder / name).read_bytes(), separator="/")
    return folder if choice.entry is None else folder / choice.entry
