"""Sampling parameters of every slot, on the device; written when a request takes a slot, gathered by row when it is
sampled.

Lists of any length (bias, bans, allow-lists, bad words) are kept flat: index tensors over all slots that have some,
rebuilt only when a slot with lists comes or goes. `S` slots, `E` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.sampling.rng import Domain, slot_keys

GREEDY_TEMPERATURE: Final = 1e-5
"""A temperature below this is greedy."""
BAN_BIAS: Final = -100.0
"""A logit bias of this or less removes the token altogether."""

FLOATS: Final = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTS: Final = ("top_k", "min_tokens", "num_prompt_tokens")
_NEUTRAL: Final = np.array([0, 1, 0, 0, 0, 1], dtype=np.float32)

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


def uploaded(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class SlotEntry(Protocol):
    """A decoded `slot_init` entry of the plan (docs/engine.md lists its fields)."""

    bias_ids: Int32Array
    bias_values: Float32Array
    stop_ids: Int32Array
    bad_words: list[Int32Array]
    allowed_ids: Int32Array

    def integer(self, name: str) -> int:
        """A fixed word as an integer."""

    def number(self, name: str) -> float:
        """A fixed word as a float."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """Parameters of the rows that are sampled, each `[n]`."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    top_k: Tensor
    """int32; 0 keeps all."""
    min_tokens: Tensor
    prompt_len: Tensor


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Parameters of all slots, for kernels."""

    floats: Tensor
    """float32 `[S, .]`, columns `FLOATS`."""
    ints: Tensor
    """int32 `[S, .]`, columns `INTS`."""
    keys: Tensor
    """int32 `[S, domains, 4]`."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Flat lists of all slots, on the device. Each group is `None` if no slot has one."""

    bias: tuple[Tensor, Tensor, Tensor] | None
    """slot int64 `[E]`, token id int64 `[E]`, value float32 `[E]` (-inf: a ban)."""
    stops: tuple[Tensor, Tensor] | None
    """slot int64 `[E]`, token id int64 `[E]`: what `min_tokens` bans."""
    allowed: tuple[Tensor, Tensor] | None
    """slot int64 `[E]`, token id int64 `[E]`."""
    has_allowed: Tensor | None
    """bool `[S]`: slots with an allow-list."""
    bad_words: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """slot int64 `[E]`, last id int64 `[E]`, prefix int32 `[E, P]` right-aligned, prefix length int64 `[E]`."""


@dataclass(slots=True)
class _SlotLists:
    bias_ids: Int32Array
    bias_values: Float32Array
    stop_ids: Int32Array
    allowed_ids: Int32Array
    bad_words: list[Int32Array]

    def __bool__(self) -> bool:
        return bool(len(self.bias_ids) or len(self.stop_ids) or len(self.allowed_ids) or self.bad_words)


@dataclass(slots=True)
class _Staged:
    """Slots set since the last upload, with their rows on the host."""

    slots: list[int] = field(default_factory=list)
    floats: list[Float32Array] = field(default_factory=list)
    ints: list[Int32Array] = field(default_factory=list)
    keys: list[Int32Array] = field(default_factory=list)


class SlotParams:
    """The sampling parameters of `S` slots. Only the runner writes them.

    `set` and `clear` stage; the first use after them uploads everything staged in three copies, in the order of the
    stream.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.num_logprobs: Int32Array = np.full(max_num_seqs, -1, dtype=np.int32)
        """Host copy, per slot: likeliest tokens wanted beside the sampled one; -1 for no logprobs."""
        self.num_prompt_logprobs: Int32Array = np.full(max_num_seqs, -1, dtype=np.int32)
        """The same for prompt tokens."""
        self._floats = torch.from_numpy(np.tile(_NEUTRAL, (max_num_seqs, 1))).to(device)
        self._ints = torch.zeros(max_num_seqs, len(INTS), dtype=torch.int32, device=device)
        self._keys = torch.zeros(max_num_seqs, len(Domain), 4, dtype=torch.int32, device=device)
        self._lists: dict[int, _SlotLists] = {}
        self._flat: TokenLists | None = None
        self._staged = _Staged()

    def set(self, entry: SlotEntry) -> None:
        """Takes over the parameters of a request that got a slot."""
        slot = entry.integer("slot")
        seed = (entry.integer("seed_hi") & 0xFFFFFFFF) << 32 | (entry.integer("seed_lo") & 0xFFFFFFFF)
        self.num_logprobs[slot] = entry.integer("num_logprobs")
        self.num_prompt_logprobs[slot] = entry.integer("num_prompt_logprobs")
        staged = self._staged
        staged.slots.append(slot)
        staged.floats.append(np.array([entry.number(name) for name in FLOATS], dtype=np.float32))
        staged.ints.append(np.array([entry.integer(name) for name in INTS], dtype=np.int32))
        staged.keys.append(slot_keys(seed, entry.integer("choice")))
        # Copies: the entry is a view of a plan's buffer, which is written again.
        stop_ids = entry.stop_ids.copy() if entry.integer("min_tokens") > 0 else np.empty(0, dtype=np.int32)
        lists = _SlotLists(
            bias_ids=entry.bias_ids.copy(),
            bias_values=np.where(entry.bias_values <= BAN_BIAS, np.float32(-np.inf), entry.bias_values),
            stop_ids=stop_ids,
            allowed_ids=entry.allowed_ids.copy(),
            bad_words=[word.copy() for word in entry.bad_words],
        )
        self._put_lists(slot, lists if lists else None)

    def clear(self, slot: int) -> None:
        """Forgets a slot that was freed; its numbers stay until the slot is taken again, nobody reads them."""
        self.num_logprobs[slot] = -1
        self.num_prompt_logprobs[slot] = -1
        self._put_lists(slot, None)

    def rows(self, slots: Tensor) -> RowParams:
        """Parameters of the rows whose slots are given, int64 `[n]`."""
        self._upload()
        return RowParams(*self._floats[slots].unbind(1), *self._ints[slots].unbind(1))

    def tables(self) -> SlotTables:
        """Numbers and keys of all slots."""
        self._upload()
        return SlotTables(self._floats, self._ints, self._keys)

    def keys(self, slots: Tensor, domain: Domain) -> Tensor:
        """Slot keys of one domain, int32 `[n, 4]`, for `rng.row_keys`."""
        self._upload()
        return self._keys[slots, int(domain)]

    def token_lists(self) -> TokenLists:
        """The flat lists of all slots."""
        if self._flat is None:
            self._flat = self._flatten()
        return self._flat

    def _put_lists(self, slot: int, lists: _SlotLists | None) -> None:
        before = self._lists.pop(slot, None)
        if lists is not None:
            self._lists[slot] = lists
        if before is not None or lists is not None:
            self._flat = None

    def _upload(self) -> None:
        staged = self._staged
        if not staged.slots:
            return
        last = {slot: i for i, slot in enumerate(staged.slots)}  # a slot may have been set twice
        slots = uploaded(np.array(list(last), dtype=np.int64), self.device)
        for target, rows in ((self._floats, staged.floats), (self._ints, staged.ints), (self._keys, staged.keys)):
            target[slots] = uploaded(np.stack([rows[i] for i in last.values()]), self.device)
        self._staged = _Staged()

    def _flatten(self) -> TokenLists:
        lists = sorted(self._lists.items())
        bias = self._pairs([(slot, one.bias_ids) for slot, one in lists])
        stops = self._pairs([(slot, one.stop_ids) for slot, one in lists])
        allowed = self._pairs([(slot, one.allowed_ids) for slot, one in lists])
        values = np.concatenate([one.bias_values for _, one in lists]) if bias else None
        has_allowed = None
        if allowed:
            has_allowed = torch.zeros(len(self.num_logprobs), dtype=torch.bool, device=self.device)
            has_allowed[allowed[0]] = True
        return TokenLists(
            bias=(*bias, uploaded(values, self.device)) if bias and values is not None else None,
            stops=stops,
            allowed=allowed,
            has_allowed=has_allowed,
            bad_words=self._flat_bad_words([(slot, word) for slot, one in lists for word in one.bad_words]),
        )

    def _pairs(self, lists: Sequence[tuple[int, Int32Array]]) -> tuple[Tensor, Tensor] | None:
        filled = [(slot, ids) for slot, ids in lists if len(ids)]
        if not filled:
            return None
        slots = np.repeat([slot for slot, _ in filled], [len(ids) for _, ids in filled]).astype(np.int64)
        ids = np.concatenate([ids for _, ids in filled]).astype(np.int64)
        return uploaded(slots, self.device), uploaded(ids, self.device)

    def _flat_bad_words(self, words: Sequence[tuple[int, Int32Array]]) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        if not words:
            return None
        longest = max(len(word) for _, word in words) - 1
        prefix = np.zeros((len(words), longest), dtype=np.int32)
        for row, (_, word) in enumerate(words):
            if len(word) > 1:
                prefix[row, longest - len(word) + 1 :] = word[:-1]
        slots = np.array([slot for slot, _ in words], dtype=np.int64)
        last = np.array([word[-1] for _, word in words], dtype=np.int64)
        lengths = np.array([len(word) - 1 for _, word in words], dtype=np.int64)
        parts = [uploaded(part, self.device) for part in (slots, last, prefix, lengths)]
        return parts[0], parts[1], parts[2], parts[3]
