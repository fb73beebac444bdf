"""Draws from the vocabulary without sorting it: greedy, temperature, top-k, top-p and min-p, one program a row.

A draw is the winner of an exponential race over counter-based numbers (`octavo.sampling.rng`, whose functions are repeated here for
Triton), so it needs no normalised probabilities, and a threshold matters only to who may take part:

* without a filter, or with min-p alone, one pass for the maximum and one race;
* with top-k, the `k`-th largest of the maxima of 4,096 lanes bounds the threshold from below; what reaches that bound, little more
  than `k` tokens, is collected, and all filters are decided by comparing the collected tokens with each other;
* with top-p alone, all race and the winner is then asked whether it is in the nucleus: if what is likelier than it adds up to too
  much, those race again that are likelier than it (rejection with a rising pivot, as in FlashInfer's sorting-free sampler). The
  first winner in the nucleus wins the race inside the nucleus too, because the nucleus holds whatever is likelier than a member.

Logits may be of 16 bits; sums are of fp32, and of 32-bit fixed point where their order is not certain. Against the torch sampler a
token can differ only where two scores or a sum and its limit agree to some 1e-6.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOP_K = 512
"""The largest top-k that is decided here; callers take another way for larger ones."""

_LANES = 4096
_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the tables of parameters."""

    temperature: int
    top_p: int
    min_p: int
    top_k: int


@triton.jit
def _mix(word, k0, k1, k2, k3):
    """`rng.mix` of unsigned 32-bit words."""
    x = word + k0
    x ^= x >> 17
    x = (x * 0xED5AD4BB) ^ k1
    x ^= x >> 11
    x = x * 0xAC4C1B51 + k2
    x ^= x >> 15
    x = (x * 0x31848BAB) ^ k3
    x ^= x >> 14
    return x


@triton.jit
def _log_exponential(bits):
    """The logarithm of `rng.exponential`; `log1p(-u) = log(w) * -u / (w - 1)` with `w = 1 - u` rounded (Kahan)."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    w = 1.0 - u
    near = w == 1.0
    ratio = u / tl.where(near, 1.0, 1.0 - w)
    return tl.log(tl.where(near, u, -tl.log(w) * ratio))


@triton.jit
def _better(score, token, other_score, other_token):
    """The larger score, or of equal ones the smaller token; elementwise."""
    wins = tl.where(score == other_score, token < other_token, score > other_score)
    return tl.where(wins, score, other_score), tl.where(wins, token, other_token)


@triton.jit
def _best(score, token):
    """The largest score, and the smallest token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)


@triton.jit
def _chunk(logits, first, vocab, N: tl.constexpr):
    token = first + tl.arange(0, N)
    return token, tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _race(logits, vocab, best, inverse, low, least, k0, k1, k2, k3, N: tl.constexpr):
    """The winner among tokens whose scaled logit is above `low` and reaches `least`, its scaled logit, and the mass of all."""
    score = tl.full([N], float("-inf"), tl.float32)
    winner = tl.full([N], 0x7FFFFFFF, tl.int32)
    mass = tl.zeros([N], tl.float32)
    for first in range(0, vocab, N):
        token, value = _chunk(logits, first, vocab, N)
        scaled = (value - best) * inverse
        mass += tl.exp(scaled)
        takes_part = (scaled > low) & (scaled >= least)
        drawn = scaled - _log_exponential(_mix(token.to(tl.uint32), k0, k1, k2, k3))
        score, winner = _better(tl.where(takes_part, drawn, float("-inf")), token, score, winner)
    _, token = _best(score, winner)
    value = tl.load(logits + token).to(tl.float32)
    return token, (value - best) * inverse, tl.sum(mass, 0)


@triton.jit
def _mass_above(logits, vocab, best, inverse, pivot, N: tl.constexpr):
    mass = tl.zeros([N], tl.float32)
    for first in range(0, vocab, N):
        _, value = _chunk(logits, first, vocab, N)
        scaled = (value - best) * inverse
        mass += tl.where(scaled > pivot, tl.exp(scaled), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _lower_bound(lanes, k, STEPS: tl.constexpr):
    """A value that at least `k` of the lanes' maxima reach, near the largest such; -inf if there is none."""
    low = tl.min(tl.where(lanes == float("-inf"), 3e38, lanes), 0)
    high = tl.max(lanes, 0)
    bound = tl.where(tl.sum((lanes >= low).to(tl.int32), 0) >= k, low, float("-inf"))
    for _ in range(STEPS):
        middle = low + (high - low) * 0.5
        enough = tl.sum((lanes >= middle).to(tl.int32), 0) >= k
        bound = tl.where(enough, tl.maximum(bound, middle), bound)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return bound


@triton.jit
def _up_to(logits, vocab, best, inverse, limit, N: tl.constexpr):
    """How many tokens are at most as far below the maximum as the float of bits `limit`, and their mass."""
    count = tl.zeros([N], tl.int32)
    mass = tl.zeros([N], tl.float32)
    for first in range(0, vocab, N):
        token, value = _chunk(logits, first, vocab, N)
        scaled = (value - best) * inverse
        distance = tl.abs(scaled).to(tl.int32, bitcast=True)
        inside = (token < vocab) & (distance <= limit)
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(scaled), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _threshold_by_bisection(logits, vocab, best, inverse, k, top_p, N: tl.constexpr):
    """The scaled logit that passes top-k, then top-p of what passed. Distances from the maximum are ordered as their bits are."""
    low, high = -1, 0x7F800000
    for _ in range(31):
        middle = low + (high - low) // 2
        count, _mass = _up_to(logits, vocab, best, inverse, middle, N)
        enough = count >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    limit = high
    if top_p < 1.0:
        _count, mass = _up_to(logits, vocab, best, inverse, limit, N)
        wanted = top_p * mass
        # The farthest distance that has less than `wanted` before it.
        low, high = 0, limit + 1
        for _ in range(31):
            middle = low + (high - low) // 2
            _count, before = _up_to(logits, vocab, best, inverse, middle - 1, N)
            inside = before < wanted
            low = tl.where(inside, middle, low)
            high = tl.where(inside, high, middle)
        limit = low
    return 0.0 - tl.cast(limit, tl.float32, bitcast=True)


@triton.jit
def _among_candidates(
    values, tokens, count, best, inverse, least, k, top_p, k0, k1, k2, k3, C: tl.constexpr, PART: tl.constexpr
):
    """The winner among the collected tokens that pass top-k, top-p of what passed, and `least`."""
    i = tl.arange(0, C)
    scaled = (tl.load(values + i, mask=i < count, other=float("-inf")) - best) * inverse
    token = tl.load(tokens + i, mask=i < count, other=0x7FFFFFFF)
    weight = (tl.exp(scaled) * 4294967296.0).to(tl.int64)
    likelier = tl.zeros([C], tl.int32)
    before = tl.zeros([C], tl.int64)
    for first in range(0, count, PART):
        j = first + tl.arange(0, PART)
        other = (tl.load(values + j, mask=j < count, other=float("-inf")) - best) * inverse
        above = other[None, :] > scaled[:, None]
        likelier += tl.sum(above.to(tl.int32), 1)
        part = (tl.exp(other) * 4294967296.0).to(tl.int64)
        before += tl.sum(tl.where(above, part[None, :], 0), 1)
    passed = (i < count) & (likelier < k)
    mass = tl.sum(tl.where(passed, weight, 0), 0)
    # What is likelier adds up to less than this; before the likeliest there is nothing.
    limit = tl.maximum(top_p.to(tl.float64) * mass.to(tl.float64), 1.0)
    limit = tl.where(top_p < 1.0, limit, float("inf"))
    passed = passed & (before.to(tl.float64) < limit) & (scaled >= least)
    drawn = scaled - _log_exponential(_mix(token.to(tl.uint32), k0, k1, k2, k3))
    _, winner = _best(tl.where(passed, drawn, float("-inf")), token)
    return winner


@triton.jit
def _collect(logits, values, tokens, counter, vocab, bound, N: tl.constexpr, C: tl.constexpr):
    """How many tokens reach `bound`; the first `C` to come are collected, in any order. The counter is 0 before and after."""
    for first in range(0, vocab, N):
        token, value = _chunk(logits, first, vocab, N)
        reaches = (value >= bound) & (token < vocab)
        place = tl.atomic_add(counter + tl.zeros([N], tl.int32), 1, mask=reaches)
        fits = reaches & (place < C)
        tl.store(values + place, value, mask=fits)
        tl.store(tokens + place, token, mask=fits)
    tl.debug_barrier()
    collected = tl.load(counter)
    tl.debug_barrier()
    tl.store(counter, 0)
    return collected


@triton.jit
def _draw(
    logits, values, tokens, counter, lanes, vocab, best, inverse, least, top_k, top_p, k0, k1, k2, k3,
    N: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The token that wins the race among those that pass the filters."""
    limited = (top_k > 0) & (top_k < vocab)
    collected = C + 1
    if limited:
        bound = _lower_bound(lanes, top_k, 14)
        collected = _collect(logits, values, tokens, counter, vocab, bound, N, C)
    if limited & (collected <= C):
        winner = _among_candidates(
            values, tokens, collected, best, inverse, least, top_k, top_p, k0, k1, k2, k3, C, PART
        )
    else:
        wanted = top_p
        if limited:
            # Many equal logits at the border: the search that always ends.
            least = tl.maximum(least, _threshold_by_bisection(logits, vocab, best, inverse, top_k, top_p, N))
            wanted = 2.0
        low = float("-inf")
        winner, value, mass = _race(logits, vocab, best, inverse, low, least, k0, k1, k2, k3, N)
        if wanted < 1.0:
            above = _mass_above(logits, vocab, best, inverse, value, N)
            while (above >= wanted * mass) & (value < 0.0):
                winner, value, _mass = _race(logits, vocab, best, inverse, value, least, k0, k1, k2, k3, N)
                above = _mass_above(logits, vocab, best, inverse, value, N)
    return winner


@triton.jit(do_not_specialize=["vocab"])
def _sample_kernel(
    logits, slots, positions, floats, ints, keys, out, num_sampled, values, tokens, counters,
    vocab, logits_stride, floats_stride, ints_stride, keys_stride, greedy_below,
    TEMPERATURE: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, TOP_K: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One row a program; `values`, `tokens` and `counters` are its room for candidates."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(floats + slot * floats_stride + TEMPERATURE)
    top_p = tl.load(floats + slot * floats_stride + TOP_P)
    min_p = tl.load(floats + slot * floats_stride + MIN_P)
    top_k = tl.load(ints + slot * ints_stride + TOP_K)

    lanes = tl.full([N], float("-inf"), tl.float32)
    lane_token = tl.full([N], 0x7FFFFFFF, tl.int32)
    is_nan = tl.zeros([N], tl.int32)
    for first in range(0, vocab, N):
        token, value = _chunk(logits, first, vocab, N)
        is_nan = tl.where(value != value, 1, is_nan)  # noqa: PLR0124 - NaN
        lanes, lane_token = _better(value, token, lanes, lane_token)
    best, winner = _best(lanes, lane_token)
    valid = (tl.max(is_nan, 0) == 0) & (tl.abs(best) < float("inf"))

    if valid & (temperature >= greedy_below):
        inverse = 1.0 / temperature
        least = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
        lane = tl.load(positions + row).to(tl.uint32) * 4
        slot_keys = keys + slot * keys_stride
        s0 = tl.load(slot_keys).to(tl.uint32, bitcast=True)
        s1 = tl.load(slot_keys + 1).to(tl.uint32, bitcast=True)
        s2 = tl.load(slot_keys + 2).to(tl.uint32, bitcast=True)
        s3 = tl.load(slot_keys + 3).to(tl.uint32, bitcast=True)
        winner = _draw(
            logits, values + row * C, tokens + row * C, counters + row, lanes, vocab, best, inverse, least, top_k, top_p,
            _mix(lane, s0, s1, s2, s3), _mix(lane + 1, s0, s1, s2, s3),
            _mix(lane + 2, s0, s1, s2, s3), _mix(lane + 3, s0, s1, s2, s3),
            N, C, PART,
        )  # fmt: skip
    tl.store(out + row, tl.where(valid, winner, 0).to(tl.int64))
    tl.store(num_sampled + row, tl.where(valid, 1, -1))


@functools.cache
def _room(device: torch.device, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates' logits and tokens, and counters, of so many rows."""
    return (
        torch.empty(rows, _CANDIDATES, dtype=torch.float32, device=device),
        torch.empty(rows, _CANDIDATES, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    keys: Tensor,
    columns: Columns,
    vocab_size: int,
    greedy_below: float,
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row; one launch.

    Args:
        logits: `[n, >= vocab_size]`, rows of any stride; read only.
        slots: int `[n]`.
        positions: int `[n]`, of the token to be drawn.
        floats: fp32 `[S, .]` parameters of all slots, by `columns`; the temperature divides.
        ints: int32 `[S, .]`; top-k is at most `MAX_TOP_K`, or 0 or less or `vocab_size` and more for all.
        keys: int32 `[S, 4]`, slot keys, rows of any stride.
        columns: where the parameters are.
        vocab_size: `V`; what lies behind is padding.
        greedy_below: temperatures below it are greedy.

    Returns:
        int64 `[n]` tokens; int32 `[n]` 1, or -1 where the logits leave no token (NaN, or nothing finite).
    """
    rows, device = len(slots), logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    num_sampled = torch.empty(rows, dtype=torch.int32, device=device)
    values, tokens, counters = _room(device, triton.next_power_of_2(rows))
    _sample_kernel[(rows,)](
        logits, slots, positions, floats, ints, keys, out, num_sampled, values, tokens, counters,
        vocab_size, logits.stride(0), floats.stride(0), ints.stride(0), keys.stride(0), greedy_below,
        columns.temperature, columns.top_p, columns.min_p, columns.top_k,
        min(_LANES, triton.next_power_of_2(vocab_size)), _CANDIDATES, 16, num_warps=16,
    )  # fmt: skip
    return out, num_sampled
