"""A step's inputs, derived on a CUDA device by kernels into memory that stays where it is, so that a graph can read it."""

from __future__ import annotations

import numpy as np
import torch

from octavo._core import PLAN
from octavo.engine.plan import SAMPLE, StepPlan
from octavo.kernels.step import PlanLayout, StepBuffers, append_tokens, apply_block_writes, step_inputs
from octavo.ops.base import AttentionMetadata, Batch
from octavo.worker.pooling import pooling_rows
from octavo.worker.slot_state import AttentionBounds, SlotState, StepInputs


class DeviceInputs:
    """`SlotState.inputs` by kernels. All rows of a step get logits; what is not due is dropped when the step is read back.

    Args:
        state: of the slots, on the device.
        max_num_batched_tokens: tokens of the largest step.
    """

    def __init__(self, state: SlotState, max_num_batched_tokens: int) -> None:
        self.state = state
        groups, _, columns = state.block_table.shape
        self.buffers = StepBuffers.allocate(state.max_num_seqs, max_num_batched_tokens, groups, columns, state.device)
        self._layout: PlanLayout | None = None

    def layout(self, plan: StepPlan) -> PlanLayout:
        """Where the parts of this core's plans lie."""
        if self._layout is None:
            self._layout = PlanLayout.of(PLAN["header"], plan.offsets, PLAN["row_flags"])
        return self._layout

    def derive(self, layout: PlanLayout, words: torch.Tensor, rows: int, tokens: int) -> StepBuffers:
        """Enqueues the plan's block writes and the inputs of a step padded to `rows` and `tokens`."""
        state, out = self.state, self.buffers.bucket(rows, tokens)
        apply_block_writes(words, layout, state.block_table)
        step_inputs(
            words,
            layout,
            state.token_ids,
            state.block_table,
            state.num_computed_tokens,
            state.rope_offset,
            state.block_size,
            out,
        )
        return out

    def batch(self, buffers: StepBuffers, bounds: AttentionBounds, logits_indices: torch.Tensor | None) -> Batch:
        """What the decoder reads of the buffers."""
        columns = -(-bounds["max_seq_len"] // self.state.block_size)
        attention = AttentionMetadata(
            slot_mapping=buffers.slot_mapping,
            query_start_loc=buffers.query_start_loc,
            seq_lens=buffers.seq_lens,
            block_table=buffers.block_table[:, :, :columns],
            **bounds,
        )
        return Batch(buffers.input_ids, buffers.positions, logits_indices, attention)

    def inputs(self, plan: StepPlan, words: torch.Tensor) -> StepInputs:
        """One step that no graph holds."""
        state = self.state
        buffers = self.derive(self.layout(plan), words, plan.num_rows, plan.num_tokens)
        prompt_rows = state.prompt_logprob_rows(plan)
        pooled = pooling_rows(plan)
        indices = state.with_prompt_rows(buffers.logits_indices, plan, [*prompt_rows, *pooled])
        step = self.step(plan, buffers, self.batch(buffers, state.bounds(plan), indices))
        step.prompt_logprob_rows, step.pooling_rows = prompt_rows, pooled
        return step

    def step(self, plan: StepPlan, buffers: StepBuffers, batch: Batch) -> StepInputs:
        """The inputs of the plan's own rows, without those that pad."""
        rows = plan.num_rows
        is_due = (plan.rows("flags") & SAMPLE) != 0
        return StepInputs(batch, buffers.slots[:rows], buffers.next_positions[:rows], np.arange(rows), is_due, [])

    def append(self, step: StepInputs, tokens: torch.Tensor) -> None:
        """Puts the sampled tokens `[R]` of the rows that are due behind their sequences."""
        assert self._layout is not None, "made by the step's inputs"
        flags = self.buffers.flags[: len(step.slots)]
        append_tokens(self.state.token_ids, step.slots, step.next_positions, tokens, flags, self._layout)
