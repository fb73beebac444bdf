"""The rows of one sampling call, flattened: one entry for each position that gets logits.

A request without drafts has one position; with `k` drafts it has `1 + k`, and position `j` sees the drafts before `j`
as if they were known. `n` requests, `N = n * (1 + k)` positions, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.sampling.state import RowParams, SlotParams, uploaded


class RowFlag(IntFlag):
    """Row flags of the plan that concern sampling (docs/engine.md)."""

    GRAMMAR = 4
    LOGPROBS = 16
    PENALTIES = 32
    RANDOM = 64
    FILTER = 128
    BIAS = 256


@dataclass(slots=True)
class SampleRows:
    """What the runner knows of the `n` rows of a step that are sampled."""

    slots: Tensor
    """int `[n]` on the device, all different."""
    host_slots: npt.NDArray[np.int32]
    """The same on the host, from the plan."""
    flags: npt.NDArray[np.int32]
    """Row flags `[n]` on the host, from the plan."""
    num_tokens: Tensor
    """int `[n]`: known tokens, which is the position of the token to be drawn."""
    max_num_tokens: int
    """A bound of `num_tokens` on the host."""
    token_ids: Tensor
    """int32 `[S, >= max_num_tokens]`: the known tokens of every slot."""
    draft_tokens: Tensor | None = None
    """int32 `[n, k]`: tokens to be verified, -1 where there is none; `None`: no row has a draft."""
    grammar_mask: Tensor | None = None
    """int32 `[n * (1 + k), ceil(V / 32)]`: bit `i % 32` of word `i // 32` allows token `i`."""


# Every position, without an index tensor.
ALL: Final = slice(None)
Pick = Tensor | slice | None


class Positions:
    """`SampleRows` with every request repeated for its `1 + k` positions, and the parameters of each."""

    def __init__(self, rows: SampleRows, params: SlotParams) -> None:
        self.rows = rows
        self.width = 1 if rows.draft_tokens is None else 1 + rows.draft_tokens.shape[1]
        self.slots = self._repeat(rows.slots.long())
        self.num_tokens = self._repeat(rows.num_tokens.long())
        self.flags = np.repeat(rows.flags, self.width)
        self._slot_params = params
        self.drafts = None if rows.draft_tokens is None else rows.draft_tokens.repeat_interleave(self.width, dim=0)
        """int32 `[N, k]`: all drafts of each position's request."""

    @cached_property
    def params(self) -> RowParams:
        """The parameters of each position."""
        return self._slot_params.rows(self.slots)

    @cached_property
    def index(self) -> Tensor:
        """int64 `[N]`: which of its request's positions each is."""
        return torch.arange(self.width, device=self.slots.device).repeat(len(self.rows.slots))

    @cached_property
    def positions(self) -> Tensor:
        """int64 `[N]`: where in its sequence each token to be drawn goes."""
        return self.num_tokens if self.width == 1 else self.num_tokens + self.index

    def _repeat(self, values: Tensor) -> Tensor:
        return values if self.width == 1 else values.repeat_interleave(self.width, dim=0)

    def pick(self, flag: int, without: int = 0) -> Pick:
        """Positions that have `flag` and not `without`: `None` for none, `ALL`, or an index tensor.

        Decided on the host, so a device never waits for it.
        """
        chosen = (self.flags & (flag | without)) == flag
        if not chosen.any():
            return None
        if chosen.all():
            return ALL
        return uploaded(chosen.nonzero()[0], self.slots.device)

    def of_slots(self, slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """Where the positions of some slots are.

        Args:
            slots: int64 `[E]`, any slots, also such that are not sampled now.
            num_slots: `S`.

        Returns:
            positions int64 `[E, 1 + k]`, and bool `[E, 1]`: whether the slot is sampled now (if not, its positions read
            0...).
        """
        first = torch.full((num_slots,), -1, dtype=torch.int64, device=slots.device)
        first[self.rows.slots.long()] = torch.arange(len(self.rows.slots), device=slots.device) * self.width
        found = first[slots][:, None]
        offsets = torch.arange(self.width, device=slots.device)
        return found.clamp(min=0) + offsets, found >= 0

    def history(self, chosen: Pick) -> tuple[Tensor, Tensor, Tensor]:
        """Prompt, outputs and earlier drafts of some positions.

        Returns:
            token ids int64 `[m, H]`, with the first prompt token where there is none; bool `[m, H]`: what is there at
            all; bool `[m, H]`: what of it are outputs or drafts.
        """
        device = self.slots.device
        slots, known = self.slots[chosen], self.num_tokens[chosen]
        tokens = self.rows.token_ids[slots, : self.rows.max_num_tokens].long()
        at = torch.arange(tokens.shape[1], device=device)
        there = at < known[:, None]
        output = there & (at >= self.params.prompt_len[chosen][:, None])
        if self.drafts is not None:
            drafts = self.drafts[chosen].long()
            earlier = torch.arange(drafts.shape[1], device=device) < self.index[chosen][:, None]
            earlier &= drafts >= 0
            tokens = torch.cat([tokens, drafts], dim=1)
            there = torch.cat([there, earlier], dim=1)
            output = torch.cat([output, earlier], dim=1)
        return torch.where(there, tokens, tokens[:, :1]), there, output

    def tokens_at(self, which: Tensor, at: Tensor) -> Tensor:
        """Single tokens of the sequences.

        Args:
            which: int64 `[...]`, a position of this call.
            at: int64 `[...]`, an index in its sequence, before the position itself; clamped at 0.

        Returns:
            int32 `[...]`: the known token, or the draft, at that index.
        """
        known = self.num_tokens[which]
        tokens = self.rows.token_ids[self.slots[which], torch.minimum(at, known - 1).clamp(min=0)]
        if self.drafts is None:
            return tokens
        draft = self.drafts[which, (at - known).clamp(0, self.drafts.shape[1] - 1)]
        return torch.where(at < known, tokens, draft)
