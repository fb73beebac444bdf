"""How large the KV cache is, and what the longest request may be."""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass
from typing import Final

import torch

from octavo._core import EngineCore
from octavo.config import EngineConfig
from octavo.errors import ParameterError
from octavo.models.loader import LoadedModel

# Of the memory that a CPU machine has left: it is shared with everything else that runs there.
_CPU_SHARE: Final = 0.4
_CPU_LIMIT: Final = 8 << 30
# Left on a GPU for what a step allocates beside weights and cache.
_GPU_STEP_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds the blocks of a request beside its length."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Size of the KV cache; the null block is one of `num_blocks` and holds no tokens."""

    num_blocks: int
    bytes_per_block: int
    """Of one cache group; every group's blocks have the same."""
    max_model_len: int
    num_tokens: int
    """Tokens that fit, of sequences as long as `max_model_len`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return self.num_blocks * self.bytes_per_block


def plan_cache(
    config: EngineConfig, model: LoadedModel, device: torch.device, limits: StepLimits, sharers: int = 1
) -> CachePlan:
    """Chooses the number of blocks and the longest request; `sharers` engines start alike and share the device.

    Raises:
        ParameterError: the cache cannot hold `max_model_len`; the message gives the longest request that fits and the bytes needed.
    """
    windows = [group.window for group in model.decoder.cache_groups]

    def blocks_for(num_tokens: int) -> int:
        return EngineCore.blocks_per_request(
            num_tokens, config.block_size, windows, limits.max_num_batched_tokens, limits.max_in_flight
        )

    bytes_per_block = model.decoder.kv_cache_bytes(config.block_size)
    model_len = config.max_model_len or model.spec.max_positions
    per_request = blocks_for(model_len)
    num_blocks, source = _num_blocks(config, device, bytes_per_block, limits.max_num_seqs * per_request, sharers)
    fits = bisect.bisect_right(range(model_len + 1), num_blocks - 1, key=blocks_for) - 1
    if fits < 2:
        least = blocks_for(2) + 1
        raise ParameterError(
            source,
            num_blocks,
            f"large enough for {least} blocks of {bytes_per_block:,} bytes ({least * bytes_per_block:,} bytes)",
        )
    if fits < model_len:
        if config.max_model_len is not None:
            needed = (per_request + 1) * bytes_per_block
            raise ParameterError(
                "max_model_len",
                config.max_model_len,
                f"at most {fits}, the longest request that the KV cache of {num_blocks} blocks holds "
                f"(or set kv_cache_memory_bytes to {needed} or more)",
            )
        model_len = fits
    num_tokens = (num_blocks - 1) * model_len // blocks_for(model_len)
    return CachePlan(num_blocks, bytes_per_block, model_len, num_tokens)


def _num_blocks(
    config: EngineConfig, device: torch.device, bytes_per_block: int, most: int, sharers: int
) -> tuple[int, str]:
    """Blocks of the pool, and the parameter that says so; `most` are all that running requests can use."""
    if config.num_gpu_blocks_override is not None:
        num_blocks, source = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks, source = config.kv_cache_memory_bytes // bytes_per_block, "kv_cache_memory_bytes"
    else:
        # Twice what running requests can use leaves room for cached prefixes; more would never be used.
        num_blocks = min(2 * most + 1, available_bytes(config, device) // sharers // bytes_per_block)
        source = "gpu_memory_utilization" if device.type == "cuda" else "kv_cache_memory_bytes"
    memory = total_bytes(device)
    if num_blocks * bytes_per_block > memory:
        limit = memory if source == "kv_cache_memory_bytes" else memory // bytes_per_block
        raise ParameterError(source, getattr(config, source), f"at most {limit}, what this device's memory holds")
    return num_blocks, source


def available_bytes(config: EngineConfig, device: torch.device, reserved: int = 0) -> int:
    """Bytes that the cache may take on this device, now or once `reserved` further bytes are taken."""
    free = free_bytes(device) - reserved
    if device.type == "cuda":
        kept = (1.0 - config.gpu_memory_utilization) * total_bytes(device)
        return max(0, int(free - kept) - _GPU_STEP_BYTES)
    return min(_CPU_LIMIT, int(_CPU_SHARE * max(0, free)))


def total_bytes(device: torch.device) -> int:
    """Bytes of memory that the device has, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_lines("/sys/fs/cgroup/memory.max")
    return min(total, int(limit[0])) if limit and limit[0].strip().isdigit() else total


def free_bytes(device: torch.device) -> int:
    """Memory this process can still get: the device's, or its control group's if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read_lines("/sys/fs/cgroup/memory.max"), _read_lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].strip().isdigit():
        available = min(available, int(limit[0]) - int(used[0]))
    return max(0, available)


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.readlines()
    except OSError:
        return []
