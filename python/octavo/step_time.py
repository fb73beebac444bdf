"""How long a step can take, before any has run: enough to tell a long step from a hang."""

from __future__ import annotations

from typing import Final

# Rates that nearly every machine of its kind exceeds.
_CPU_THREAD_OPERATIONS: Final = 20e9
_CPU_BYTES: Final = 4e9
_GPU_OPERATIONS: Final = 100e12
_GPU_BYTES: Final = 200e9
# A weight of 4 bits is multiplied and added; larger ones do less for a byte.
_OPERATIONS_PER_BYTE: Final = 4


def predict_step_seconds(weight_bytes: int, cache_bytes: int, num_tokens: int, threads: int | None) -> float:
    """An upper bound of the time of a step: all weights and the whole KV cache are read once, every token meets every weight.

    Args:
        weight_bytes: as stored.
        cache_bytes: of the KV cache.
        num_tokens: of the largest step.
        threads: of the CPU; None: a GPU runs it.
    """
    on_gpu = threads is None
    operations = _OPERATIONS_PER_BYTE * weight_bytes * num_tokens
    rate = _GPU_OPERATIONS if threads is None else threads * _CPU_THREAD_OPERATIONS
    reading = (weight_bytes + cache_bytes) / (_GPU_BYTES if on_gpu else _CPU_BYTES)
    return operations / rate + reading
