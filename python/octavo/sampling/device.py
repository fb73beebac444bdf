"""The sampler of a GPU's 16-bit steps: kernels that share a row for what most requests ask for, the torch sampler for the rest."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.sampling import MASKED, MAX_LOGPROBS, REPLACED, REPORTED, Rows, SamplingKernels, SlotTables
from octavo.sampling.adjust import apply_bans, apply_bias, apply_penalties
from octavo.sampling.logprobs import Logprobs
from octavo.sampling.rng import Domain
from octavo.sampling.rows import Positions, RowFlag, SampleRows
from octavo.sampling.sampler import LogprobsMode, Sampler, SamplerOutput
from octavo.sampling.state import GREEDY_TEMPERATURE, SlotParams, uploaded


class DeviceSampler(Sampler):
    """`Sampler` whose draws agree with the torch sampler's but for ties within rounding; no step waits for the device.

    Steps with drafts, with more than `MAX_LOGPROBS` likeliest tokens, or with log-probabilities in `processed` mode go to the torch
    sampler. Rows with token lists have their logits adjusted by torch.

    Args:
        vocab_size: `V`.
        logprobs_mode: see `Sampler`.
        max_rows: rows of the largest step; see `SamplingKernels`.
        device: of the logits.
    """

    def __init__(
        self, vocab_size: int, logprobs_mode: LogprobsMode = "raw", *, max_rows: int, device: torch.device
    ) -> None:
        super().__init__(vocab_size, logprobs_mode)
        self._kernels = SamplingKernels(vocab_size, max_rows, device, GREEDY_TEMPERATURE)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: SampleRows, params: SlotParams) -> SamplerOutput:
        """See `Sampler`; the logits are not modified where the kernels draw."""
        reported = ((rows.flags & RowFlag.LOGPROBS) != 0).nonzero()[0]
        wanted = max(0, int(params.num_logprobs[rows.host_slots[reported]].max(initial=0)))
        if rows.draft_tokens is not None or (
            len(reported) and (wanted > MAX_LOGPROBS or self.logprobs_mode == "processed")
        ):
            return super().__call__(logits, rows, params)
        tokens = torch.empty(len(rows.slots), dtype=torch.int64, device=logits.device)
        num_sampled = torch.empty(len(rows.slots), dtype=torch.int32, device=logits.device)
        self._kernels(
            logits,
            self._kernel_rows(logits, rows, params),
            _tables(params),
            tokens,
            num_sampled,
        )
        if not len(reported):
            return SamplerOutput(tokens[:, None], num_sampled, None, None)
        which = uploaded(reported, logits.device)
        report = Logprobs(*self._kernels.report(logits, which, tokens, min(wanted, self.vocab_size)))
        return SamplerOutput(tokens[:, None], num_sampled, which, report)

    @torch.inference_mode()
    def draw_plain(
        self,
        logits: Tensor,
        slots: Tensor,
        num_tokens: Tensor,
        token_ids: Tensor,
        params: SlotParams,
        tokens: Tensor,
        num_sampled: Tensor,
    ) -> None:
        """Draws for rows without drafts, token lists, masks, penalties and log-probabilities; a graph can hold it.

        Args:
            logits: `[n, >= V]`, read only.
            slots: int `[n]`, as in `SampleRows`; so are the next two.
            num_tokens: see there.
            token_ids: see there.
            params: of the slots.
            tokens: int64 `[n]`, written.
            num_sampled: int32 `[n]`, written: 1; -1 where the logits leave no token.
        """
        rows = Rows(slots, num_tokens, token_ids, has_penalties=False)
        self._kernels(logits, rows, _tables(params), tokens, num_sampled)

    @torch.inference_mode()
    def compile(
        self, dtype: torch.dtype, slots: Tensor, num_tokens: Tensor, token_ids: Tensor, params: SlotParams
    ) -> None:
        """Compiles all kernels side by side, so that no step waits for that; none runs.

        Args:
            dtype: of the logits.
            slots: as in `SampleRows`, of any content; so are the others.
            num_tokens: see there.
            token_ids: see there.
            params: of the slots.
        """
        rows = Rows(slots[:1], num_tokens[:1], token_ids)
        tokens = torch.empty(1, dtype=torch.int64, device=slots.device)
        num_sampled = torch.empty(1, dtype=torch.int32, device=slots.device)
        with launch.compiling_ahead(len(os.sched_getaffinity(0))):
            logits = torch.empty(1, self.vocab_size, dtype=dtype, device=slots.device)
            self._kernels(logits, rows, _tables(params), tokens, num_sampled)
            for wanted in (0, 1):
                self._kernels.report(logits, tokens, tokens, wanted)

    def _kernel_rows(self, logits: Tensor, rows: SampleRows, params: SlotParams) -> Rows:
        """What the kernels have to know; rows with token lists are replaced."""
        listed = (rows.flags & RowFlag.BIAS) != 0
        masked = ((rows.flags & RowFlag.GRAMMAR) != 0) & (rows.grammar_mask is not None)
        reported = (rows.flags & RowFlag.LOGPROBS) != 0
        bits = masked * MASKED.value + listed * REPLACED.value + reported * REPORTED.value
        if listed.any():
            self._replace(logits, rows, params, listed.nonzero()[0])
        return Rows(
            rows.slots,
            rows.num_tokens,
            rows.token_ids,
            bits=uploaded(bits.astype(np.int32), logits.device) if bits.any() else None,
            mask=rows.grammar_mask if masked.any() else None,
            has_penalties=bool(((rows.flags & RowFlag.PENALTIES) != 0)[~listed].any()),
        )

    def _replace(self, logits: Tensor, rows: SampleRows, params: SlotParams, which: np.ndarray) -> None:
        """Puts logits after bias, penalties and bans of some rows into the kernels' overlay."""
        some = uploaded(which, logits.device)
        at = Positions(
            SampleRows(
                slots=rows.slots[some],
                host_slots=rows.host_slots[which],
                flags=rows.flags[which],
                num_tokens=rows.num_tokens[some],
                max_num_tokens=rows.max_num_tokens,
                token_ids=rows.token_ids,
            ),
            params,
        )
        new = logits[some, : self.vocab_size].float()
        lists, num_slots = params.token_lists(), len(params.num_logprobs)
        apply_bias(new, at, lists, num_slots)
        apply_penalties(new, at, at.pick(RowFlag.PENALTIES))
        apply_bans(new, at, lists, num_slots)
        self._kernels.replace(some, new)


def _tables(params: SlotParams) -> SlotTables:
    tables = params.tables()
    return SlotTables(tables.floats, tables.ints, tables.keys[:, int(Domain.TARGET)])
