"""One vector for a whole prompt: the last token's hidden state, or the mean of all tokens'.

A mean is added up chunk by chunk, from position 0 on: prompts that want one are never taken from the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.engine.plan import POOL, POOL_MEAN, SAMPLE, StepPlan


@dataclass(frozen=True, slots=True)
class PoolingRow:
    """A row of a prompt that becomes a vector."""

    row: int
    slot: int
    count: int
    """Tokens whose hidden states are added up; 0: the last one's is the vector."""
    begins: bool
    """The first chunk of the prompt."""
    ends: bool
    """The last one."""


def pooling_rows(plan: StepPlan) -> list[PoolingRow]:
    """The rows of this step that bring a vector nearer."""
    if not plan.header("flags") & POOL:
        return []
    flags, lengths = plan.rows("flags"), plan.query_start_loc[1:] - plan.query_start_loc[:-1]
    slots, computed = plan.rows("slot"), plan.rows("num_computed_tokens")
    found = []
    for row in ((flags & POOL) != 0).nonzero()[0].tolist():
        ends, is_mean = bool(flags[row] & SAMPLE), bool(flags[row] & POOL_MEAN)
        if ends or is_mean:
            count = int(lengths[row]) if is_mean else 0
            found.append(PoolingRow(row, int(slots[row]), count, bool(computed[row] == 0), ends))
    return found


class Pooler:
    """The sums of prompts whose mean is under way."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, int]] = {}

    def add(self, row: PoolingRow, last: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor | None:
        """Takes the hidden states of a row.

        Args:
            row: which one.
            last: `[D]` of its last token, if it ends the prompt.
            hidden: `[count, D]` of its tokens.

        Returns:
            The prompt's vector `[D]` in fp32, once it is complete.
        """
        if row.count == 0:
            return None if last is None else last.float()
        total, number = hidden.float().sum(dim=0), row.count
        # Whatever an aborted request left in its slot is forgotten.
        before = None if row.begins else self._sums.pop(row.slot, None)
        if before is not None:
            total, number = total + before[0], number + before[1]
        if row.ends:
            return total / number
        self._sums[row.slot] = (total, number)
        return None
