"""Decode steps as CUDA graphs: one launch replays what would be hundreds.

A graph is made for each of a few numbers of rows, with the plan, the slot state and the KV cache at fixed addresses; a step
takes the smallest graph that holds its rows, and rows beyond its own are padding that writes to the null block and the scratch
slot.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from octavo.engine.plan import StepPlan
from octavo.kernels.step import StepBuffers
from octavo.models.decoder import Decoder
from octavo.ops.base import Batch
from octavo.worker.device_inputs import DeviceInputs
from octavo.worker.slot_state import AttentionBounds, StepInputs

_LARGEST: Final = 512


def graph_rows(max_num_seqs: int) -> list[int]:
    """Numbers of rows worth a graph: padding costs at most a quarter of the rows from 16 on, an eighth from 64 on."""
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, _LARGEST + 1, 32)]
    most = min(max_num_seqs, _LARGEST)
    return [*(count for count in rows if count < most), most]


@dataclass(slots=True)
class _Captured:
    rows: int
    buffers: StepBuffers
    batch: Batch
    replay: Callable[[], None]
    logits: torch.Tensor
    """`[rows, V]`, of the last replay."""


class DecodeGraphs:
    """Graphs of steps in which each row has one new token.

    Args:
        decoder: the model.
        kv_cache: of all its layers.
        inputs: where the graphs find their inputs.
        plan: any plan of the core that will make the steps; only its layout is used.
        words: where plans are uploaded; a plan without rows lies there now.
        rows: numbers of rows, ascending.
        progress: wraps the loop over the graphs to show how far it is.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: Sequence[torch.Tensor],
        inputs: DeviceInputs,
        plan: StepPlan,
        words: torch.Tensor,
        rows: Sequence[int],
        progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._inputs = inputs
        self._layout = inputs.layout(plan)
        self._words = words
        self._rows = list(rows)
        # The largest first: the others fit into its memory.
        pool = torch.cuda.graph_pool_handle() if words.is_cuda else None
        captured = [self._capture(count, pool) for count in progress(self._rows[::-1])]
        self._captured = captured[::-1]

    def run(self, plan: StepPlan) -> tuple[StepInputs, torch.Tensor] | None:
        """Enqueues the uploaded plan's step; None if no graph is for it.

        Returns:
            the inputs, and the logits `[R, V]` of the plan's rows, both valid until the next step.
        """
        if plan.header("graph_key") != 1 or plan.num_rows > self._rows[-1]:
            return None
        chosen = self._captured[bisect.bisect_left(self._rows, plan.num_rows)]
        chosen.replay()
        return self._inputs.step(plan, chosen.buffers, chosen.batch), chosen.logits[: plan.num_rows]

    def _capture(self, rows: int, pool: Any) -> _Captured:
        # Compiles what has to be compiled, and makes the workspaces, before the capture.
        result = self._forward(rows)
        if pool is None:
            buffers, batch, logits = result

            def again() -> None:
                logits.copy_(self._forward(rows)[2])

            # Under Triton's interpreter: the same padded step without a graph.
            return _Captured(rows, buffers, batch, again, logits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = self._forward(rows)
        return _Captured(rows, *result[:2], graph.replay, result[2])

    def _forward(self, rows: int) -> tuple[StepBuffers, Batch, torch.Tensor]:
        state = self._inputs.state
        buffers = self._inputs.derive(self._layout, self._words, rows, rows)
        bounds: AttentionBounds = {
            "group_windows": state.group_windows,
            "block_size": state.block_size,
            "max_query_len": 1,
            "max_seq_len": state.max_model_len,
            "num_decode_rows": rows,
            "max_decode_query_len": 1,
        }
        batch = self._inputs.batch(buffers, bounds, None)
        return buffers, batch, self._decoder.forward(batch, self._kv_cache)
