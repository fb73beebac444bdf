"""A step's small device work: the plan in device memory and the slot state become the forward pass's inputs, sampled tokens go
back to the slot state.

Every launch has a grid that depends on the bucket alone and reads lengths on the device, so a CUDA graph may hold it. Symbols: `S`
slots of which the last one is scratch, `L` longest sequence, `B` block size, `G` cache groups, `C` columns of a block table, `R`
rows and `T` tokens of the bucket. docs/engine.md has the plan's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens, or columns, that a program handles at a time.
_TILE = 1024
# Programs that share a row whose length the host knows.
_MAX_SPLITS = 8
# Block writes compared with each other at a time.
_WRITES = 64


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where the parts of a plan lie, in words, and the two row flags that matter on the device."""

    num_rows: int
    """Header words, as are the next three."""
    num_tokens: int
    num_block_writes: int
    block_writes_offset: int
    slot: int
    """Sections of one word a row, as are the next three."""
    query_start_loc: int
    num_computed_tokens: int
    flags: int
    host_state: int
    """Row flag: `num_computed_tokens` is the plan's, not the slot's."""
    sample: int
    """Row flag: the row gets a token."""

    @classmethod
    def of(cls, header: Mapping[str, int], offsets: Mapping[str, int], row_flags: Mapping[str, int]) -> PlanLayout:
        """From the tables `PLAN["header"]`, `plan_offsets()` and `PLAN["row_flags"]` of the control plane."""
        return cls(
            num_rows=header["num_rows"],
            num_tokens=header["num_tokens"],
            num_block_writes=header["num_block_writes"],
            block_writes_offset=header["block_writes_offset"],
            slot=offsets["slot"],
            query_start_loc=offsets["query_start_loc"],
            num_computed_tokens=offsets["num_computed_tokens"],
            flags=offsets["flags"],
            host_state=row_flags["HOST_STATE"],
            sample=row_flags["SAMPLE"],
        )


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What `step_inputs` fills, all int32. A row is padding from the plan's `num_rows` on, a token from its `num_tokens` on."""

    input_ids: Tensor
    """`[T]`; padding: 0."""
    positions: Tensor
    """`[T]` rows of the rotary tables; padding: 0."""
    slot_mapping: Tensor
    """`[G, T]`, `block_id * B + offset`; padding: places of the null block."""
    query_start_loc: Tensor
    """`[R + 1]`; padding: the number of tokens."""
    seq_lens: Tensor
    """`[R]` with the query included; padding: 0."""
    slots: Tensor
    """`[R]`; padding: the last slot."""
    flags: Tensor
    """`[R]` row flags; padding: 0."""
    block_table: Tensor
    """`[G, R, C]`; written up to the row's length, what lies behind are ids of earlier steps."""
    logits_indices: Tensor
    """`[R]` the row's last token; padding and empty rows: a valid token."""
    next_positions: Tensor
    """`[R]` where a sampled token goes; padding: 0."""

    @classmethod
    def allocate(cls, rows: int, tokens: int, groups: int, columns: int, device: torch.device | str) -> StepBuffers:
        """Buffers for the largest bucket; `bucket` gives those of the others in the same memory."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return cls(
            input_ids=zeros(tokens),
            positions=zeros(tokens),
            slot_mapping=zeros(groups, tokens),
            query_start_loc=zeros(rows + 1),
            seq_lens=zeros(rows),
            slots=zeros(rows),
            flags=zeros(rows),
            block_table=zeros(groups, rows, columns),
            logits_indices=zeros(rows),
            next_positions=zeros(rows),
        )

    def bucket(self, rows: int, tokens: int) -> StepBuffers:
        """Views for `rows` rows and `tokens` tokens."""
        return StepBuffers(
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            slot_mapping=self.slot_mapping[:, :tokens],
            query_start_loc=self.query_start_loc[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            slots=self.slots[:rows],
            flags=self.flags[:rows],
            block_table=self.block_table[:, :rows],
            logits_indices=self.logits_indices[:rows],
            next_positions=self.next_positions[:rows],
        )


@triton.jit
def _block_writes_kernel(plan, table, count_word, offset_word, group_stride, slot_stride, N: tl.constexpr):
    """One program, `N` writes at a time in their order; of writes to the same place the last one counts."""
    count = tl.load(plan + count_word)
    writes = plan + tl.load(plan + offset_word)
    i = tl.arange(0, N)
    for first in range(0, count, N):
        at = writes + (first + i) * 4
        inside = first + i < count
        group = tl.load(at, mask=inside, other=0).to(tl.int64)
        slot = tl.load(at + 1, mask=inside, other=0).to(tl.int64)
        column = tl.load(at + 2, mask=inside, other=0)
        block = tl.load(at + 3, mask=inside, other=0)
        place = tl.where(inside, group * group_stride + slot * slot_stride + column, -1)
        # The same places as a row, read again: a layout change of 64-bit words would cost as much.
        later = writes + (first + i) * 4
        g = tl.load(later, mask=inside, other=0).to(tl.int64)
        s = tl.load(later + 1, mask=inside, other=0).to(tl.int64)
        c = tl.load(later + 2, mask=inside, other=0)
        other = tl.where(inside, g * group_stride + s * slot_stride + c, -1)
        again = (place[:, None] == other[None, :]) & (i[None, :] > i[:, None])
        last = tl.sum(again.to(tl.int32), 1) == 0
        tl.store(table + place, block, mask=inside & last)
        tl.debug_barrier()


def apply_block_writes(plan: Tensor, layout: PlanLayout, block_table: Tensor) -> None:
    """Applies the plan's block writes, however many there are, in their order.

    Args:
        plan: int32 `[words]`, on the device.
        layout: of the plan.
        block_table: int32 `[G, S, C]`, of all slots, modified.
    """
    _block_writes_kernel[(1,)](
        plan, block_table, layout.num_block_writes, layout.block_writes_offset,
        block_table.stride(0), block_table.stride(1), _WRITES, num_warps=4,
    )  # fmt: skip


@triton.jit
def _store_row(
    row, stop, length, slot, flag,
    query_start_loc, seq_lens, slots, flags, logits_indices, next_positions,
):  # fmt: skip
    tl.store(query_start_loc + row + 1, stop)
    tl.store(seq_lens + row, length)
    tl.store(slots + row, slot)
    tl.store(flags + row, flag)
    tl.store(logits_indices + row, tl.maximum(stop - 1, 0))
    tl.store(next_positions + row, length)
    if row == 0:
        tl.store(query_start_loc, 0)


@triton.jit
def _store_padding_tokens(
    first, num_tokens, padded_tokens, input_ids, positions, slot_mapping, mapping_stride, block_size,
    GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = first + tl.arange(0, TILE)
    padding = (token >= num_tokens) & (token < padded_tokens)
    nothing = tl.zeros([TILE], tl.int32)
    tl.store(input_ids + token, nothing, mask=padding)
    tl.store(positions + token, nothing, mask=padding)
    for group in range(GROUPS):
        tl.store(slot_mapping + group * mapping_stride + token, token % block_size, mask=padding)


@triton.jit
def _store_tokens(
    start, stop, computed, begin, step, offset, tokens, blocks, group_stride,
    input_ids, positions, slot_mapping, mapping_stride, block_size, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tiles `begin`, `begin + step`, … of a row's tokens; `tokens` and `blocks` are those of its slot."""
    i = tl.arange(0, TILE)
    for first in range(begin, stop - start, step):
        inside = first + i < stop - start
        token = start + first + i
        position = computed + first + i
        word = tl.load(tokens + position, mask=inside, other=0)
        tl.store(input_ids + token, word, mask=inside)
        tl.store(positions + token, position + offset, mask=inside)
        for group in range(GROUPS):
            block = tl.load(blocks + group * group_stride + position // block_size, mask=inside, other=0)
            place = block * block_size + position % block_size
            tl.store(slot_mapping + group * mapping_stride + token, place, mask=inside)


@triton.jit
def _copy_blocks(
    columns, begin, step, blocks, group_stride, target, target_stride, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    i = tl.arange(0, TILE)
    for first in range(begin, columns, step):
        inside = first + i < columns
        for group in range(GROUPS):
            block = tl.load(blocks + group * group_stride + first + i, mask=inside, other=0)
            tl.store(target + group * target_stride + first + i, block, mask=inside)


@triton.jit(do_not_specialize=["padded_rows", "padded_tokens"])
def _step_inputs_kernel(
    plan, token_ids, table, computed_of_slot, rope_offset,
    input_ids, positions, slot_mapping, query_start_loc, seq_lens, slots, flags, row_table, logits_indices, next_positions,
    num_rows_word, num_tokens_word, slot_at, start_at, computed_at, flags_at, padded_rows, padded_tokens, scratch_slot, block_size,
    token_stride, group_stride, slot_stride, mapping_stride, row_group_stride, row_stride,
    HOST_STATE: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs below `padded_rows`: a share of one row's tokens and columns. The others: a tile of padding tokens each."""
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    num_tokens = tl.load(plan + num_tokens_word)
    if row >= padded_rows:
        if split == 0:
            _store_padding_tokens(
                (row - padded_rows) * TILE, num_tokens, padded_tokens,
                input_ids, positions, slot_mapping, mapping_stride, block_size, GROUPS, TILE,
            )  # fmt: skip
    elif row >= tl.load(plan + num_rows_word):
        if split == 0:
            _store_row(
                row, num_tokens, 0, scratch_slot, 0,
                query_start_loc, seq_lens, slots, flags, logits_indices, next_positions,
            )  # fmt: skip
    else:
        slot = tl.load(plan + slot_at + row)
        start = tl.load(plan + start_at + row)
        stop = tl.load(plan + start_at + row + 1)
        flag = tl.load(plan + flags_at + row)
        computed = tl.load(plan + computed_at + row)
        known = (flag & HOST_STATE) != 0
        if not known:
            computed = tl.load(computed_of_slot + slot).to(tl.int32)
        length = computed + stop - start
        # Where the count is the slot's, program 0 alone reads it before it writes it, and does the whole row.
        if known | (split == 0):
            offset = tl.load(rope_offset + slot).to(tl.int32)
            wide_slot = slot.to(tl.int64)
            blocks = table + wide_slot * slot_stride
            begin, step = split * TILE, tl.where(known, splits * TILE, TILE)
            _store_tokens(
                start, stop, computed, begin, step, offset, token_ids + wide_slot * token_stride, blocks, group_stride,
                input_ids, positions, slot_mapping, mapping_stride, block_size, GROUPS, TILE,
            )  # fmt: skip
            target = row_table + row.to(tl.int64) * row_stride
            columns = tl.cdiv(length, block_size)
            _copy_blocks(columns, begin, step, blocks, group_stride, target, row_group_stride, GROUPS, TILE)
        if split == 0:
            tl.debug_barrier()
            tl.store(computed_of_slot + slot, length.to(computed_of_slot.dtype.element_ty))
            _store_row(
                row, stop, length, slot, flag, query_start_loc, seq_lens, slots, flags, logits_indices, next_positions
            )


def step_inputs(
    plan: Tensor,
    layout: PlanLayout,
    token_ids: Tensor,
    block_table: Tensor,
    num_computed_tokens: Tensor,
    rope_offset: Tensor,
    block_size: int,
    out: StepBuffers,
) -> None:
    """Derives a step's inputs and pads them to the bucket that `out` is for; one launch.

    Padding changes no slot. The bucket must hold the plan's rows and tokens.

    Args:
        plan: int32 `[words]`, on the device.
        layout: of the plan.
        token_ids: int32 `[S, L + 1]`.
        block_table: int32 `[G, S, C]`, after `apply_block_writes`.
        num_computed_tokens: int `[S]`; set to the rows' lengths, queries included.
        rope_offset: int `[S]`, added to positions.
        block_size: `B`.
        out: `C` is at least the longest row's.
    """
    rows, tokens = len(out.slots), len(out.input_ids)
    splits = min(_MAX_SPLITS, triton.cdiv(tokens, _TILE))
    groups = block_table.shape[0]
    _step_inputs_kernel[(rows + triton.cdiv(tokens, _TILE), splits)](
        plan, token_ids, block_table, num_computed_tokens, rope_offset,
        out.input_ids, out.positions, out.slot_mapping, out.query_start_loc, out.seq_lens, out.slots, out.flags,
        out.block_table, out.logits_indices, out.next_positions,
        layout.num_rows, layout.num_tokens, layout.slot, layout.query_start_loc, layout.num_computed_tokens, layout.flags,
        rows, tokens, token_ids.shape[0] - 1, block_size,
        token_ids.stride(0), block_table.stride(0), block_table.stride(1), out.slot_mapping.stride(0),
        out.block_table.stride(0), out.block_table.stride(1),
        layout.host_state, groups, _TILE, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _append_kernel(
    token_ids,
    slots,
    next_positions,
    tokens,
    flags,
    count,
    token_stride,
    sampled_stride,
    SAMPLE: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0) * N + tl.arange(0, N)
    inside = row < count
    due = inside & ((tl.load(flags + row, mask=inside, other=0) & SAMPLE) != 0)
    slot = tl.load(slots + row, mask=due, other=0).to(tl.int64)
    position = tl.load(next_positions + row, mask=due, other=0)
    token = tl.load(tokens + row * sampled_stride, mask=due, other=0).to(tl.int32)
    tl.store(token_ids + slot * token_stride + position, token, mask=due)


def append_tokens(
    token_ids: Tensor, slots: Tensor, next_positions: Tensor, tokens: Tensor, flags: Tensor, layout: PlanLayout
) -> None:
    """Puts the tokens of the rows that are sampled behind their sequences; other rows change nothing.

    Args:
        token_ids: int32 `[S, L + 1]`, modified.
        slots: int `[R]`.
        next_positions: int `[R]`.
        tokens: int `[R]`, or a column of a matrix.
        flags: int32 `[R]` row flags.
        layout: names the flag.
    """
    rows, tile = len(slots), 128
    _append_kernel[(triton.cdiv(rows, tile),)](
        token_ids, slots, next_positions, tokens, flags, rows, token_ids.stride(0), tokens.stride(0),
        layout.sample, tile, num_warps=4,
    )  # fmt: skip
