"""What the device remembers of each running request between steps.

A plan carries only what changed; everything else of a step is derived here from the slots. Symbols: `S` slots, `L` the longest
sequence, `B` block size, `R` rows and `T` tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.engine.plan import HOST_STATE, PROMPT_LOGPROBS, SAMPLE, Int32Array, StepPlan
from octavo.ops.base import AttentionMetadata, Batch
from octavo.sampling.state import SlotParams


@dataclass(slots=True)
class StepInputs:
    """One step, as tensors on the device."""

    batch: Batch
    slots: torch.Tensor
    """`[R]` int64."""
    sample_rows: torch.Tensor
    """`[n]` int64: rows that get a token; they come first in `batch.logits_indices`."""
    host_sample_rows: npt.NDArray[np.int64]
    """The same on the host."""
    next_positions: torch.Tensor
    """`[n]` int64: position at which the sampled token goes."""
    prompt_logprob_rows: list[PromptLogprobRow]


@dataclass(slots=True)
class PromptLogprobRow:
    """Prompt positions of one row whose next prompt token's log-probability was asked for."""

    row: int
    slot: int
    start: int
    """The first position scored; its logits are those of position `start - 1`."""
    count: int


class SlotState:
    """Tokens, block tables and sampling parameters of every slot, on the device. Only the runner writes it."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        *,
        group_windows: tuple[int | None, ...] = (None,),
        long_rope_above: int | None = None,
        rope_rows: int = 0,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.group_windows = group_windows
        self.long_rope_above = long_rope_above
        # Sequences that use the long frequencies read the rotary tables' second half.
        self._rope_rows = rope_rows
        self.rope_offset = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        blocks = -(-max_model_len // block_size)
        # One column more than the longest sequence: the token sampled at the very end has a place.
        self.token_ids = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(len(group_windows), max_num_seqs, blocks, dtype=torch.int32, device=device)
        self.num_computed_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.params = SlotParams(max_num_seqs, vocab_size, device)
        self.prompt_len = [0] * max_num_seqs

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, new slots, block writes, in the order of the contract."""
        for slot in plan.freed_slots.tolist():
            self.params.clear(slot)
        for entry in plan.slot_inits():
            self.token_ids[entry.slot, : len(entry.tokens)] = self._upload(entry.tokens)
            self.prompt_len[entry.slot] = entry.integer("num_prompt_tokens")
            if self.long_rope_above is not None:
                longest = entry.integer("num_prompt_tokens") + entry.integer("max_tokens")
                self.rope_offset[entry.slot] = self._rope_rows if longest > self.long_rope_above else 0
            self.params.set(entry)
        writes = plan.block_writes
        if len(writes):
            moved = self._upload(writes).long()
            self.block_table[moved[:, 0], moved[:, 1], moved[:, 2]] = moved[:, 3].int()

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Derives the step's tensors; no loop over rows or tokens."""
        rows, tokens = plan.num_rows, plan.num_tokens
        host_flags = plan.rows("flags")
        fixed = self._upload(np.stack([plan.rows("slot"), plan.rows("num_computed_tokens"), host_flags])).long()
        slots, planned, flags = fixed.unbind(0)
        query_start_loc = self._upload(plan.query_start_loc).long()
        starts = query_start_loc[:-1]
        query_lens = query_start_loc[1:] - starts
        computed = torch.where((flags & HOST_STATE) != 0, planned, self.num_computed_tokens[slots])
        seq_lens = computed + query_lens
        self.num_computed_tokens[slots] = seq_lens
        row_of_token = torch.repeat_interleave(torch.arange(rows, device=self.device), query_lens, output_size=tokens)
        positions = torch.arange(tokens, device=self.device) + (computed - starts)[row_of_token]
        token_slots = slots[row_of_token]
        input_ids = self.token_ids[token_slots, positions]
        blocks, offsets = self.block_table[:, token_slots, positions // self.block_size], positions % self.block_size
        if self.long_rope_above is not None:
            # From here on rows of the rotary tables.
            positions = positions + self.rope_offset[token_slots]
        slot_mapping = blocks.long() * self.block_size + offsets
        host_sample_rows = ((host_flags & SAMPLE) != 0).nonzero()[0]
        sample_rows = self._upload(host_sample_rows)
        logits_indices = query_start_loc[1:][sample_rows] - 1
        prompt_rows = self._prompt_logprob_rows(plan)
        if prompt_rows:
            first = plan.query_start_loc
            extra = np.concatenate([first[p.row] + np.arange(p.count) for p in prompt_rows])
            logits_indices = torch.cat([logits_indices, self._upload(extra)])
        max_seq_len, decode_rows = plan.header("max_seq_len"), plan.header("num_decode_rows")
        columns = -(-max_seq_len // self.block_size)
        attention = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self.block_table[:, slots, :columns],
            group_windows=self.group_windows,
            block_size=self.block_size,
            max_query_len=plan.header("max_query_len"),
            max_seq_len=max_seq_len,
            num_decode_rows=decode_rows,
            max_decode_query_len=1 + int(plan.rows("num_draft_tokens")[:decode_rows].max(initial=0)),
        )
        batch = Batch(input_ids=input_ids, positions=positions, logits_indices=logits_indices, attention=attention)
        return StepInputs(batch, slots, sample_rows, host_sample_rows, seq_lens[sample_rows], prompt_rows)

    def append(self, inputs: StepInputs, tokens: torch.Tensor) -> None:
        """Puts the sampled tokens `[n]` behind their sequences."""
        self.token_ids[inputs.slots[inputs.sample_rows], inputs.next_positions] = tokens.int()

    def _upload(self, words: Int32Array | npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy on the device: the plan's buffer is written again while the step still runs."""
        return torch.from_numpy(words.copy()).to(self.device, non_blocking=True)

    def _prompt_logprob_rows(self, plan: StepPlan) -> list[PromptLogprobRow]:
        wanted = (plan.rows("flags") & PROMPT_LOGPROBS).nonzero()[0]
        found = []
        for row in wanted.tolist():
            slot, computed = int(plan.rows("slot")[row]), int(plan.rows("num_computed_tokens")[row])
            length = int(plan.query_start_loc[row + 1] - plan.query_start_loc[row])
            # Position p's logits score the prompt token at p + 1.
            count = min(length, self.prompt_len[slot] - 1 - computed)
            if count > 0:
                found.append(PromptLogprobRow(row, slot, computed + 1, count))
        return found
