"""The NumPy forms of a CPU give what the forms for accelerators give."""

import numpy as np
import pytest
import torch

from octavo.sampling import filter as filters
from octavo.sampling import host, logprobs, rng


def scaled_rows(count, vocab_size, spread, seed):
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return logits - logits.amax(dim=-1, keepdim=True)


def some_keys(count, seed):
    return rng.row_keys(torch.from_numpy(rng.slot_keys(seed, 0)[[0]]).expand(count, 4), torch.arange(count))


def test_row_keys_are_the_same():
    slots = torch.from_numpy(np.stack([rng.slot_keys(seed, 1)[2] for seed in range(50)]))
    positions = torch.randint(0, 2**30, (50,))
    assert torch.equal(host.row_keys(slots, positions), rng.row_keys(slots, positions))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 100, 49_152, 100_003])
def test_a_race_of_all_tokens_has_the_same_winners(vocab_size, spread):
    count = 4 if vocab_size > 1_000 else 300
    logits, keys = scaled_rows(count, vocab_size, spread, vocab_size), some_keys(count, 7)
    wanted = rng.race(logits, keys, torch.arange(vocab_size, dtype=torch.int32)).argmax(dim=-1)
    assert torch.equal(host.race(logits, keys, None), wanted)


@pytest.mark.parametrize("threshold", [0.0, -0.5, -5.0, -torch.inf])
def test_a_race_of_some_tokens_has_the_same_winners(threshold):
    logits, keys = scaled_rows(200, 500, 2.0, 3), some_keys(200, 8)
    limits = torch.full((200,), threshold)
    entered = logits.masked_fill(logits < threshold, -torch.inf)
    wanted = rng.race(entered, keys, torch.arange(500, dtype=torch.int32)).argmax(dim=-1)
    assert torch.equal(host.race(logits, keys, limits), wanted)


def test_a_race_with_masked_tokens_never_lets_them_win():
    logits = scaled_rows(2_000, 64, 1.0, 5)
    logits[:, 1::2] = -torch.inf
    logits -= logits.amax(dim=-1, keepdim=True)
    assert (host.race(logits, some_keys(2_000, 9), None) % 2 == 0).all()


@pytest.mark.parametrize("count", [1, 5, 64])
def test_the_likeliest_are_the_same_with_ties_and_infinities(count):
    values = scaled_rows(50, 64, 2.0, 4).round()
    values[::3, 5:40] = -torch.inf
    values[7] = 0.0
    values[8, 3] = -0.0
    assert torch.equal(host.likeliest(values, count), logprobs.sorted_ids(values, count))


def test_rows_of_nan_disturb_no_other_row():
    values = scaled_rows(3, 100, 1.0, 6)
    broken = values.clone()
    broken[1, 50:] = torch.nan
    limits = torch.full((3,), -1.0)
    for threshold in (None, limits):
        fine, other = (host.race(rows, some_keys(3, 1), threshold)[[0, 2]] for rows in (values, broken))
        assert torch.equal(fine, other)
    assert torch.equal(host.likeliest(values, 5)[[0, 2]], host.likeliest(broken, 5)[[0, 2]])


@pytest.mark.parametrize("seed", range(10))
def test_thresholds_from_leading_values_equal_those_of_whole_rows(seed, monkeypatch):
    draw = np.random.default_rng(seed)
    logits = scaled_rows(60, 700, float(draw.choice([0.1, 1, 4])), seed)
    if seed % 2:
        logits = logits.round(decimals=1)
    top_k = torch.from_numpy(draw.choice([0, 1, 7, 50, 300, 700, 9_999], 60).astype(np.int32))
    top_p = torch.from_numpy(draw.choice([1e-6, 0.2, 0.8, 0.99, 1.0], 60).astype(np.float32))
    min_p = torch.from_numpy(draw.choice([0, 0.01, 0.5, 1.0], 60).astype(np.float32))
    monkeypatch.setattr(filters, "_HEADS", ())
    whole = filters.keep_thresholds(logits, top_k, top_p, min_p)
    monkeypatch.setattr(filters, "_HEADS", (8, 64))
    assert torch.equal(filters.keep_thresholds(logits, top_k, top_p, min_p), whole)
