"""The list of prefill tiles against a plain loop."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.prefill_plan import prefill_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = {
    "one_token": [(0, 1)],
    "whole_tiles": [(0, 256), (0, 128)],
    "uneven": [(0, 1), (0, 63), (0, 200), (0, 129)],
    "prefixes": [(5, 17), (1000, 300), (130, 128), (64, 1)],
    "empty_rows": [(0, 40), (16, 0), (0, 0), (7, 90), (0, 0)],
    "only_empty": [(0, 0), (9, 0)],
    "many": [(37 * i % 211, 53 * i % 97) for i in range(45)],
}


def tiles(rows: list[tuple[int, int]], before: int, tile: int, least: int) -> list[list[int]]:
    """Row, first token, queries and first position, by keys; equal ones as they come."""
    found, token = [], before
    for row, (old, new) in enumerate(rows):
        if new >= least:
            found += [[row, token + i, min(tile, new - i), old + i] for i in range(0, new, tile)]
        token += new
    return sorted(found, key=lambda entry: -(entry[2] + entry[3]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("tile", "least"), [(128, 1), (64, 17), (192, 2)])
def test_it_lists_the_tiles_of_long_enough_rows_by_their_keys(rows, tile, least):
    before, spare = 3, 70
    lengths = torch.tensor([old + new for old, new in rows], device=DEVICE, dtype=torch.int32)
    starts = torch.tensor([before, *[new for _, new in rows]], device=DEVICE, dtype=torch.int32).cumsum(0).int()
    tokens = sum(new for _, new in rows)
    plan = prefill_plan(starts, lengths, tokens + spare, tile=tile, min_query_len=least)
    expected = tiles(rows, before, tile, least)
    count = int(plan.entries[0, 0])
    assert count == len(expected)
    assert plan.entries[1 : 1 + count].tolist() == expected
