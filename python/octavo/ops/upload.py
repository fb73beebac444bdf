"""Stored matrices to a GPU: threads read pieces into pinned memory, and the copies to the device run behind them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np
import torch
from torch import Tensor

from octavo.ops.base import ReadableTensor, StoredTensor

_PIECE_BYTES: Final = 16 << 20
_THREADS: Final = 8
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Lane(threading.local):
    """What one thread reads into, and the stream of its copies."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.copied = torch.cuda.Event() if on_gpu else None


class Uploader:
    """Reads with several threads at once; one serves a device.

    Args:
        device: where the matrices go; a CPU for tests.
        threads: that read.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self._lane = _Lane(device)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-load")

    def upload(self, matrices: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Fills each `out` `[rows, width]` with the stored matrix of that shape, in the order of the current stream.

        Plain types are copied as they are and converted on the device; others are dequantized by the threads.
        """
        begin = None
        if self._device.type == "cuda":
            begin = torch.cuda.Event()
            begin.record()
        pieces = [
            self._pool.submit(self._piece, source, first, min(first + step, len(out)), out, begin)
            for source, out in matrices
            for step in [_piece_rows(source, out)]
            for first in range(0, len(out), step)
        ]
        # All of them, also if one fails: none may write into memory that is given up.
        wait(pieces)
        failed = next((piece for piece in pieces if piece.exception() is not None), None)
        if failed is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            failed.result()
        for event in (piece.result() for piece in pieces):
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        for source, _ in matrices:
            source.release()

    def _piece(
        self, source: StoredTensor, first: int, last: int, out: Tensor, begin: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copies rows `first:last`; the event has passed when they are there."""
        lane, shape = self._lane, (last - first, out.shape[1])
        if lane.copied is not None:
            lane.copied.synchronize()
        dtype = _PLAIN.get(source.storage, torch.float32)
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        # A row may be larger than a piece.
        buffer = lane.buffer if num_bytes <= len(lane.buffer) else torch.empty(num_bytes, dtype=torch.uint8)
        staged = buffer[:num_bytes].view(dtype).view(shape)
        if source.storage not in _PLAIN:
            staged.numpy()[:] = source.float32(first, last)
        elif isinstance(source, ReadableTensor):
            source.read_into(first, last, buffer[:num_bytes].numpy())
        else:
            np.copyto(buffer[:num_bytes].numpy().reshape(shape[0], -1), source.rows(first, last))
        if lane.stream is None or lane.copied is None or begin is None:
            out[first:last] = staged
            return None
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(begin)
            same = staged.dtype == out.dtype
            out[first:last].copy_(staged if same else staged.to(self._device, non_blocking=True), non_blocking=True)
            lane.copied.record(lane.stream)
        return lane.copied


def _piece_rows(source: StoredTensor, out: Tensor) -> int:
    """Rows that are read at once."""
    return max(1, _PIECE_BYTES // (_PLAIN.get(source.storage, torch.float32).itemsize * out.shape[1]))


@functools.cache
def uploader(device: torch.device) -> Uploader:
    """The device's uploader, kept for the process."""
    return Uploader(device, min(_THREADS, len(os.sched_getaffinity(0))))
