"""The kernels that share a row's draw among programs give what the torch sampler gives."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels import split_sampling
from octavo.kernels.race import distance_reaching, log_exponential, mix, row_key
from octavo.kernels.split_sampling import SlotTables, SplitSampler
from octavo.sampling import RowFlag, Sampler, rng
from octavo.sampling.split_device import SplitDeviceSampler
from octavo.sampling.state import GREEDY_TEMPERATURE

sys.path.append(str(Path(__file__).parents[1] / "unit" / "sampling"))
import naive
from naive import Row
from test_rng import chi_square_z

pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy, of NaN and infinity
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Small, so that a small vocabulary has several chunks; the compiled kernels are those of the default too.
CHUNK = 1024


def ours(rows, vocab_size, dtype=torch.float32, chunk=CHUNK, calls=1, **settings):
    """Tokens, counts and the sampler; the logits have columns and rows of padding behind."""
    logits, sample, params = naive.batch(rows, vocab_size)
    padded = torch.full((len(rows) + 1, vocab_size + 8), math.inf, dtype=dtype, device=DEVICE)
    padded[: len(rows), :vocab_size] = logits
    before = padded.clone()
    tables = params.tables()
    sampler = SplitSampler(vocab_size, len(rows) + 2, DEVICE, GREEDY_TEMPERATURE, chunk)
    out = torch.full((len(rows) + 1,), -7, dtype=torch.int64, device=DEVICE)
    num_sampled = torch.full((len(rows) + 1,), -7, dtype=torch.int32, device=DEVICE)
    on_device = [x.to(DEVICE) for x in (tables.floats, tables.ints, tables.keys[:, 0])]
    inputs = [x.to(DEVICE) for x in (sample.slots, sample.num_tokens, sample.token_ids)]
    for _ in range(calls):  # what one call leaves behind does not matter to the next
        sampler(padded, *inputs, SlotTables(*on_device), out[:-1], num_sampled[:-1], **settings)
    assert torch.equal(padded.nan_to_num(5), before.nan_to_num(5)), "the logits were modified"
    assert out[-1] == num_sampled[-1] == -7
    return out[:-1].tolist(), num_sampled[:-1].tolist(), sampler


def theirs(rows, vocab_size, dtype=torch.float32):
    logits, sample, params = naive.batch(rows, vocab_size)
    result = Sampler(vocab_size)(logits.to(dtype).float(), sample, params)
    return result.token_ids[:, 0].tolist(), result.num_sampled.tolist()


def check(rows, dtype=torch.float32):
    vocab_size = rows[0].logits.shape[1]
    wanted, valid = theirs(rows, vocab_size, dtype)
    found, num_sampled, sampler = ours(rows, vocab_size, dtype)
    assert num_sampled == valid
    assert found == [token if count > 0 else 0 for token, count in zip(wanted, valid, strict=True)]
    return sampler


FILTERS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 500},
    {"top_k": 5_000},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_p": 0.7, "min_p": 0.02},
    {"top_k": 30, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 400, "top_p": 0.05},
    {"temperature": 1e6, "top_p": 0.5},
    {"temperature": 1e-4, "top_p": 0.5, "min_p": 0.5},
]


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 3.0), (torch.bfloat16, 0.3)], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 2_500])
def test_every_filter_draws_the_tokens_of_the_torch_sampler(dtype, vocab_size, spread):
    draw = np.random.default_rng(vocab_size)
    check([Row(spread * draw.normal(size=vocab_size), seed=i, **one) for i, one in enumerate(FILTERS)], dtype)


def some_tokens(draw, vocab_size):
    tokens = draw.integers(0, vocab_size, draw.integers(2, 1_500)).tolist()
    return {"tokens": tokens, "prompt_len": int(draw.integers(1, len(tokens) + 1))}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "kind", [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.6}]
)
def test_penalties_are_those_of_the_torch_sampler_over_histories_of_several_tiles(seed, kind):
    draw, vocab_size = np.random.default_rng(seed), 1_100
    rows = [
        Row(
            # Few values, so that a penalty makes and breaks ties.
            logits=np.round(draw.normal(size=vocab_size) * 4) / 2,
            seed=seed,
            presence=float(draw.choice([0, 0.5, -1])),
            frequency=float(draw.choice([0, 0.5, 0.1])),
            repetition=float(draw.choice([1, 1.3, 0.5])),
            **some_tokens(draw, vocab_size),
            **kind,
        )
        for _ in range(3)
    ]
    check(rows)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_parameters_draw_the_tokens_of_the_torch_sampler(data):
    vocab_size = data.draw(st.integers(1, 2_000))
    draw = np.random.default_rng(data.draw(st.integers(0, 1_000)))
    rows = [
        Row(
            # Few distinct values: ties at every border.
            logits=draw.integers(-6, 7, vocab_size) / 2,
            seed=int(draw.integers(2**63)),
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
            top_k=data.draw(st.sampled_from([0, 1, 2, 50, 511, 5_000])),
            top_p=float(np.float32(data.draw(st.sampled_from([0.03, 0.2, 0.95, 1.0])))),
            min_p=float(np.float32(data.draw(st.sampled_from([0.0, 0.01, 0.3])))),
            presence=data.draw(st.sampled_from([0.0, 0.0, 0.5])),
            **some_tokens(draw, vocab_size),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    check(rows)


def test_ties_beyond_the_candidates_and_nuclei_beyond_the_records_take_the_slow_way(monkeypatch):
    monkeypatch.setattr(split_sampling, "_CANDIDATES", 64)
    monkeypatch.setattr(split_sampling, "_FEW", 32)
    logits = np.zeros((4, 1_500))
    logits[1, 700:900] = 1.0
    logits[2, 3] = 2.0
    rows = [
        Row(logits[0], top_k=5),
        Row(logits[1], top_k=100, top_p=0.5),
        Row(logits[2], top_k=70, top_p=0.3),
        Row(np.random.default_rng(0).normal(size=1_500), top_p=0.02),
    ]
    states = check(rows)._state[:4].tolist()
    assert states == [split_sampling._SLOW.value] * 4


def test_rows_without_a_token_fail_alone():
    logits = np.random.default_rng(0).normal(size=(5, 600))
    logits[0, 300] = np.nan
    logits[1] = -np.inf
    logits[2, 9] = np.inf
    logits[3, 10:] = -np.inf
    kinds = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 20}]
    rows = [Row(one, **kind) for one, kind in zip(logits, kinds, strict=True)]
    check(rows)
    assert ours(rows, 600)[1] == [-1, -1, -1, 1, 1]


def test_rows_that_are_not_sampled_get_nothing_and_disturb_nobody():
    draw = np.random.default_rng(2)
    rows = [Row(draw.normal(size=600), seed=i, top_p=0.9) for i in range(4)]
    wanted, _ = theirs(rows, 600)
    flags = torch.tensor([2, 1, 3, 0], dtype=torch.int32, device=DEVICE)
    found, num_sampled, _ = ours(rows, 600, chunk=256, calls=2, flags=flags, sample_flag=2)
    assert found == [wanted[0], 0, wanted[2], 0]
    assert num_sampled == [1, 0, 1, 0]


def test_a_step_that_is_known_to_be_greedy_is_done_by_the_first_launch():
    draw = np.random.default_rng(3)
    rows = [Row(np.round(draw.normal(size=900)), temperature=0.0, presence=0.5, tokens=[1, 2, 3]) for _ in range(5)]
    wanted, _ = theirs(rows, 900)
    assert ours(rows, 900, calls=2, all_greedy=True)[0] == wanted


def test_a_row_s_token_depends_on_nothing_else_in_the_step():
    draw = np.random.default_rng(4)
    rows = [Row(draw.normal(size=700), seed=i, **kind) for i, kind in enumerate(FILTERS)]
    together = ours(rows, 700, chunk=256)[0]
    assert [ours([row], 700, chunk=256)[0][0] for row in rows[::5]] == together[::5]


@pytest.mark.parametrize("kind", [{}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 8, "top_p": 0.9}], ids=str)
def test_draws_over_seeds_follow_the_processed_distribution(kind):
    base = Row(np.random.default_rng(3).normal(0, 1.5, 12), **kind)
    rows = [dataclasses.replace(base, seed=seed) for seed in range(120)]
    found = ours(rows, 12, chunk=256)[0]
    counts = np.bincount(found, minlength=12).astype(float)
    wanted = np.exp(naive.log_softmax(naive.processed(base))) * len(rows)
    assert counts[wanted == 0].sum() == 0
    assert abs(chi_square_z(counts[wanted > 0], wanted[wanted > 0])) < 4.5


def test_more_rows_than_there_is_memory_for_are_refused():
    rows = [Row(np.zeros(10)) for _ in range(3)]
    _, sample, params = naive.batch(rows, 10)
    sampler = SplitSampler(10, 2, torch.device("cpu"), GREEDY_TEMPERATURE)
    tables = params.tables()
    with pytest.raises(ValueError, match="rows: 3, at most 2"):
        sampler(torch.zeros(3, 10), sample.slots, sample.num_tokens, sample.token_ids, tables, None, None)


@triton.jit
def _bits_kernel(keys, positions, tokens, bits, exponentials, N: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(0)
    k0, k1, k2, k3 = row_key(keys + row * 4, tl.load(positions + row))
    word = mix(tl.load(tokens + i).to(tl.uint32), k0, k1, k2, k3)
    tl.store(bits + i, word.to(tl.int32, bitcast=True))
    tl.store(exponentials + i, tl.exp(log_exponential(word)))


def test_random_words_and_exponentials_are_those_of_the_vectors():
    rows = json.loads((Path(__file__).parents[1] / "vectors" / "rng.json").read_text())["rows"][::5]
    keys = np.stack([rng.slot_keys(int(seed), choice)[domain] for seed, choice, domain, *_ in rows])
    positions, tokens = (torch.tensor([row[i] for row in rows], dtype=torch.int32, device=DEVICE) for i in (3, 4))
    bits, found = torch.empty_like(tokens), torch.empty(len(rows), device=DEVICE)
    _bits_kernel[(len(rows),)](torch.from_numpy(keys).to(DEVICE), positions, tokens, bits, found, 1)
    assert bits.cpu().numpy().view(np.uint32).tolist() == [row[5] for row in rows]
    wanted = np.array([row[6] for row in rows])
    usual = wanted < 5
    np.testing.assert_allclose(found.cpu().numpy()[usual], wanted[usual], rtol=3e-5)


@triton.jit
def _reaching_kernel(distance, weight, targets, out, LAST: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    target = tl.load(targets + tl.program_id(0))
    reached = distance_reaching(tl.load(distance + i), tl.load(weight + i), target, LAST, BITS)
    tl.store(out + tl.program_id(0), reached)


@pytest.mark.parametrize(("last", "bits"), [(0, 0), (0, 4), (11, 0), (11, 4)])
def test_the_distance_that_reaches_a_weight_is_found_bit_by_bit(last, bits):
    draw = np.random.default_rng(last + bits)
    distance = np.sort(np.round(draw.exponential(3, 64), 1).astype(np.float32)).view(np.int32)
    distance[0], distance[-2:] = 0, (0x7F800000, 0x7FFFFFFF)
    weight = draw.integers(0, 1 << 40, 64)
    upto = {int(d): int(weight[distance <= d].sum()) for d in distance}
    targets = [1, *(total + more for total in list(upto.values())[::7] for more in (0, 1)), int(weight.sum()) + 1]
    out = torch.empty(len(targets), dtype=torch.int32, device=DEVICE)
    parts = [torch.from_numpy(np.asarray(x)).to(DEVICE) for x in (distance, weight, targets)]
    _reaching_kernel[(len(targets),)](*parts, out, last, bits, 64)
    ones = (1 << last) - 1
    wanted = [next((d for d, total in upto.items() if total >= target), 0x7FFFFFFF) | ones for target in targets]
    # Distances that differ only in the bits that are ones count as the same.
    found = out.tolist()
    assert [f >= w for f, w in zip(found, wanted, strict=True)] == [True] * len(targets)
    assert [(f | ones) == f for f in found] == [True] * len(targets)
    if last == 0:
        assert found == wanted


@pytest.mark.parametrize("flag", [RowFlag.BIAS, RowFlag.LOGPROBS, RowFlag.GRAMMAR, 0])
def test_only_what_the_kernels_know_goes_to_them(flag, monkeypatch):
    _, sample, params = naive.batch([Row(np.zeros(50), num_logprobs=1)], 50)
    sample.flags = np.full(1, int(flag), dtype=np.int32)
    sample.grammar_mask = torch.full((1, 2), -1, dtype=torch.int32)
    sampler = SplitDeviceSampler(50, max_rows=4, device=torch.device("cpu"))
    calls = []
    monkeypatch.setattr(SplitSampler, "__call__", lambda *_, **__: calls.append(1))
    sampler(torch.zeros(1, 50), sample, params)
    assert len(calls) == (flag == 0)
