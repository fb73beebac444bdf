"""The draws of steps as CUDA graphs, for rows that ask for a temperature and filters and no more.

The launches of the sampling kernels would cost the host more than all else of a step. Rows beyond the step's own are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.step import PlanLayout, append_tokens
from octavo.sampling.device import DeviceSampler
from octavo.sampling.rows import RowFlag
from octavo.worker.capture import captured
from octavo.worker.device_inputs import DeviceInputs

_SPECIAL: Final = RowFlag.GRAMMAR | RowFlag.LOGPROBS | RowFlag.PENALTIES | RowFlag.BIAS
_TOKEN_BYTES: Final = 8
_ROW_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class HostResults:
    """Memory that the device copies a draw's results to."""

    memory: Tensor
    """Bytes, pinned."""
    tokens: npt.NDArray[np.int64]
    """`[R]`, a part of it; so is the next."""
    num_sampled: npt.NDArray[np.int32]


class StepDraws:
    """Graphs that draw from a step's logits, append the tokens to the slot state, and leave them for the host.

    Args:
        sampler: whose kernels draw.
        inputs: of the steps that the logits are of.
        layout: of their plans.
        logits: `[R, V]` of every step, always there.
        sizes: rows of the graphs.
    """

    def __init__(
        self, sampler: DeviceSampler, inputs: DeviceInputs, layout: PlanLayout, logits: Tensor, sizes: Sequence[int]
    ) -> None:
        self._sampler, self._inputs, self._layout, self._logits = sampler, inputs, layout, logits
        self._most = max(sizes)
        # Tokens and counts side by side: one copy brings both to the host.
        self._results = torch.empty(_ROW_BYTES * self._most, dtype=torch.uint8, device=logits.device)
        self._tokens, self._num_sampled = _parts(self._results, self._most)
        self._on_host: list[HostResults] = []
        self._graphs = [(size, self._graph(size)) for size in sorted(sizes)]

    def can_draw(self, flags: npt.NDArray[np.int32]) -> bool:
        """Whether rows of such flags `[n]` have a graph."""
        return len(flags) <= self._most and not (flags & _SPECIAL).any()

    def run(self, rows: int) -> HostResults:
        """Enqueues the draw for the first `rows` rows of the step's logits.

        Returns:
            the results, on their way to the host: `read` them when the stream has come so far.
        """
        self._inputs.state.params.tables()
        next(draw for size, draw in self._graphs if size >= rows)()
        results = self._on_host.pop() if self._on_host else self._new_results()
        results.memory.copy_(self._results, non_blocking=True)
        return results

    def read(self, results: HostResults, rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Tokens and numbers of tokens `[rows]`, copies; the results' memory is used again."""
        self._on_host.append(results)
        return results.tokens[:rows].copy(), results.num_sampled[:rows].copy()

    def _new_results(self) -> HostResults:
        memory = torch.empty(self._results.shape, dtype=torch.uint8, pin_memory=self._results.is_cuda)
        tokens, num_sampled = _parts(memory, self._most)
        return HostResults(memory, tokens.numpy(), num_sampled.numpy())

    def _graph(self, size: int) -> Callable[[], object]:
        def draw() -> None:
            self._draw(size)

        draw()
        # Under Triton's interpreter: the same without a graph.
        return captured(draw).replay if self._logits.is_cuda else draw

    def _draw(self, size: int) -> None:
        state, buffers = self._inputs.state, self._inputs.buffers
        slots, positions, tokens = buffers.slots[:size], buffers.next_positions[:size], self._tokens[:size]
        self._sampler.draw_plain(
            self._logits[:size], slots, positions, state.token_ids, state.params, tokens, self._num_sampled[:size]
        )
        append_tokens(state.token_ids, slots, positions, tokens, buffers.flags[:size], self._layout)


def _parts(results: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return results[: _TOKEN_BYTES * rows].view(torch.int64), results[_TOKEN_BYTES * rows :].view(torch.int32)
