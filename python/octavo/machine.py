"""The devices of this machine, as far as the size of a model matters. Imports torch."""

from __future__ import annotations

import torch

from octavo.config import EngineConfig
from octavo.memory import available_bytes, free_bytes, total_bytes
from octavo.models.describe import Machine
from octavo.ops.base import OpSet
from octavo.ops.cpu import CpuOps


def this_machine() -> list[Machine]:
    """Its processor and its GPUs, each with the op set that runs there by default."""
    found = [_machine("CPU", torch.device("cpu"), CpuOps())]
    if torch.cuda.is_available():
        from octavo.ops.cuda import CudaOps  # noqa: PLC0415 (imports Triton)

        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            ops = CudaOps(str(device))
            found.append(_machine(f"GPU {index}, {torch.cuda.get_device_name(device)}", device, ops))
    return found


def _machine(name: str, device: torch.device, ops: OpSet) -> Machine:
    config = EngineConfig()
    return Machine(
        name=name,
        total_bytes=total_bytes(device),
        free_bytes=free_bytes(device),
        cache_dtype="bfloat16",
        ops=ops,
        cache_budget=lambda weights: available_bytes(config, device, weights),
    )
