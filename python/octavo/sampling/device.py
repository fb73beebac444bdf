"""The sampler of a GPU's 16-bit steps: one kernel for what most requests ask for, the torch sampler for the rest."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.kernels import sampling
from octavo.sampling.rng import Domain
from octavo.sampling.rows import RowFlag, SampleRows
from octavo.sampling.sampler import Sampler, SamplerOutput
from octavo.sampling.state import FLOATS, GREEDY_TEMPERATURE, INTS, SlotParams

_BY_TORCH: Final = RowFlag.BIAS | RowFlag.GRAMMAR | RowFlag.LOGPROBS | RowFlag.PENALTIES
_COLUMNS: Final = sampling.Columns(
    temperature=FLOATS.index("temperature"),
    top_p=FLOATS.index("top_p"),
    min_p=FLOATS.index("min_p"),
    top_k=INTS.index("top_k"),
)


class DeviceSampler(Sampler):
    """`Sampler` whose draws agree with the torch sampler's but for ties within rounding; no step waits for the device."""

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: SampleRows, params: SlotParams) -> SamplerOutput:
        """See `Sampler`; the logits are not modified where the kernel draws."""
        if not self._is_plain(rows, params):
            return super().__call__(logits, rows, params)
        tables = params.tables()
        tokens, num_sampled = sampling.sample(
            logits,
            rows.slots,
            rows.num_tokens,
            tables.floats,
            tables.ints,
            tables.keys[:, int(Domain.TARGET)],
            _COLUMNS,
            self.vocab_size,
            GREEDY_TEMPERATURE,
        )
        return SamplerOutput(tokens[:, None], num_sampled, None, None)

    def _is_plain(self, rows: SampleRows, params: SlotParams) -> bool:
        """Whether no row of the step needs more than temperature and filters of usual size."""
        if rows.draft_tokens is not None or bool((rows.flags & int(_BY_TORCH)).any()):
            return False
        top_k = params.top_k[rows.host_slots]
        return bool(((top_k <= sampling.MAX_TOP_K) | (top_k >= self.vocab_size)).all())
