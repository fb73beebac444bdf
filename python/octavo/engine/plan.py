"""Named views of the flat plan that the Rust core writes (`rust/core/src/plan.rs`; docs/engine.md has the table)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo._core import PLAN, EngineCore

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_HEADER: dict[str, int] = PLAN["header"]
_ENTRY: dict[str, int] = PLAN["slot_init"]
_FLAGS: dict[str, int] = PLAN["row_flags"]
HOST_STATE = _FLAGS["HOST_STATE"]
SAMPLE = _FLAGS["SAMPLE"]
PROMPT_LOGPROBS = _FLAGS["PROMPT_LOGPROBS"]
LOGPROBS = _FLAGS["LOGPROBS"]
PENALTIES = _FLAGS["PENALTIES"]
RANDOM = _FLAGS["RANDOM"]
FILTER = _FLAGS["FILTER"]
BIAS = _FLAGS["BIAS"]
POOL = _FLAGS["POOL"]
POOL_MEAN = _FLAGS["POOL_MEAN"]


class PromptLogprobs(NamedTuple):
    """Scores of consecutive prompt tokens of one row."""

    row: int
    start: int
    """Position of the first scored token."""
    ids: Int32Array
    """`[n, 1 + top]`: the prompt's own token, then the likeliest."""
    logprobs: Float32Array
    """`[n, 1 + top]`."""
    ranks: Int32Array
    """`[n]`: rank of the prompt's own token, from 1."""


class StepResult(NamedTuple):
    """What `commit` needs of a step; `R` rows, `k` drafts."""

    tokens: Int32Array
    """`[R, 1 + k]`."""
    num_sampled: Int32Array
    """`[R]`: 0 nothing was due, n tokens accepted, −1 this request failed."""
    next_drafts: Int32Array | None = None
    """`[R, k]`, −1 where there is none."""
    logprob_ids: Int32Array | None = None
    """`[R, 1 + k, 1 + top]`: the sampled token, then the likeliest."""
    logprobs: Float32Array | None = None
    logprob_ranks: Int32Array | None = None
    """`[R, 1 + k]`."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    pooled: list[tuple[int, Float32Array]] | None = None
    """Rows whose prompt became a vector, and the vector `[D]`."""


@dataclass(slots=True)
class SlotInit:
    """One `slot_init` entry: a request that takes a slot, with all that is known of it."""

    fields: Int32Array
    """The fixed words; `integer` and `number` read them by name."""
    bias_ids: Int32Array
    bias_values: Float32Array
    stop_ids: Int32Array
    bad_words: list[Int32Array]
    allowed_ids: Int32Array
    tokens: Int32Array
    tokens_offset: int
    """Word of the plan where `tokens` begin."""

    def integer(self, name: str) -> int:
        """A fixed word as an integer."""
        return int(self.fields[_ENTRY[name]])

    def number(self, name: str) -> float:
        """A fixed word as a float."""
        return float(self.fields[_ENTRY[name] : _ENTRY[name] + 1].view(np.float32)[0])

    @property
    def slot(self) -> int:
        """The slot taken."""
        return self.integer("slot")


class StepPlan:
    """A buffer of the core's size, and its parts by name; the views are valid until the buffer is scheduled into again.

    Args:
        core: says how large the buffer is.
        allocate: makes an int32 array of so many zeros, in memory that the device can read fast.
    """

    def __init__(self, core: EngineCore, allocate: Callable[[int], Int32Array] | None = None) -> None:
        offsets = core.plan_offsets()
        words = offsets["total_words"]
        self.buffer: Int32Array = np.zeros(words, dtype=np.int32) if allocate is None else allocate(words)
        self._offsets = offsets

    def header(self, name: str) -> int:
        """One word of the header."""
        return int(self.buffer[_HEADER[name]])

    @property
    def step_id(self) -> int:
        """Number of the step."""
        low, high = self.header("step_lo"), self.header("step_hi")
        return (high << 32) | (low & 0xFFFFFFFF)

    @property
    def mask_after_step(self) -> int:
        """The step after whose commit the masks can be made, 0: at once; −1: there are none."""
        low, high = self.header("mask_after_lo"), self.header("mask_after_hi")
        return (high << 32) | (low & 0xFFFFFFFF)

    @property
    def num_rows(self) -> int:
        """`R`."""
        return self.header("num_rows")

    @property
    def num_tokens(self) -> int:
        """`T`."""
        return self.header("num_tokens")

    @property
    def offsets(self) -> dict[str, int]:
        """First word of each fixed section by name, the same in every plan of a core."""
        return self._offsets

    @property
    def used(self) -> Int32Array:
        """What of the buffer this plan uses."""
        return self.buffer[: self.header("used_words")]

    def rows(self, name: str) -> Int32Array:
        """A per-row part: `slot`, `num_computed_tokens`, `num_draft_tokens` or `flags`, `[R]`."""
        start = self._offsets[name]
        return self.buffer[start : start + self.num_rows]

    @property
    def query_start_loc(self) -> Int32Array:
        """`[R + 1]`."""
        start = self._offsets["query_start_loc"]
        return self.buffer[start : start + self.num_rows + 1]

    @property
    def block_writes(self) -> Int32Array:
        """`[n, 4]`: group, slot, column, block id."""
        start, count = self.header("block_writes_offset"), self.header("num_block_writes")
        return self.buffer[start : start + 4 * count].reshape(count, 4)

    @property
    def freed_slots(self) -> Int32Array:
        """Slots that nobody holds any more."""
        start, count = self.header("freed_slots_offset"), self.header("num_freed_slots")
        return self.buffer[start : start + count]

    def slot_inits(self) -> Iterator[SlotInit]:
        """The requests that take a slot in this step."""
        at = self.header("slot_inits_offset")
        for _ in range(self.header("num_slot_inits")):
            words = int(self.buffer[at])
            yield _parse_slot_init(self.buffer[at : at + words], at)
            at += words


def _parse_slot_init(words: Int32Array, offset: int) -> SlotInit:
    fixed = words[: len(_ENTRY)]
    at = len(_ENTRY)

    def take(count: int) -> Int32Array:
        nonlocal at
        part = words[at : at + count]
        at += count
        return part

    n = {name: int(fixed[_ENTRY[name]]) for name in ("n_bias", "n_stop", "n_bad_words", "n_allowed", "num_tokens")}
    bias = take(2 * n["n_bias"])
    stop = take(n["n_stop"])
    bad_words = [take(int(take(1)[0])) for _ in range(n["n_bad_words"])]
    allowed = take(n["n_allowed"])
    first = offset + at
    tokens = take(n["num_tokens"])
    return SlotInit(fixed, bias[0::2], bias[1::2].view(np.float32), stop, bad_words, allowed, tokens, first)
