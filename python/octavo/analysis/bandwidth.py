"""The read bandwidth of this machine's memory, as the limit of a decode step."""

from __future__ import annotations

import glob
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, Final

import torch

from octavo.models.built_in import cache_folder

_MIN_BYTES: Final = 256 << 20
_REPEATS: Final = 7


def last_level_cache_bytes() -> int:
    """Size of the largest cache of CPU 0; 32 MiB if the system does not say."""
    sizes = []
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * factor)
    return max(sizes, default=32 << 20)


def read_bandwidth(threads: int | None = None) -> float:
    """Best of several reads of a working set at least four times the last-level cache, in bytes a second.

    Args:
        threads: threads of the read; torch's present number by default.
    """
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        data = torch.ones(max(_MIN_BYTES, 4 * last_level_cache_bytes()) // 4, dtype=torch.float32)
        best = float("inf")
        for _ in range(_REPEATS):
            for read in (data.sum, data.max):
                start = time.perf_counter()
                read()
                best = min(best, time.perf_counter() - start)
        return data.numel() * data.element_size() / best
    finally:
        torch.set_num_threads(before)


def remember(bandwidth: float, threads: int | None = None) -> None:
    """Keeps a measured bandwidth (bytes a second) of this processor for engines that start later, if the disk lets it."""
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(json.dumps({**_kept(), _key(threads): bandwidth}), encoding="utf-8")
        draft.replace(path)
    except OSError:
        return


def remembered(threads: int | None = None) -> float | None:
    """What `remember` was told of this processor with as many threads; none if it never was."""
    value = _kept().get(_key(threads))
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _path() -> Path:
    return cache_folder() / "read_bandwidth.json"


def _kept() -> dict[str, Any]:
    try:
        kept = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _key(threads: int | None) -> str:
    """A home may be that of several machines: the processor's name tells them apart as far as bandwidth goes."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} processors, {threads or torch.get_num_threads()} threads"
