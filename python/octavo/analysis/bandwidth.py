"""The read bandwidth of this machine's memory, as the limit of a decode step."""

from __future__ import annotations

import glob
import time
from typing import Final

import torch

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
