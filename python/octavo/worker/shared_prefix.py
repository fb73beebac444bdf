"""Whether the rows of a step begin with the same blocks, told from one column: in a radix tree a block has one path to it.

The host's answer is a hint alone, for the choice of a graph; what rows share exactly, the device finds out itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from octavo.engine.plan import StepPlan

LEAST_TOKENS: Final = 1024
"""A common beginning of fewer is not worth a pass of its own."""
LEAST_ROWS: Final = 4


class SharedPrefix:
    """The block of one column of every slot, kept up with the plans.

    Args:
        max_num_seqs: slots.
        block_size: tokens of a column.
        least_tokens: that rows must have in common.
    """

    def __init__(self, max_num_seqs: int, block_size: int, least_tokens: int = LEAST_TOKENS) -> None:
        self._column = max(1, least_tokens // block_size) - 1
        # 0, the null block: the slot's sequence does not reach so far.
        self._blocks = np.zeros(max_num_seqs + 1, dtype=np.int32)

    def update(self, plan: StepPlan) -> SharedPrefix:
        """Takes what a plan says of slots; every plan must come, in their order. Returns itself."""
        self._blocks[plan.freed_slots] = 0
        writes = plan.block_writes
        if len(writes):
            ours = writes[(writes[:, 0] == 0) & (writes[:, 2] == self._column)]
            self._blocks[ours[:, 1]] = ours[:, 3]
        return self

    def has(self, plan: StepPlan) -> bool:
        """Whether all rows of the plan, and enough of them, have the column's block in common."""
        if plan.num_rows < LEAST_ROWS:
            return False
        blocks = self._blocks[plan.rows("slot")]
        return bool(blocks[0] != 0 and (blocks == blocks[0]).all())
