"""The kernels that make a step's inputs, against plain loops over the plan's rows, tokens and block writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo._core import PLAN
from octavo.kernels.step import PlanLayout, StepBuffers, append_tokens, apply_block_writes, step_inputs

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLAGS, HEADER = PLAN["row_flags"], PLAN["header"]
SLOTS, LENGTH, BLOCK, RAGGED = 9, 100, 8, 64
OFFSETS = {"slot": 32, "query_start_loc": 40, "num_computed_tokens": 52, "num_draft_tokens": 60, "flags": 68}
OFFSETS |= {"ragged": 80, "total_words": 80 + 4 * RAGGED}
LAYOUT = PlanLayout.of(HEADER, OFFSETS, FLAGS)
UNTOUCHED = -7


@dataclass
class Row:
    """A row of a plan."""

    slot: int
    computed: int
    query: int
    flags: int


def make_plan(rows: list[Row], writes: list[tuple[int, int, int, int]] = ()) -> torch.Tensor:
    """A plan on the device, its padding as the control plane writes it."""
    words = np.zeros(OFFSETS["total_words"], dtype=np.int32)
    starts = np.cumsum([0, *[row.query for row in rows]])
    words[OFFSETS["query_start_loc"] :][: SLOTS + 1] = starts[-1]
    words[OFFSETS["query_start_loc"] :][: len(starts)] = starts
    for i, row in enumerate(rows):
        words[OFFSETS["slot"] + i] = row.slot
        words[OFFSETS["num_computed_tokens"] + i] = row.computed
        words[OFFSETS["flags"] + i] = row.flags
    words[OFFSETS["ragged"] :][: 4 * len(writes)] = np.array(writes, dtype=np.int32).reshape(-1)
    header = {"num_rows": len(rows), "num_tokens": starts[-1]}
    header |= {"num_block_writes": len(writes), "block_writes_offset": OFFSETS["ragged"]}
    for name, value in header.items():
        words[HEADER[name]] = value
    return torch.from_numpy(words).to(DEVICE)


class State:
    """Slots full of tokens and block ids; the last one is scratch."""

    def __init__(self, seed: int, groups: int, slots: int = SLOTS, length: int = LENGTH):
        draw = np.random.default_rng(seed)
        self.token_ids = draw.integers(0, 1000, (slots, length + 1)).astype(np.int32)
        self.block_table = draw.integers(1, 500, (groups, slots, -(-length // BLOCK))).astype(np.int32)
        self.num_computed_tokens = draw.integers(0, 40, slots)
        self.rope_offset = draw.choice([0, 200], slots).astype(np.int32)

    def on_device(self) -> list[torch.Tensor]:
        parts = self.token_ids, self.block_table, self.num_computed_tokens, self.rope_offset
        return [torch.from_numpy(part.copy()).to(DEVICE) for part in parts]


def expected_inputs(rows: list[Row], state: State, padded_rows: int, padded_tokens: int) -> dict[str, np.ndarray]:
    """What docs/engine.md says of a step, in loops; `UNTOUCHED` where nothing is said."""
    groups, slots, columns = state.block_table.shape
    table = np.full((groups, padded_rows, columns), UNTOUCHED)
    wanted = {name: [] for name in ("input_ids", "positions", "seq_lens", "slots", "flags", "next_positions")}
    places, starts, computed_of_slot = [], [0], state.num_computed_tokens.copy()
    for r, row in enumerate(rows):
        computed = row.computed if row.flags & FLAGS["HOST_STATE"] else int(state.num_computed_tokens[row.slot])
        length = computed + row.query
        computed_of_slot[row.slot] = length
        for position in range(computed, length):
            wanted["input_ids"].append(state.token_ids[row.slot, position])
            wanted["positions"].append(position + state.rope_offset[row.slot])
            places.append(state.block_table[:, row.slot, position // BLOCK] * BLOCK + position % BLOCK)
        for column in range(-(-length // BLOCK)):
            table[:, r, column] = state.block_table[:, row.slot, column]
        starts.append(starts[-1] + row.query)
        for name, value in (
            ("seq_lens", length),
            ("slots", row.slot),
            ("flags", row.flags),
            ("next_positions", length),
        ):
            wanted[name].append(value)
    tokens = starts[-1]
    for name, padding in (("seq_lens", 0), ("slots", slots - 1), ("flags", 0), ("next_positions", 0)):
        wanted[name] += [padding] * (padded_rows - len(rows))
    for name in ("input_ids", "positions"):
        wanted[name] += [0] * (padded_tokens - tokens)
    arrays = {name: np.array(values, dtype=np.int64) for name, values in wanted.items()}
    arrays["slot_mapping"] = np.array(places).reshape(tokens, groups).T
    arrays["query_start_loc"] = np.array(starts + [tokens] * (padded_rows - len(rows)))
    return arrays | {"block_table": table, "num_computed_tokens": computed_of_slot}


def check(rows: list[Row], state: State, padded_rows: int, padded_tokens: int) -> None:
    """The kernel's outputs equal the loops', in buffers larger than the bucket of which nothing else is written."""
    groups, _, columns = state.block_table.shape
    largest = StepBuffers.allocate(padded_rows + 2, padded_tokens + 9, groups, columns, DEVICE)
    for name in StepBuffers.__slots__:
        getattr(largest, name).fill_(UNTOUCHED)
    out = largest.bucket(padded_rows, padded_tokens)
    parts = state.on_device()
    step_inputs(make_plan(rows), LAYOUT, *parts, BLOCK, out)
    wanted = expected_inputs(rows, state, padded_rows, padded_tokens)
    tokens = sum(row.query for row in rows)
    found = {name: getattr(out, name).cpu().numpy() for name in StepBuffers.__slots__}
    found["num_computed_tokens"] = parts[2].cpu().numpy()
    indices, mapping = found.pop("logits_indices"), found.pop("slot_mapping")
    np.testing.assert_array_equal(mapping[:, :tokens], wanted.pop("slot_mapping"))
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert ((mapping[:, tokens:] >= 0) & (mapping[:, tokens:] < BLOCK)).all(), "padding is not in the null block"
    assert ((indices >= 0) & (indices < max(1, padded_tokens))).all()
    for i, row in enumerate(rows):
        assert row.query == 0 or indices[i] == wanted["query_start_loc"][i + 1] - 1
    for name in ("input_ids", "positions", "seq_lens", "slots", "flags", "logits_indices", "next_positions"):
        behind = getattr(largest, name)[len(getattr(out, name)) :]
        assert (behind == UNTOUCHED).all(), f"{name} behind the bucket was written"


@st.composite
def steps(draw):
    slots = draw(st.permutations(range(SLOTS - 1)))[: draw(st.integers(0, SLOTS - 1))]
    flags = st.integers(0, 2 * FLAGS["BIAS"] - 1)
    rows = [Row(slot, draw(st.integers(0, 60)), draw(st.integers(0, 30)), draw(flags)) for slot in slots]
    return rows, draw(st.integers(0, 3)), draw(st.integers(0, 5)), draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("groups", [1, 2])
@settings(max_examples=25, deadline=None)
@given(step=steps())
def test_the_inputs_of_a_step_are_those_of_its_plan_and_slots_padded_to_the_bucket(groups, step):
    rows, more_rows, more_tokens, seed = step
    padded_rows = min(SLOTS - 1, len(rows) + more_rows)
    check(rows, State(seed, groups), max(1, padded_rows), max(1, sum(row.query for row in rows) + more_tokens))


@pytest.mark.parametrize("flags", [FLAGS["HOST_STATE"], 0])
def test_a_row_of_many_tiles_is_shared_without_a_race_for_its_length(flags):
    check([Row(1, 17, 4_500, flags), Row(0, 3, 20, FLAGS["HOST_STATE"])], State(0, 1, 3, 5_000), 4, 6_000)


@settings(max_examples=25, deadline=None)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, SLOTS - 1), st.integers(0, 1), st.integers(1, 10**6)),
        max_size=RAGGED,
    )
)
def test_of_two_writes_to_a_column_the_later_one_counts(writes):
    table = torch.zeros(2, SLOTS, 5, dtype=torch.int32, device=DEVICE)
    apply_block_writes(make_plan([], writes), LAYOUT, table)
    expected = np.zeros(table.shape, dtype=np.int32)
    for group, slot, column, block in writes:
        expected[group, slot, column] = block
    assert (table.cpu().numpy() == expected).all()


def test_more_block_writes_than_fit_one_tile_keep_their_order():
    count = 200
    words = np.zeros(20 + 4 * count, dtype=np.int32)
    words[HEADER["num_block_writes"]], words[HEADER["block_writes_offset"]] = count, 20
    writes = np.stack([np.zeros(count), np.arange(count) % 3, np.arange(count) % 7, np.arange(count) + 1], axis=1)
    words[20:] = writes.reshape(-1)
    table = torch.zeros(1, 3, 7, dtype=torch.int32, device=DEVICE)
    apply_block_writes(torch.from_numpy(words).to(DEVICE), LAYOUT, table)
    expected = np.zeros((1, 3, 7))
    for group, slot, column, block in writes.astype(int):
        expected[group, slot, column] = block
    assert (table.cpu().numpy() == expected).all()


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_sampled_tokens_go_behind_their_sequences_and_no_other_row_writes(rows):
    draw = np.random.default_rng(rows)
    token_ids = torch.zeros(rows + 1, 50, dtype=torch.int32, device=DEVICE)
    slots, positions = draw.permutation(rows), draw.integers(0, 50, rows)
    tokens, flags = draw.integers(1, 1000, (rows, 2)), draw.integers(0, 8, rows)
    expected = np.zeros(token_ids.shape)
    due = (flags & FLAGS["SAMPLE"]) != 0
    expected[slots[due], positions[due]] = tokens[due, 1]
    int32 = [torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (slots, positions, flags)]
    append_tokens(token_ids, int32[0], int32[1], torch.from_numpy(tokens).to(DEVICE)[:, 1], int32[2], LAYOUT)
    assert (token_ids.cpu().numpy() == expected).all()
