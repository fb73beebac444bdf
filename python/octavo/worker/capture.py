"""How CUDA graphs are captured here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches, which must have run before: libraries and Triton load and allocate then.

    Args:
        run: launches on the current stream, always to and from the same memory.
        pool: of memory that graphs share; None: one of its own.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    # A forgotten engine may be garbage; graphs that are destroyed meanwhile would spoil the capture.
    gc.disable()
    try:
        # What other threads of the process do on their streams must not spoil it either.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    finally:
        if collects:
            gc.enable()
    return graph
