"""Models of a Hugging Face hub. Lists a repository first, then fetches only the files of one model.

Everything goes through `huggingface_hub`, whose environment counts: `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`. What
is in its cache is used when the hub cannot be reached.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from octavo.models.listing import Choice, choose_files
from octavo.models.source import ModelNotFoundError
from octavo.units import format_bytes

Say = Callable[[str], None]
_HUB_ID: Final = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:@]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class HubId:
    """`org/name[@revision][:file.gguf]`."""

    repo: str
    revision: str | None
    """A branch, tag or commit; None: `main`."""
    file: str | None
    """A path inside the repository."""


def parse_hub_id(text: str) -> HubId | None:
    """The parts of a hub id; None if `text` is none."""
    match = _HUB_ID.fullmatch(text)
    return None if match is None else HubId(match["repo"], match["revision"], match["file"])


def fetch_from_hub(model: str, hub_id: HubId, say: Say) -> Path:
    """The model's folder or GGUF file in the hub's cache, whole.

    Args:
        model: what the user wrote, for the errors.
        hub_id: the same, parsed.
        say: gets a line before a download, and one if the cache is used because the hub does not answer.

    Raises:
        ModelNotFoundError: no such repository, revision or file, no access, no connection, or nothing that can be run.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 (slow to import)

    try:
        info = HfApi().model_info(hub_id.repo, revision=hub_id.revision, files_metadata=True)
    except Exception as error:  # what it raises depends on the HTTP library that huggingface_hub uses
        return _from_cache(model, hub_id, error, say)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    try:
        return _download(model, hub_id, str(info.sha), sizes, say)
    except ModelNotFoundError:
        raise
    except Exception as error:
        raise ModelNotFoundError(_explain(model, hub_id, error)) from error


def _download(model: str, hub_id: HubId, commit: str, sizes: Mapping[str, int], say: Say) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache  # noqa: PLC0415

    choice = choose_files(
        model,
        sizes,
        lambda name: Path(hf_hub_download(hub_id.repo, name, revision=commit)).read_bytes(),
        hub_id.file,
    )
    absent = [n for n in choice.files if not isinstance(try_to_load_from_cache(hub_id.repo, n, revision=commit), str)]
    if absent:
        size = format_bytes(sum(sizes[name] for name in absent))
        say(f"Downloading {len(absent)} files of {model}, {size} from {_endpoint()}")
    # The user's revision, not the commit: the cache remembers what it stands for, so that it works offline too.
    patterns = [glob.escape(name) for name in choice.files]
    folder = snapshot_download(
        hub_id.repo, revision=hub_id.revision, allow_patterns=patterns, tqdm_class=_progress_bars()
    )
    return _entry(Path(folder), choice)


def _from_cache(model: str, hub_id: HubId, error: Exception, say: Say) -> Path:
    """What the cache holds, if `error` left the question open whether the hub has the model."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    reason = _explain(model, hub_id, error)
    if isinstance(error, HFValidationError | RevisionNotFoundError):
        raise ModelNotFoundError(reason) from error
    try:
        # No pattern: only the folder's place is asked for; which files it must hold is decided here.
        folder = Path(
            snapshot_download(hub_id.repo, revision=hub_id.revision, allow_patterns=[], local_files_only=True)
        )
    except (LocalEntryNotFoundError, OSError):
        raise ModelNotFoundError(reason) from error
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    try:
        choice = choose_files(model, names, lambda name: (folder / name).read_bytes(), hub_id.file)
    except ModelNotFoundError as incomplete:
        raise ModelNotFoundError(f"{reason}; of the copy in the cache: {incomplete}") from error
    if not isinstance(error, OfflineModeIsEnabled):
        say(f"{reason}; using the copy in the cache")
    return _entry(folder, choice)


def _entry(folder: Path, choice: Choice) -> Path:
    return folder if choice.entry is None else folder / choice.entry


def _progress_bars() -> Any:
    """The hub's own bars on a terminal (None), none elsewhere."""
    if sys.stderr.isatty():
        return None
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _endpoint() -> str:
    from huggingface_hub import constants  # noqa: PLC0415

    return str(constants.ENDPOINT)


def _explain(model: str, hub_id: HubId, error: Exception) -> str:
    """One line that says what went wrong and what to do."""
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    response = getattr(error, "response", None)
    status, endpoint = getattr(response, "status_code", None), _endpoint()
    # A kind before those it is a kind of.
    reasons = (
        (HFValidationError, f"no valid hub id: {_line(error)}"),
        (OfflineModeIsEnabled, "HF_HUB_OFFLINE is set and the cache lacks the model; fetch it once with network"),
        (
            GatedRepoError,
            f"the repository is gated (status {status}): accept its terms at {endpoint}/{hub_id.repo} "
            f"and set HF_TOKEN to a token of that account",
        ),
        (RevisionNotFoundError, f"{hub_id.repo} has no revision {hub_id.revision!r} (a branch, tag or commit)"),
        (
            RepositoryNotFoundError,
            f"not found on {endpoint} (status {status}): check the name; if the repository is private or gated, set HF_TOKEN",
        ),
    )
    for kind, reason in reasons:
        if isinstance(error, kind):
            return f"model={model!r}: {reason}"
    if status in (401, 403):
        return f"model={model!r}: {endpoint} refuses access (status {status}): check HF_TOKEN and what it permits"
    if response is not None:
        return f"model={model!r}: {endpoint} answers with status {status}: {_line(error)}"
    return f"model={model!r}: not fetched from {endpoint}: {type(error).__name__}: {_line(error)}"


def _line(error: Exception, limit: int = 300) -> str:
    return " ".join(str(error).split())[:limit]
