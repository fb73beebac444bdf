"""The sampling kernels give what the torch sampler gives."""

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

from octavo.kernels import sampling, sampling_scan
from octavo.kernels.race import distance_reaching, log_exponential, mix, row_key
from octavo.kernels.sampling import Rows, SamplingKernels, SlotTables
from octavo.sampling import Sampler, rng
from octavo.sampling.device import DeviceSampler
from octavo.sampling.state import GREEDY_TEMPERATURE, SlotParams

sys.path.append(str(Path(__file__).parents[1] / "unit" / "sampling"))
import naive
from naive import Row
from test_rng import chi_square_z

pytestmark = [
    *([pytest.mark.gpu] if torch.cuda.is_available() else []),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy, of NaN and infinity
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Small, so that a small vocabulary has several tiles; the compiled kernels are those of the default too.
TILE = 1024


def ours(rows, vocab_size, dtype=torch.float32, tile=TILE, calls=1):
    """Tokens, counts and what was done for each row; the logits have columns and rows of padding behind."""
    logits, sample, params = naive.batch(rows, vocab_size)
    padded = torch.full((len(rows) + 1, vocab_size + 8), math.inf, dtype=dtype, device=DEVICE)
    padded[: len(rows), :vocab_size] = logits
    before = padded.clone()
    tables = params.tables()
    kernels = SamplingKernels(vocab_size, len(rows) + 2, DEVICE, GREEDY_TEMPERATURE, tile)
    out = torch.full((len(rows) + 1,), -7, dtype=torch.int64, device=DEVICE)
    num_sampled = torch.full((len(rows) + 1,), -7, dtype=torch.int32, device=DEVICE)
    on_device = [x.to(DEVICE) for x in (tables.floats, tables.ints, tables.keys[:, 0])]
    inputs = [x.to(DEVICE) for x in (sample.slots, sample.num_tokens, sample.token_ids)]
    for _ in range(calls):  # what one call leaves behind does not matter to the next
        kernels(padded, Rows(*inputs), SlotTables(*on_device), out[:-1], num_sampled[:-1])
    assert torch.equal(padded.nan_to_num(5), before.nan_to_num(5)), "the logits were modified"
    assert out[-1] == num_sampled[-1] == -7
    return out[:-1].tolist(), num_sampled[:-1].tolist(), kernels.tasks[: len(rows)].tolist()


def theirs(rows, vocab_size, dtype=torch.float32):
    logits, sample, params = naive.batch(rows, vocab_size)
    result = Sampler(vocab_size)(logits.to(dtype).float(), sample, params)
    return result.token_ids[:, 0].tolist(), result.num_sampled.tolist()


def check(rows, dtype=torch.float32):
    """What was done for each row, if its token is right."""
    vocab_size = rows[0].logits.shape[1]
    wanted, valid = theirs(rows, vocab_size, dtype)
    found, num_sampled, tasks = ours(rows, vocab_size, dtype)
    assert num_sampled == valid
    assert found == [token if count > 0 else 0 for token, count in zip(wanted, valid, strict=True)]
    return tasks


@pytest.fixture(params=[16, 64])
def block(request, monkeypatch):
    """Tokens of a block: a small vocabulary's and a large one's."""
    monkeypatch.setattr(sampling, "_LEAST_BLOCK", request.param)
    return request.param


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


@pytest.mark.parametrize(
    ("dtype", "spread", "vocab_size"),
    [(torch.float32, 3.0, 2_500), (torch.bfloat16, 0.3, 1_500), (torch.float32, 1.0, 3)],
    ids=str,
)
def test_every_filter_draws_the_tokens_of_the_torch_sampler(dtype, spread, vocab_size):
    draw = np.random.default_rng(vocab_size)
    kinds = FILTERS if dtype == torch.float32 and vocab_size > 3 else FILTERS[::3]
    check([Row(spread * draw.normal(size=vocab_size), seed=i, **one) for i, one in enumerate(kinds)], dtype)


def some_tokens(draw, vocab_size):
    tokens = draw.integers(0, vocab_size, draw.integers(2, 1_500)).tolist()
    return {"tokens": tokens, "prompt_len": int(draw.integers(1, len(tokens) + 1))}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "kind", [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.6}]
)
def test_penalties_are_those_of_the_torch_sampler_over_histories_of_several_tiles(seed, kind, monkeypatch):
    monkeypatch.setattr(sampling, "_LEAST_BLOCK", 64)
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
        for _ in range(2)
    ]
    check(rows)


@settings(max_examples=3, deadline=None)
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
        for _ in range(data.draw(st.integers(1, 2)))
    ]
    check(rows)


def test_ties_beyond_the_candidates_take_the_long_way(monkeypatch):
    monkeypatch.setattr(sampling, "_CANDIDATES", 64)
    monkeypatch.setattr(sampling, "_FEW", 32)
    logits = np.zeros((4, 1_500))
    logits[1, 700:900] = 1.0
    logits[2, 3] = 2.0
    rows = [
        Row(logits[0], top_k=5),
        Row(logits[1], top_k=100, top_p=0.5),
        Row(logits[2], top_k=70, top_p=0.3),
        Row(np.random.default_rng(0).normal(size=1_500), top_p=0.2),
    ]
    assert check(rows) == [3] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiled kernel keeps its constants")
def test_a_level_that_no_score_has_is_lowered(monkeypatch):
    for name in ("_LOG_MEAN", "_LOG_MEAN_OF_MIN_P"):
        monkeypatch.setattr(sampling_scan, name, triton.language.constexpr(-9.0))
    monkeypatch.setattr(sampling, "_FEW_BLOCKS", 0)
    draw = np.random.default_rng(9)
    rows = [
        Row(draw.normal(size=300), seed=i, **kind) for i, kind in enumerate([{}, {"top_p": 0.3}, {"min_p": 0.2}] * 2)
    ]
    assert check(rows) == [2] * 6


def test_races_ask_for_the_nucleus_of_the_torch_sampler(monkeypatch, block):
    monkeypatch.setattr(sampling, "_FEW_BLOCKS", 0)
    draw = np.random.default_rng(8)
    kinds = [{"top_p": 0.9}, {"top_p": 0.5}, {"top_p": 0.6, "min_p": 0.01}, {"min_p": 0.02}, {}]
    rows = [Row(draw.normal(size=2_500) * 2, seed=i, **kinds[i % 5]) for i in range(5)]
    assert set(check(rows)) == {2}


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


def test_logits_whose_scores_overflow_are_drawn_from_all_the_same():
    logits = np.array([3e38, 2.9e38, 0.0, -3e38] * 100)
    check([Row(logits, temperature=0.5, seed=i, **kind) for i, kind in enumerate([{}, {"top_p": 0.5}, {"min_p": 0.1}])])


def test_what_one_call_leaves_behind_does_not_matter_to_the_next():
    draw = np.random.default_rng(3)
    settings = {"presence": 0.5, "tokens": [1, 2, 3]}
    rows = [Row(np.round(draw.normal(size=900)), seed=i, **settings, **FILTERS[4 * i]) for i in range(4)]
    assert ours(rows, 900, calls=2)[0] == theirs(rows, 900)[0]


def test_a_row_s_token_depends_on_nothing_else_in_the_step():
    draw = np.random.default_rng(4)
    rows = [Row(draw.normal(size=700), seed=i, **kind) for i, kind in enumerate(FILTERS[:12:2])]
    together = ours(rows, 700, tile=256)[0]
    assert [ours([row], 700, tile=256)[0][0] for row in rows[::2]] == together[::2]


def test_draws_over_seeds_follow_the_processed_distribution(monkeypatch):
    monkeypatch.setattr(sampling, "_FEW_BLOCKS", 0)
    base = Row(np.random.default_rng(3).normal(0, 1.5, 12), top_p=0.9)
    rows = [dataclasses.replace(base, seed=seed) for seed in range(30)]
    found = ours(rows, 12, tile=256)[0]
    counts = np.bincount(found, minlength=12).astype(float)
    wanted = np.exp(naive.log_softmax(naive.processed(base))) * len(rows)
    assert counts[wanted == 0].sum() == 0
    assert abs(chi_square_z(counts[wanted > 0], wanted[wanted > 0])) < 4.5


def test_more_rows_than_there_is_memory_for_are_refused():
    rows = [Row(np.zeros(10)) for _ in range(3)]
    _, sample, params = naive.batch(rows, 10)
    kernels = SamplingKernels(10, 2, torch.device("cpu"), GREEDY_TEMPERATURE)
    rows = Rows(sample.slots, sample.num_tokens, sample.token_ids)
    with pytest.raises(ValueError, match="rows: 3, at most 2"):
        kernels(torch.zeros(3, 10), rows, params.tables(), None, None)


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
def _reaching_kernel(distance, weight, targets, out, LAST: tl.constexpr, N: tl.constexpr):  # noqa: N803
    i = tl.arange(0, N)
    target = tl.load(targets + tl.program_id(0))
    reached = distance_reaching(tl.load(distance + i), tl.load(weight + i), target, LAST)
    tl.store(out + tl.program_id(0), reached)


@pytest.mark.parametrize("last", [0, 11])
def test_the_distance_that_reaches_a_weight_is_found_bit_by_bit(last):
    draw = np.random.default_rng(last)
    distance = np.sort(np.round(draw.exponential(3, 64), 1).astype(np.float32)).view(np.int32)
    distance[0], distance[-2:] = 0, (0x7F800000, 0x7FFFFFFF)
    weight = draw.integers(0, 1 << 40, 64)
    upto = {int(d): int(weight[distance <= d].sum()) for d in distance}
    targets = [1, *(total + more for total in list(upto.values())[::7] for more in (0, 1)), int(weight.sum()) + 1]
    out = torch.empty(len(targets), dtype=torch.int32, device=DEVICE)
    parts = [torch.from_numpy(np.asarray(x)).to(DEVICE) for x in (distance, weight, targets)]
    _reaching_kernel[(len(targets),)](*parts, out, last, 64)
    ones = (1 << last) - 1
    wanted = [next((d for d, total in upto.items() if total >= target), 0x7FFFFFFF) | ones for target in targets]
    # Distances that differ only in the bits that are ones count as the same.
    found = out.tolist()
    assert [f >= w for f, w in zip(found, wanted, strict=True)] == [True] * len(targets)
    assert [(f | ones) == f for f in found] == [True] * len(targets)
    if last == 0:
        assert found == wanted


def on_device(rows, vocab_size):
    """Logits `[n, V]`, `SampleRows` and `SlotParams` of some rows, where the kernels run."""
    logits, sample, params = naive.batch(rows, vocab_size)
    moved = {
        name: getattr(sample, name) for name in ("slots", "num_tokens", "token_ids", "grammar_mask", "draft_tokens")
    }
    sample = dataclasses.replace(sample, **{name: x if x is None else x.to(DEVICE) for name, x in moved.items()})
    here = SlotParams(len(params.num_logprobs), vocab_size, DEVICE)
    for slot, row in enumerate(rows):
        here.set(naive.Entry(row, slot))
    return logits.to(DEVICE), sample, here


def device_sampler(rows, vocab_size, **settings):
    return DeviceSampler(vocab_size, max_rows=len(rows), device=DEVICE, **settings)(*on_device(rows, vocab_size))


FEATURES = [
    {"bias": {7: 6.0, 9: -100.0}},
    {"bias": {3: 8.0}, "temperature": 0.0},
    {"allowed": [1, 4, 450], "temperature": 3.0},
    {"bad_words": [[5], [2, 6]], "tokens": [0, 2], "temperature": 0.0},
    {"min_tokens": 4, "stop_ids": [8, 11], "tokens": [0, 2, 3]},
    {"grammar": [2, 31, 32, 63, 64, 299], "temperature": 2.0},
    {"grammar": [300], "top_k": 4},
    {"grammar": [5, 70, 71], "bias": {70: 9.0}, "frequency": 0.5, "tokens": [5, 70, 71, 71]},
    {"presence": 2.0, "repetition": 1.7, "tokens": [4, 5, 6, 7], "top_p": 0.8},
    {"grammar": []},
    {},
]


def test_without_a_mask_no_row_is_masked():
    """As the torch sampler has it."""
    logits, sample, params = on_device([Row(np.arange(40.0), grammar=[3], temperature=0.0)], 40)
    plain = dataclasses.replace(sample, grammar_mask=None)
    sampler = DeviceSampler(40, max_rows=1, device=DEVICE)
    # Read as a mask it would allow nothing.
    sampler._kernels._changed.zero_()
    assert [sampler(logits, step, params).token_ids.item() for step in (plain, sample)] == [39, 3]


def test_token_lists_and_grammars_do_what_the_naive_sampler_does(block):
    draw = np.random.default_rng(21)
    rows = [Row(draw.normal(size=460) * 2, seed=i, **one) for i, one in enumerate(FEATURES)]
    for i, kind in enumerate(FEATURES):
        if "tokens" in kind:
            # What was said is likely again.
            rows[i].logits[0, rows[i].tokens] += 4
    found = device_sampler(rows, 460)
    scores = [naive.scores(row) for row in rows]
    wanted = [0 if one is None else int(one.argmax()) for one in scores]
    assert found.token_ids[:, 0].tolist() == wanted
    assert found.num_sampled.tolist() == [-1 if one is None else 1 for one in scores]
    assert found.logprobs is None


@pytest.mark.parametrize("wanted", [0, 1, 20])
def test_reported_logprobs_are_those_of_the_model_s_own_distribution(wanted, block):
    draw = np.random.default_rng(5)
    kinds = [
        {"temperature": 0.0},
        {"presence": 9.0, "tokens": [0, 5, 6]},
        {"top_k": 3},
        {"grammar": [2, 9]},
        {"bias": {4: 5.0}},
    ]
    rows = [
        # Few values: many are equal.
        Row(np.round(draw.normal(size=700)), seed=i, num_logprobs=wanted if i % 2 else -1, **kinds[i % 5])
        for i in range(6)
    ]
    found = device_sampler(rows, 700)
    expected = Sampler(700)(*naive.batch(rows, 700))
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprob_rows.tolist() == expected.logprob_rows.tolist() == [1, 3, 5]
    assert found.logprobs.token_ids.tolist() == expected.logprobs.token_ids.tolist()
    assert found.logprobs.ranks.tolist() == expected.logprobs.ranks.tolist()
    torch.testing.assert_close(found.logprobs.logprobs.cpu(), expected.logprobs.logprobs, rtol=0, atol=1e-5)


def test_a_report_may_be_of_the_whole_of_a_small_vocabulary():
    logits = np.array([0.0, -0.0, 2.0, -math.inf, 2.0])
    report = device_sampler([Row(logits, num_logprobs=20, temperature=0.0)], 5).logprobs
    ids = [2, 2, 4, 0, 1, 3]
    assert report.token_ids.tolist() == [ids]
    assert report.ranks.tolist() == [1]
    assert report.logprobs[0].tolist() == pytest.approx(naive.log_softmax(logits)[ids])


def test_drafts_processed_logprobs_and_long_reports_go_to_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(SamplingKernels, "__call__", lambda *_, **__: calls.append(1))
    logits = np.zeros((1, 50))
    for row, mode, by_kernels in (
        (Row(logits), "raw", True),
        (Row(logits), "processed", True),
        (Row(logits, num_logprobs=sampling.MAX_LOGPROBS), "processed", False),
        (Row(logits, num_logprobs=sampling.MAX_LOGPROBS + 1), "raw", False),
        (Row(np.zeros((2, 50)), drafts=[1]), "raw", False),
    ):
        calls.clear()
        device_sampler([row], 50, logprobs_mode=mode)
        assert bool(calls) == by_kernels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing")
def test_steps_find_their_kernels_compiled():
    row = Row(np.zeros(1_000), num_logprobs=3, presence=0.5, grammar=[1, 2], tokens=[3, 4], top_p=0.9)
    logits, sample, params = on_device([row], 1_000)
    sampler = DeviceSampler(1_000, max_rows=1, device=DEVICE)
    sampler.compile(torch.float32, sample.slots, sample.num_tokens, sample.token_ids, params)
    kernels = [sampling.penalise_kernel, sampling.scan_kernel, sampling.choose_kernel, sampling.report_kernel]
    compiled = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    sampler(logits, sample, params)
    assert [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels] == compiled
