"""The sampler of a GPU's 16-bit steps: kernels that share a row for what most requests ask for, the torch sampler for the rest."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.kernels.split_sampling import SlotTables, SplitSampler
from octavo.sampling.rng import Domain
from octavo.sampling.rows import RowFlag, SampleRows
from octavo.sampling.sampler import LogprobsMode, Sampler, SamplerOutput
from octavo.sampling.state import GREEDY_TEMPERATURE, SlotParams

_BY_TORCH: Final = RowFlag.BIAS | RowFlag.GRAMMAR | RowFlag.LOGPROBS


class SplitDeviceSampler(Sampler):
    """`Sampler` whose draws agree with the torch sampler's but for ties within rounding; no step waits for the device.

    Args:
        vocab_size: `V`.
        logprobs_mode: see `Sampler`.
        max_rows: rows of the largest step that the kernels take; their memory is `4 V` bytes a row.
        device: of the logits.
    """

    def __init__(
        self, vocab_size: int, logprobs_mode: LogprobsMode = "raw", *, max_rows: int, device: torch.device
    ) -> None:
        super().__init__(vocab_size, logprobs_mode)
        self._kernels = SplitSampler(vocab_size, max_rows, device, GREEDY_TEMPERATURE)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: SampleRows, params: SlotParams) -> SamplerOutput:
        """See `Sampler`; the logits are not modified where the kernels draw."""
        is_plain = rows.draft_tokens is None and not bool((rows.flags & int(_BY_TORCH)).any())
        if not is_plain or len(rows.slots) > self._kernels.max_rows:
            return super().__call__(logits, rows, params)
        tables = params.tables()
        tokens = torch.empty(len(rows.slots), dtype=torch.int64, device=logits.device)
        num_sampled = torch.empty(len(rows.slots), dtype=torch.int32, device=logits.device)
        self._kernels(
            logits,
            rows.slots,
            rows.num_tokens,
            rows.token_ids,
            SlotTables(tables.floats, tables.ints, tables.keys[:, int(Domain.TARGET)]),
            tokens,
            num_sampled,
            all_greedy=not bool((rows.flags & int(RowFlag.RANDOM)).any()),
        )
        return SamplerOutput(tokens[:, None], num_sampled, None, None)
