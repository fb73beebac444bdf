"""What the device remembers of each running request between steps.

A plan carries only what changed; everything else of a step is derived here from the slots. Symbols: `S` slots, `L` the longest
sequence, `B` block size, `R` rows and `T` tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from octavo.engine.plan import HOST_STATE, PROMPT_LOGPROBS, SAMPLE, Int32Array, StepPlan
from octavo.ops.base import AttentionMetadata, Batch
from octavo.sampling.state import SlotParams
from octavo.worker.pooling import PoolingRow, pooling_rows


@dataclass(slots=True)
class StepInputs:
    """One step, as tensors on the device. `n` rows get logits; they come first in `batch.logits_indices`."""

    batch: Batch
    slots: torch.Tensor
    """`[n]` their slots."""
    next_positions: torch.Tensor
    """`[n]` position at which the sampled token goes."""
    host_rows: npt.NDArray[np.int64]
    """`[n]` on the host: which row of the plan each is."""
    is_due: npt.NDArray[np.bool_]
    """`[n]` on the host: whether it gets a token in this step."""
    prompt_logprob_rows: list[PromptLogprobRow]
    """Their tokens' hidden states come behind those of the `n` rows."""
    pooling_rows: list[PoolingRow] = field(default_factory=list)
    """And those of these behind them."""


@dataclass(slots=True)
class PromptLogprobRow:
    """Prompt positions of one row whose next prompt token's log-probability was asked for."""

    row: int
    slot: int
    start: int
    """The first position scored; its logits are those of position `start - 1`."""
    count: int


class AttentionBounds(TypedDict):
    """The part of `AttentionMetadata` that the host knows."""

    group_windows: tuple[int | None, ...]
    block_size: int
    max_query_len: int
    max_seq_len: int
    num_decode_rows: int | None
    max_decode_query_len: int


class SlotState:
    """Tokens, block tables and sampling parameters of every slot, on the device. Only the runner writes it.

    One slot more than requests can have is scratch: rows that only fill a captured step read and write there.
    """

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
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.device = device
        self.group_windows = group_windows
        self.long_rope_above = long_rope_above
        # Sequences that use the long frequencies read the rotary tables' second half.
        self._rope_rows = rope_rows
        slots = max_num_seqs + 1
        self.rope_offset = torch.zeros(slots, dtype=torch.int32, device=device)
        blocks = -(-max_model_len // block_size)
        # One column more than the longest sequence: the token sampled at the very end has a place.
        self.token_ids = torch.zeros(slots, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(len(group_windows), slots, blocks, dtype=torch.int32, device=device)
        self.num_computed_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self.params = SlotParams(slots, vocab_size, device)
        self.prompt_len = [0] * slots
        self._plan = torch.zeros(0, dtype=torch.int32, device=device)

    def upload(self, plan: StepPlan) -> torch.Tensor:
        """The plan on the device: one copy, in the order of the stream, always to the same memory."""
        if len(self._plan) != len(plan.buffer):
            self._plan = torch.zeros(len(plan.buffer), dtype=torch.int32, device=self.device)
        used = plan.used
        self._plan[: len(used)].copy_(torch.from_numpy(used), non_blocking=True)
        return self._plan

    def apply(self, plan: StepPlan, words: torch.Tensor) -> None:
        """Freed and new slots of the plan, whose words are on the device; its block writes are left to `inputs`."""
        for slot in plan.freed_slots.tolist():
            self.params.clear(slot)
        for entry in plan.slot_inits():
            first, count = entry.tokens_offset, len(entry.tokens)
            self.token_ids[entry.slot, :count] = words[first : first + count]
            self.prompt_len[entry.slot] = entry.integer("num_prompt_tokens")
            if self.long_rope_above is not None:
                longest = entry.integer("num_prompt_tokens") + entry.integer("max_tokens")
                self.rope_offset[entry.slot] = self._rope_rows if longest > self.long_rope_above else 0
            self.params.set(entry)

    def _write_blocks(self, plan: StepPlan, words: torch.Tensor) -> None:
        start, count = plan.header("block_writes_offset"), plan.header("num_block_writes")
        if count:
            moved = words[start : start + 4 * count].view(count, 4).long()
            self.block_table[moved[:, 0], moved[:, 1], moved[:, 2]] = moved[:, 3].int()

    def inputs(self, plan: StepPlan, words: torch.Tensor) -> StepInputs:
        """Applies the plan's block writes and derives the step's tensors; no loop over rows or tokens. Rows that are not due
        get no logits."""
        self._write_blocks(plan, words)
        rows, tokens = plan.num_rows, plan.num_tokens

        def section(name: str, length: int) -> torch.Tensor:
            first = plan.offsets[name]
            return words[first : first + length].long()

        slots, planned, flags = (section(name, rows) for name in ("slot", "num_computed_tokens", "flags"))
        query_start_loc = section("query_start_loc", rows + 1)
        starts = query_start_loc[:-1]
        query_lens = query_start_loc[1:] - starts
        computed = torch.where((flags & HOST_STATE) != 0, planned, self.num_computed_tokens[slots].long())
        seq_lens = computed + query_lens
        self.num_computed_tokens[slots] = seq_lens.int()
        row_of_token = torch.repeat_interleave(torch.arange(rows, device=self.device), query_lens, output_size=tokens)
        positions = torch.arange(tokens, device=self.device) + (computed - starts)[row_of_token]
        token_slots = slots[row_of_token]
        input_ids = self.token_ids[token_slots, positions]
        blocks, offsets = self.block_table[:, token_slots, positions // self.block_size], positions % self.block_size
        if self.long_rope_above is not None:
            # From here on rows of the rotary tables.
            positions = positions + self.rope_offset[token_slots]
        slot_mapping = blocks.long() * self.block_size + offsets
        host_rows = ((plan.rows("flags") & SAMPLE) != 0).nonzero()[0]
        due = self._upload(host_rows)
        columns = -(-plan.header("max_seq_len") // self.block_size)
        attention = AttentionMetadata(
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self.block_table[:, slots, :columns],
            **self.bounds(plan),
        )
        prompt_rows = self.prompt_logprob_rows(plan)
        pooled = pooling_rows(plan)
        logits_indices = self.with_prompt_rows(query_start_loc[1:][due] - 1, plan, [*prompt_rows, *pooled])
        batch = Batch(input_ids=input_ids, positions=positions, logits_indices=logits_indices, attention=attention)
        is_due = np.ones(len(host_rows), dtype=np.bool_)
        return StepInputs(batch, slots[due], seq_lens[due], host_rows, is_due, prompt_rows, pooled)

    def bounds(self, plan: StepPlan) -> AttentionBounds:
        """What the host knows of a step's attention."""
        decode_rows = plan.header("num_decode_rows")
        return {
            "group_windows": self.group_windows,
            "block_size": self.block_size,
            "max_query_len": plan.header("max_query_len"),
            "max_seq_len": plan.header("max_seq_len"),
            "num_decode_rows": decode_rows,
            "max_decode_query_len": 1 + int(plan.rows("num_draft_tokens")[:decode_rows].max(initial=0)),
        }

    def append(self, inputs: StepInputs, tokens: torch.Tensor) -> None:
        """Puts the sampled tokens `[n]` behind their sequences; all rows of `inputs` are due."""
        self.token_ids[inputs.slots, inputs.next_positions] = tokens.int()

    def prompt_logprob_rows(self, plan: StepPlan) -> list[PromptLogprobRow]:
        """The prompt positions that this step scores."""
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

    def with_prompt_rows(
        self, logits_indices: torch.Tensor, plan: StepPlan, prompt_rows: Sequence[PromptLogprobRow | PoolingRow]
    ) -> torch.Tensor:
        """`logits_indices` and behind them the first `count` tokens of each of `prompt_rows`."""
        if not any(row.count for row in prompt_rows):
            return logits_indices
        first = plan.query_start_loc
        extra = np.concatenate([first[p.row] + np.arange(p.count) for p in prompt_rows])
        return torch.cat([logits_indices, self._upload(extra).to(logits_indices.dtype)])

    def _upload(self, words: Int32Array | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(words).to(self.device, non_blocking=True)
