"""From logits to tokens on the device, without sorting the vocabulary and without a decision on the host.

A row of logits is taken as blocks of 64 tokens, or fewer of a small vocabulary. The kernels of a step, of which those are launched
that its rows can need:

1. *penalise*: the logits of the tokens of a row's history, as they are after its penalties, into an overlay.
2. *scan*, the one pass over all logits: the largest of each block; for rows whose winner can be anywhere its mass (the sum of
   exponentials) too, and a bound of the scores that its tokens have in the race.
3. *choose*, one program a row, which reads only blocks in reach again. With top-k, the tokens that can pass reach the `k`-th
   largest of the blocks' largest: at least `k` do, and few more. With min-p, and with top-p where the largest of few blocks make up
   the nucleus, the same is true of another limit. All filters are then decided among those tokens.
   Otherwise a token wins only with a high score. Scores of a race of the mass `Z` exceed `log Z - c` as a Poisson process of mean
   `e**c` does, so some 50 blocks hold all that can win. Their tokens are asked in the order of their scores whether they are in the
   nucleus, whose mass is summed from the blocks that reach them; of those, only such as are likelier than all before.
4. *report*, one program a row that wants log-probabilities, which reads a few blocks again.

That this was enough is checked. Where very many logits are equal, and for a top-k beyond `MAX_TOP_K`, the row's program goes over
all of it by bisection. No number of a row depends on other rows. Against the torch sampler a token can differ only where two
scores, or a mass and its limit, agree to some 1e-6. Symbols: `R` rows, `V` vocabulary, `S` slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.sampling_choose import choose_kernel
from octavo.kernels.sampling_report import report_kernel
from octavo.kernels.sampling_scan import (
    BLOCK_TABLES,
    MASKED,
    MAX_TOP_K,
    REPLACED,
    REPORTED,
    penalise_kernel,
    scan_kernel,
)

__all__ = ["MASKED", "MAX_LOGPROBS", "MAX_TOP_K", "REPLACED", "REPORTED", "Rows", "SamplingKernels", "SlotTables"]

MAX_LOGPROBS = 32
"""The most likeliest tokens that are reported of a row."""

_TILE = 4096
_LEAST_BLOCK, _MOST_BLOCK = 16, 64
_FEW_BLOCKS = 256
_CANDIDATES = 2048
_FEW = 256
_HISTORY = 1024
_WARPS = 8
# Programs of the scan that a multiprocessor holds at a time, and what that leaves each thread.
_RESIDENT = 4
_SCAN_REGISTERS = 64
# Two programs on a multiprocessor: one wave of 256 rows.
_CHOOSE_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Sampling parameters of all slots: `[S, .]`, rows of any stride."""

    floats: Tensor
    """fp32: temperature, top-p, min-p, presence, frequency, repetition."""
    ints: Tensor
    """int32: top-k, minimum of tokens, length of the prompt."""
    keys: Tensor
    """int32 `[S, 4]`: slot keys of the domain that is drawn for."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, and what the host knows of all of them."""

    slots: Tensor
    """int `[R]`, all different."""
    num_tokens: Tensor
    """int `[R]`, known tokens, which is the position of the token to be drawn."""
    token_ids: Tensor
    """int32 `[S, L]`, known tokens of all slots; read for rows with penalties."""
    bits: Tensor | None = None
    """int32 `[R]` of `MASKED`, `REPLACED`, `REPORTED`; `None`: 0."""
    mask: Tensor | None = None
    """int32 `[R, ceil(V / 32)]`: bit `i % 32` of word `i // 32` allows token `i`; read for `MASKED` rows."""
    has_penalties: bool = True
    """Whether there can be a row with penalties."""


class SamplingKernels:
    """Draws for up to `max_rows` rows at a time; owns the memory that its kernels share, some `5 V` bytes a row.

    Args:
        vocab_size: `V`; further columns of the logits are padding.
        max_rows: `R` at most.
        device: of everything.
        greedy_below: temperatures below it are greedy.
        tile: tokens that a program works on at a time, a power of two, 256 or more.
    """

    def __init__(
        self, vocab_size: int, max_rows: int, device: torch.device, greedy_below: float, tile: int = _TILE
    ) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self._greedy_below = greedy_below
        # So many blocks that a large top-k finds as many, as far as that goes.
        self._block = min(_MOST_BLOCK, max(_LEAST_BLOCK, triton.next_power_of_2(vocab_size) // (2 * MAX_TOP_K)))
        self._tile = tile // self._block
        self._tiles = triton.cdiv(vocab_size, tile)
        self._padded = self._tiles * tile
        self._blocks = triton.next_power_of_2(self._padded // self._block)
        self._slots_of_device = _RESIDENT * launch.multiprocessors(device)

        def words(*shape: int) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=torch.int32, device=device)

        self._overlay, self._changed = words(self._padded).view(torch.float32), words(self._padded // 32)
        # Blocks behind the last one stay as they are.
        self._stats = words(BLOCK_TABLES.value, self._blocks).view(torch.float32)
        self._stats.copy_(torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf, 0.0], device=device)[:, None])
        self._places, self._tokens = words(2, self._blocks), words(_CANDIDATES)
        self._values = words(_CANDIDATES).view(torch.float32)
        self._count, self.tasks = words(), words()
        self._no_bits = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def replace(self, which: Tensor, logits: Tensor) -> None:
        """Gives the next call other logits for some rows, to be marked `REPLACED`.

        Args:
            which: int64 `[m]`, rows.
            logits: fp32 `[m, V]`, penalties applied.
        """
        self._overlay[which, : self.vocab_size] = logits
        self._overlay[which, self.vocab_size :] = -torch.inf
        self._changed[which] = -1

    def __call__(self, logits: Tensor, rows: Rows, tables: SlotTables, out: Tensor, num_sampled: Tensor) -> None:
        """Draws a token for each row, in two or three launches; a graph can hold them.

        Args:
            logits: fp32, bf16 or fp16 `[R, >= V]`, rows of any stride; read only.
            rows: what is drawn for.
            tables: parameters of all slots.
            out: int `[R]`, written: tokens; 0 for a row that fails.
            num_sampled: int32 `[R]`, written: 1; -1 where the logits leave no token (NaN, or nothing finite).

        Raises:
            ValueError: more rows than `max_rows`.
        """
        count, device = len(rows.slots), logits.device
        if count > self.max_rows:
            raise ValueError(f"rows: {count}, at most {self.max_rows}")
        if not count:
            return
        vocab, tiles = self.vocab_size, self._tiles
        dependent = launch.dependent_launch(device)
        options = {"num_warps": _WARPS, **launch.launch_options(dependent)}
        # The torch sampler rounds each product: nothing is fused where its numbers are made.
        exact = {**options, "enable_fp_fusion": False}
        scans, chooses = options, exact
        if device.type == "cuda":
            scans, chooses = {**options, "maxnreg": _SCAN_REGISTERS}, {**exact, "maxnreg": _CHOOSE_REGISTERS}
        floats, ints, keys = tables.floats, tables.ints, tables.keys
        bits = self._no_bits if rows.bits is None else rows.bits
        mask = self._changed if rows.mask is None else rows.mask
        most = max(1, min(tiles, self._slots_of_device // count))
        share = triton.cdiv(tiles, most)
        parts = triton.cdiv(tiles, share)
        if rows.has_penalties:
            spans = min(parts, 8)
            span = triton.cdiv(self._padded, 32 * spans) * 32
            penalise_kernel[(count, spans)](
                logits, bits, rows.slots, rows.num_tokens, rows.token_ids, floats, ints, self._overlay.view(torch.int32),
                self._changed, vocab, span, logits.stride(0), rows.token_ids.stride(0), floats.stride(0), ints.stride(0),
                self._padded, _HISTORY, dependent, **exact,
            )  # fmt: skip
        shape = (self._tile, self._block, self._blocks, self._padded)
        penalised = int(rows.has_penalties)
        strides = (logits.stride(0), mask.stride(0), floats.stride(0), ints.stride(0), keys.stride(0))
        scan_kernel[(count, parts)](
            logits, bits, rows.slots, rows.num_tokens, floats, ints, keys, mask, self._overlay, self._changed, self._stats,
            vocab, share, tiles, penalised, *strides, self._greedy_below, *shape, dependent, **scans,
        )  # fmt: skip
        choose_kernel[(count,)](
            logits, bits, rows.slots, rows.num_tokens, floats, ints, keys, mask, self._overlay, self._changed, self._stats,
            self._places, self._count, self._values, self._tokens, self.tasks, out, num_sampled,
            vocab, tiles, penalised, *strides, self._greedy_below,
            *shape, _FEW_BLOCKS, _CANDIDATES, _FEW, dependent, **chooses,
        )  # fmt: skip

    def report(self, logits: Tensor, which: Tensor, out: Tensor, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the logits as they came, after a call that drew `out` from them; one launch.

        Args:
            logits: those of the call.
            which: int `[m]`, rows that were `REPORTED`.
            out: int `[R]`, tokens.
            wanted: likeliest tokens `N` beside the row's own, at most `MAX_LOGPROBS` and `V`.

        Returns:
            token ids int32 `[m, 1 + N]` and log-probabilities fp32 `[m, 1 + N]`, the row's own token first, the others in falling
            order, equal ones by rising id; int32 `[m]` ranks of the own, 1 and more that are likelier.
        """
        count, device = len(which), logits.device
        dependent = launch.dependent_launch(device)
        ids = torch.empty(count, 1 + wanted, dtype=torch.int32, device=device)
        logprobs = torch.empty(count, 1 + wanted, dtype=torch.float32, device=device)
        ranks = torch.empty(count, dtype=torch.int32, device=device)
        report_kernel[(count,)](
            logits, which, out, self._stats, self._places, ids, logprobs, ranks, self.vocab_size, wanted, logits.stride(0),
            self._tile, self._block, self._blocks, MAX_LOGPROBS if wanted else 0, dependent, num_warps=_WARPS,
            enable_fp_fusion=False, **launch.launch_options(dependent),
        )  # fmt: skip
        return ids, logprobs, ranks
