"""What launchers share: programmatic dependent launch, the device's size, and memory for sums that are split over programs.

With programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and Synchronization") the programs of
a kernel may start while the kernel before them still runs. Such a kernel reads constants (weights) at once, and calls `gdc_wait`
before it reads what earlier kernels wrote and before it writes anything at all. Every program calls `gdc_wait`: then the end of a
kernel still means the end of all kernels before it.

Kernels that let the next one begin before they have waited themselves can all have begun while one far in front of them still runs.
So what a kernel reads at once, if it is no constant, has a *gate* between its writer and its reader: a kernel that waits first, and
only then lets the next one begin (`expert_gemv`'s first), or a writer that lets none begin before its end (`decode_schedule`'s).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_PARTIAL_BYTES = 64 << 20
_COUNTERS = 1 << 14
_COMPILING = threading.Lock()


@triton.jit
def begin_dependent(PDL: tl.constexpr):
    """With a dependent launch: lets the next kernel begin, and waits for the end of those before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(address, BYTES: tl.constexpr):
    """Asks the L2 cache for `BYTES`, a multiple of 16 in decimal figures, from each address on (sm_90)."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; // $0",
        "=r,l",
        [address.to(tl.int64)],
        tl.int32,
        False,
        1,
    )


class _Here(threading.local):
    """Of the running thread."""

    active = False
    """Whether it compiles ahead."""


_COMPILING_HERE = _Here()


class _Switch:
    """Whether dependent launches are wanted, for comparisons."""

    dependent = True


def set_dependent_launch(wanted: bool) -> None:
    """Turns programmatic dependent launch off, or on again, for kernels launched or captured from now on."""
    _Switch.dependent = wanted


@functools.cache
def _can_launch_dependently(device: torch.device) -> bool:
    """Compute capability 9 or above, and kernels that are compiled."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] >= 9
        and not triton.knobs.runtime.interpret
    )


def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel on this device starts before the one in front of it has ended; its `PDL` argument."""
    return _Switch.dependent and _can_launch_dependently(device)


def launch_options(dependent: bool) -> dict[str, Any]:
    """Arguments of a launch whose kernel has `PDL` set to `dependent`."""
    return {"launch_pdl": True} if dependent else {}


@contextmanager
def compiling_ahead(threads: int) -> Iterator[None]:
    """Triton kernels that this thread launches inside are compiled, so many at a time, and not run; other work is done.

    Other threads' kernels run: an engine may be made beside one that is at work. Inside of another one this does nothing: the outer
    one's threads compile all.
    """
    if _COMPILING_HERE.active:
        yield
        return
    interface, ours = triton.runtime.jit.KernelInterface, threading.get_ident()
    with _COMPILING:
        launched = interface.__getitem__

        def compiled(kernel: Any, grid: Any) -> Any:
            if threading.get_ident() != ours:
                return launched(kernel, grid)
            return functools.partial(kernel.run, grid=grid, warmup=True)

        interface.__getitem__ = compiled
        _COMPILING_HERE.active = True
        try:
            with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
                yield
        finally:
            interface.__getitem__ = launched
            _COMPILING_HERE.active = False


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; under the interpreter any number will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """A GPU of compute capability 9 under the one Triton release whose Gluon the kernels for it are written in."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] == 9
        and triton.__version__.startswith("3.6.")
        and not triton.knobs.runtime.interpret
    )


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of one device for kernels whose programs share a sum; one kernel at a time uses it, in stream order."""

    partial: Tensor
    """fp32 sums, of any content between kernels."""
    counters: Tensor
    """int32, zeros between kernels: the program that sees the last arrival sets its counter back."""


@functools.cache
def workspace(device: torch.device) -> Workspace:
    """The device's workspace, made by the first call, which must not be within a graph's capture.

    Raises:
        RuntimeError: the first call on this device is within a capture.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first product on {device} must run before a graph's capture: it allocates the workspace"
        )
    return Workspace(
        partial=torch.empty(_PARTIAL_BYTES // 4, device=device, dtype=torch.float32),
        counters=torch.zeros(_COUNTERS, device=device, dtype=torch.int32),
    )
