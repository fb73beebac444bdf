"""The sampling kernel draws what the torch sampler draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import sampling
from octavo.sampling import device as device_sampling
from octavo.sampling.device import DeviceSampler
from octavo.sampling.sampler import RowFlag, Sampler, SampleRows
from octavo.sampling.state import SlotParams

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Entry:
    """A `slot_init` entry with the given numbers."""

    bias_ids = stop_ids = allowed_ids = np.empty(0, dtype=np.int32)
    bias_values = np.empty(0, dtype=np.float32)
    bad_words = ()

    def __init__(self, slot, **values):
        self.values = {
            "slot": slot, "seed_lo": slot * 7 + 1, "seed_hi": 5, "choice": 0, "num_logprobs": -1, "num_prompt_logprobs": -1,
            "top_k": 0, "min_tokens": 0, "num_prompt_tokens": 1, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
            "presence": 0.0, "frequency": 0.0, "repetition": 1.0,
        } | values  # fmt: skip

    def integer(self, name):
        return int(self.values[name])

    def number(self, name):
        return float(self.values[name])


def rows_of(parameters, vocab_size, first_position=11):
    """Sampling rows in slots `1..`, slot 0 being another's."""
    params = SlotParams(len(parameters) + 2, vocab_size, DEVICE)
    for i, values in enumerate(parameters):
        params.set(Entry(i + 1, **values))
    slots = torch.arange(1, len(parameters) + 1, device=DEVICE)
    return params, SampleRows(
        slots=slots,
        host_slots=slots.cpu().numpy().astype(np.int32),
        flags=np.full(len(parameters), int(RowFlag.RANDOM | RowFlag.FILTER), dtype=np.int32),
        num_tokens=slots * 3 + first_position,
        max_num_tokens=64,
        token_ids=torch.zeros(len(parameters) + 2, 128, dtype=torch.int32, device=DEVICE),
    )


def both(logits, parameters, vocab_size=None, first_position=11):
    """Tokens and counts of the torch sampler and of the kernel."""
    vocab_size = vocab_size or logits.shape[1]
    results = []
    for sampler in (Sampler(vocab_size), DeviceSampler(vocab_size)):
        params, rows = rows_of(parameters, vocab_size, first_position)
        found = sampler(logits.clone(), rows, params)
        results.append((found.token_ids.flatten().tolist(), found.num_sampled.tolist()))
    return results


FILTERS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 0.7, "min_p": 0.02},
    {"top_k": 30, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 400, "top_p": 0.05},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 700, 9001])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_every_filter_draws_the_tokens_of_the_torch_sampler(dtype, vocab_size, spread):
    torch.manual_seed(vocab_size)
    logits = (spread * torch.randn(len(FILTERS), vocab_size + 5, device=DEVICE)).to(dtype)
    theirs, ours = both(logits, FILTERS, vocab_size)
    assert ours == theirs


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_parameters_draw_the_tokens_of_the_torch_sampler(data):
    vocab_size = data.draw(st.integers(1, 3000))
    parameters = data.draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
                    "top_k": st.sampled_from([0, 1, 2, 50, 511, 5000]),
                    "top_p": st.sampled_from([0.2, 0.95, 1.0]),
                    "min_p": st.sampled_from([0.0, 0.01, 0.3]),
                }
            ),
            min_size=1,
            max_size=3,
        )
    )
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    # Few distinct values: ties at every border.
    logits = torch.randint(-6, 7, (len(parameters), vocab_size), device=DEVICE).float() / 2
    theirs, ours = both(logits, parameters)
    assert ours == theirs


def test_more_ties_than_there_is_room_for_stay_together(monkeypatch):
    monkeypatch.setattr(sampling, "_CANDIDATES", 64)
    sampling._room.cache_clear()
    logits = torch.zeros(4, 1500, device=DEVICE)
    logits[1, 700:900] = 1.0
    logits[2, 3] = 2.0
    parameters = [{"top_k": 5}, {"top_k": 100, "top_p": 0.5}, {"top_k": 70, "top_p": 0.3}, {"top_k": 5, "min_p": 0.5}]
    theirs, ours = both(logits, parameters)
    sampling._room.cache_clear()
    assert ours == theirs


def test_rows_without_a_token_fail_alone():
    logits = torch.randn(5, 300, device=DEVICE)
    logits[0, 7] = float("nan")
    logits[1] = float("-inf")
    logits[2, 9] = float("inf")
    logits[3, 10:] = float("-inf")
    parameters = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}, {}]
    (_, expected), (tokens, found) = both(logits, parameters)
    assert found == expected == [-1, -1, -1, 1, 1]
    assert tokens[3] < 10


@pytest.mark.parametrize("flag", [RowFlag.BIAS, RowFlag.LOGPROBS, RowFlag.PENALTIES, RowFlag.GRAMMAR])
def test_what_the_kernel_does_not_know_goes_to_torch(flag, monkeypatch):
    monkeypatch.setattr(device_sampling.sampling, "sample", None)
    params, rows = rows_of([{"num_logprobs": 1}], 50)
    rows.flags = np.full(1, int(flag), dtype=np.int32)
    rows.grammar_mask = torch.full((1, 2), -1, dtype=torch.int32, device=DEVICE)
    assert DeviceSampler(50)(torch.randn(1, 50, device=DEVICE), rows, params).num_sampled.tolist() == [1]
    params, rows = rows_of([{"top_k": sampling.MAX_TOP_K + 1}], 5000)
    assert DeviceSampler(5000)(torch.randn(1, 5000, device=DEVICE), rows, params).num_sampled.tolist() == [1]
