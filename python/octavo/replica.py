"""What of the machine one of several engine processes takes: a GPU of its own, or its part of the threads and the memory.

To be called before torch looks for devices.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ParameterError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def share_machine(config: EngineConfig, number: int, count: int) -> tuple[EngineConfig, int]:
    """The arguments of replica `number` of `count`, and how many of them share its device; hides the other replicas' GPUs from this
    process.

    Raises:
        ParameterError: there are fewer GPUs than replicas.
    """
    if count == 1:
        return config, 1
    devices = [] if config.backend in ("cpu", "reference") else visible_devices()
    if devices:
        if count > len(devices):
            raise ParameterError(
                "data_parallel_size", count, f"at most {len(devices)}, the GPUs that can be seen, or backend='cpu'"
            )
        os.environ[_VISIBLE] = devices[number]
        return config, 1
    threads = config.num_threads or max(1, config.threads // count)
    return replace(config, num_threads=threads), count


def visible_devices() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` names, or the numbers of all GPUs that the driver knows."""
    named = os.environ.get(_VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    try:
        return [str(number) for number in range(len(list(_DRIVER.iterdir())))]
    except OSError:
        return []
