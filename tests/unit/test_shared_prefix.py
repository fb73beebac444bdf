"""Which steps seem to have rows that begin with the same blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.worker.shared_prefix import LEAST_ROWS, SharedPrefix


class Plan:
    """What a plan says of slots."""

    def __init__(
        self, slots: list[int], writes: list[tuple[int, int, int, int]] | None = None, freed: list[int] | None = None
    ) -> None:
        self.num_rows = len(slots)
        self.block_writes = np.array(writes or [], dtype=np.int32).reshape(-1, 4)
        self.freed_slots = np.array(freed or [], dtype=np.int32)
        self._slots = np.array(slots, dtype=np.int32)

    def rows(self, name: str) -> Any:
        assert name == "slot"
        return self._slots


SLOTS = list(range(LEAST_ROWS))
# Columns 0 to 3 of 16 tokens each; the last is the one that tells of 64.
COMMON = [(0, slot, column, 10 + column) for slot in SLOTS for column in range(4)]


def shared() -> SharedPrefix:
    return SharedPrefix(8, 16, least_tokens=64)


def test_rows_with_the_same_block_in_the_column_share() -> None:
    prefix = shared()
    assert prefix.update(Plan(SLOTS, COMMON)).has(Plan(SLOTS))
    assert prefix.update(Plan(SLOTS, [(0, 0, 4, 99)])).has(Plan(SLOTS)), "ends may differ"


def test_one_other_row_or_one_that_is_too_short_ends_it() -> None:
    prefix = shared().update(Plan(SLOTS, COMMON))
    assert not prefix.has(Plan([*SLOTS, 7])), "nothing is known of slot 7"
    assert not prefix.update(Plan([], [(0, 7, 3, 50)])).has(Plan([*SLOTS, 7]))
    assert prefix.update(Plan([], [(0, 7, 3, 13)])).has(Plan([*SLOTS, 7]))


def test_few_rows_are_not_worth_it() -> None:
    assert not shared().update(Plan(SLOTS, COMMON)).has(Plan(SLOTS[:-1]))


def test_blocks_of_other_groups_say_nothing() -> None:
    others = [(1, slot, 3, 13) for slot in SLOTS]
    assert not shared().update(Plan(SLOTS, others)).has(Plan(SLOTS))


def test_a_slot_that_is_freed_and_taken_again_is_forgotten() -> None:
    prefix = shared().update(Plan(SLOTS, COMMON))
    assert not prefix.update(Plan(SLOTS, freed=[2])).has(Plan(SLOTS))
    again = [(0, 2, column, 10 + column) for column in range(4)]
    assert prefix.update(Plan(SLOTS, again, freed=[2])).has(Plan(SLOTS)), "freed first, then taken"
