"""Steps as CUDA graphs: one launch replays what would be hundreds.

A graph is made for each of a few sizes, with the plan, the slot state and the KV cache at fixed addresses; a step takes the
smallest graph that holds it. Rows and tokens beyond its own are padding, which writes to the null block and the scratch slot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from octavo.engine.plan import PROMPT_LOGPROBS, StepPlan
from octavo.kernels import launch
from octavo.kernels.step import StepBuffers
from octavo.models.decoder import Decoder
from octavo.ops.base import Batch
from octavo.worker.capture import captured
from octavo.worker.device_inputs import DeviceInputs
from octavo.worker.slot_state import AttentionBounds, StepInputs

_LARGEST: Final = 512
_MOST_TOKENS: Final = 1024
_FEW_ROWS: Final = 8


@dataclass(frozen=True, slots=True)
class Size:
    """What a graph holds at most. One with as many rows as tokens is of decode rows alone."""

    rows: int
    tokens: int
    shares_keys: bool = False
    """For decode rows that may all begin with the same blocks."""

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return self.rows == self.tokens


def decode_sizes(max_num_seqs: int) -> list[Size]:
    """Steps of one token a row: of a graph's rows, less than a third pads from 17 rows on, less than a fifth from 33 on."""
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, _LARGEST + 1, 32)]
    most = min(max_num_seqs, _LARGEST)
    return [Size(count, count) for count in (*(count for count in rows if count < most), most)]


def sharing_sizes(max_num_seqs: int) -> list[Size]:
    """Decode steps whose rows begin with the same blocks: fewer sizes, as their common keys take most of the time."""
    most = min(max_num_seqs, _LARGEST)
    rows = [count for count in (8, 16, 32, 64, 128, 256) if count < most]
    return [Size(count, count, shares_keys=True) for count in (*rows, most)]


def mixed_sizes(max_num_seqs: int, most_tokens: int) -> list[Size]:
    """Steps of any rows, up to so many tokens: of a few rows, and of as many as run at once.

    From 256 tokens on products cost by the token: less than a fifth of a graph's tokens pads. What is larger than the largest graph
    hides its launches.
    """
    tokens = [16, 32, 64, 128, *range(192, 513, 64), *range(640, _MOST_TOKENS + 1, 128)]
    tokens = [count for count in tokens if count <= most_tokens]
    rows = sorted({min(_FEW_ROWS, max_num_seqs), min(max_num_seqs, _LARGEST)})
    return [Size(r, t) for r in rows for t in tokens if r < t]


@dataclass(slots=True)
class _Captured:
    size: Size
    buffers: StepBuffers
    batch: Batch
    replay: Callable[[], object]


class StepGraphs:
    """Graphs of steps up to some sizes.

    Args:
        decoder: the model.
        kv_cache: of all its layers.
        inputs: where the graphs find their inputs.
        plan: any plan of the core that will make the steps; only its layout is used.
        words: where plans are uploaded; a plan without rows lies there now.
        sizes: of the graphs.
        progress: wraps the loop over the graphs to show how far it is.
        compile_more: launches further kernels, which are compiled beside those of the graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: Sequence[torch.Tensor],
        inputs: DeviceInputs,
        plan: StepPlan,
        words: torch.Tensor,
        sizes: Sequence[Size],
        progress: Callable[[Sequence[Size]], Iterable[Size]] = iter,
        compile_more: Callable[[], None] = lambda: None,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._inputs = inputs
        self._layout = inputs.layout(plan)
        self._words = words
        most_rows = max(size.rows for size in sizes)
        # One for all graphs: the logits of a step are read before the next one begins.
        vocab_size, dtype = decoder.spec.vocab_size, decoder.ops.dtype
        self.logits = torch.empty(most_rows, vocab_size, dtype=dtype, device=words.device)
        """`[R, V]` of every step's rows, padding included, until the next step."""
        if words.is_cuda:
            self._compile(sizes, compile_more)
        # The largest first: the others fit into its memory.
        pool = torch.cuda.graph_pool_handle() if words.is_cuda else None
        falling = sorted(sizes, key=lambda size: (size.tokens, size.rows), reverse=True)
        captured = [self._capture(size, pool) for size in progress(falling)][::-1]
        self._decodes = [graph for graph in captured if graph.size.is_decode and not graph.size.shares_keys]
        self._sharing = [graph for graph in captured if graph.size.shares_keys]
        self._mixed = [graph for graph in captured if not graph.size.is_decode]

    def run(self, plan: StepPlan, *, shares_keys: bool = False) -> tuple[StepInputs, torch.Tensor] | None:
        """Enqueues the uploaded plan's step; None if no graph is for it.

        Args:
            plan: of the step.
            shares_keys: whether its rows seem to begin with the same blocks.

        Returns:
            the inputs, and the logits `[R, V]` of the plan's rows, both valid until the next step.
        """
        rows, tokens = plan.num_rows, plan.num_tokens
        graphs = self._mixed
        if plan.header("graph_key") == 1:
            graphs = self._sharing if shares_keys and self._sharing else self._decodes
        if plan.header("flags") & PROMPT_LOGPROBS:
            return None
        fitting = (graph for graph in graphs if graph.size.rows >= rows and graph.size.tokens >= tokens)
        chosen = next(fitting, None)
        if chosen is None:
            return None
        chosen.replay()
        return self._inputs.step(plan, chosen.buffers, chosen.batch), self.logits[:rows]

    def _compile(self, sizes: Sequence[Size], more: Callable[[], None] = lambda: None) -> None:
        """Compiles the kernels of all sizes side by side; none of them runs, so inputs are what they were."""
        # torch takes rows by these, and those of an earlier step may lie behind a small size's last one.
        self._inputs.buffers.logits_indices.zero_()
        with launch.compiling_ahead(len(os.sched_getaffinity(0))):
            # Those that take longest go first.
            more()
            kinds = self._decoder.one_of_each_kind
            for size in sorted(sizes, key=lambda size: size.is_decode):
                self._forward(size, kinds)
                if not size.is_decode:
                    # What a longer step, which no graph holds, launches for its long rows.
                    self._forward(size, kinds, num_decode_rows=0)

    def _capture(self, size: Size, pool: Any) -> _Captured:
        # Outside of the capture kernels are loaded, and libraries make their workspaces.
        buffers, batch = self._forward(size, self._decoder.one_of_each_kind)
        if pool is None:  # under Triton's interpreter: the same padded step without a graph
            return _Captured(size, buffers, batch, lambda: self._forward(size))
        return _Captured(size, buffers, batch, captured(lambda: self._forward(size), pool).replay)

    def _forward(
        self, size: Size, layers: Collection[int] | None = None, num_decode_rows: int | None = None
    ) -> tuple[StepBuffers, Batch]:
        state = self._inputs.state
        buffers = self._inputs.derive(self._layout, self._words, size.rows, size.tokens)
        bounds: AttentionBounds = {
            "group_windows": state.group_windows,
            "block_size": state.block_size,
            "max_query_len": 1 if size.is_decode else size.tokens,
            "max_seq_len": state.max_model_len,
            "num_decode_rows": size.rows if size.is_decode else num_decode_rows,
            "max_decode_query_len": 1,
        }
        batch = self._inputs.batch(buffers, bounds, None if size.is_decode else buffers.logits_indices)
        batch.attention.may_share_keys = size.shares_keys
        hidden = self._decoder.forward_hidden(batch, self._kv_cache, layers=layers)
        self._decoder.logits(hidden, self.logits[: size.rows])
        return buffers, batch
