"""From logits to tokens on the device, without sorting the vocabulary and without a decision on the host.

Three passes over the logits, of which a step launches those that its rows can need; in each a row is shared by the programs of
its chunks, and the last one to arrive decides:

1. *scan*: penalties; the largest logit and where it is, the mass (the sum of exponentials), the largest logits of many lanes. A
   greedy row is done.
2. *collect*: gathers the few tokens that can win.
   With top-k these are the tokens that reach the `k`-th largest of the lanes' maxima: at least `k` do, and few more. All filters
   are then decided among them.
   Otherwise a token wins only with a high score. Scores of a race of the mass `Z` exceed `log Z - c` as a Poisson process of mean
   `e**c` does, so only some 50 tokens are looked at, by one comparison with their random word: `u <= e**c * probability`.
3. *confirm*, for top-p without top-k: with the tokens in the order of their scores, a token that is less likely than one before
   it can never win, whatever the nucleus. The others are few (the records of a random order). The mass of what is likelier than
   each is summed, and the first of them that is in the nucleus has won.

That a list was long enough is checked. Otherwise, and for a top-k beyond `MAX_TOP_K` or a border of very many equal logits, one
program goes over the row again by bisection, in the third launch. No sum depends on other rows. Against the torch sampler a token
can differ only where two scores, or a mass and its limit, agree to some 1e-6. Symbols: `R` rows, `V` vocabulary, `S` slots, `N`
tokens of a chunk, `C` chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.race import (
    FARTHEST,
    NO_TOKEN,
    distance_bits,
    distance_reaching,
    log_exponential,
    mix,
    row_key,
    scaled_logit,
    winner_of,
)

MAX_TOP_K = 1024
"""The largest top-k that the candidates' buffer is for."""

_CHUNK = 4096
_LANES = 128
_CANDIDATES = 2048
_FEW = 256
_HISTORY = 1024
_REGISTERS = 80
_RECORDS = tl.constexpr(8)

# States of a row between the launches.
_DONE = tl.constexpr(0)
_FILTER = tl.constexpr(1)
_RACE = tl.constexpr(2)
_NUCLEUS = tl.constexpr(3)
_SLOW = tl.constexpr(4)

# `c`: some 55 tokens are looked at, and with probability exp(-55) none of them has the score that is asked for.
_LOG_MEAN = tl.constexpr(4.0)
_LARGEST_K = tl.constexpr(MAX_TOP_K)
_ARRIVAL_KINDS = 3


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Sampling parameters of all slots: `[S, .]`, rows of any stride."""

    floats: Tensor
    """fp32: temperature, top-p, min-p, presence, frequency, repetition."""
    ints: Tensor
    """int32: top-k, minimum of tokens, length of the prompt."""
    keys: Tensor
    """int32 `[S, 4]`: slot keys of the domain that is drawn for."""


@triton.jit
def _begin(PDL: tl.constexpr):
    """With a dependent launch: lets the next kernel begin, and waits for the end of those before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _tokens_of(chunk, N: tl.constexpr, LANES: tl.constexpr):
    """The chunk's tokens, `[N / LANES, LANES]`."""
    return chunk * N + tl.arange(0, N // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _values(logits, overlay, changed, token, vocab, is_penalised):
    """Logits, -inf behind the vocabulary; for a row with penalties those of the overlay where a bit says so."""
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if is_penalised:
        word = tl.load(changed + (token >> 5))
        there = ((word >> (token & 31)) & 1) != 0
        value = tl.where(there, tl.load(overlay + token, mask=there, other=0).to(tl.float32, bitcast=True), value)
    return value


@triton.jit
def _is_penalised(floats):
    """Whether the slot whose parameters are pointed to has any penalty."""
    return (tl.load(floats + 3) != 0.0) | (tl.load(floats + 4) != 0.0) | (tl.load(floats + 5) != 1.0)


@triton.jit
def _log_min_p(min_p):
    return tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))


@triton.jit
def _penalise(
    logits, overlay, changed, history, known, prompt_len, presence, frequency, repetition,
    chunk, vocab, N: tl.constexpr, LANES: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Writes this chunk's part of the overlay: first counts of outputs, then in their place the new logits' bits."""
    word = chunk * (N // 32) + tl.arange(0, N // 32)
    tl.store(changed + word, tl.zeros([N // 32], tl.int32))
    lower, upper = chunk * N, tl.minimum((chunk + 1) * N, vocab)
    i = tl.arange(0, H)
    for first in range(0, known, H):
        token = tl.load(history + first + i, mask=first + i < known, other=-1)
        mine = (token >= lower) & (token < upper)
        tl.store(overlay + token, tl.zeros([H], tl.int32), mask=mine)
    tl.debug_barrier()
    for first in range(0, known, H):
        token = tl.load(history + first + i, mask=first + i < known, other=-1)
        mine = (token >= lower) & (token < upper)
        bit = tl.full([H], 1, tl.int32) << (token & 31)
        tl.atomic_or(changed + (token >> 5), bit, mask=mine)
        tl.atomic_add(overlay + token, 1, mask=mine & (first + i >= prompt_len))
    tl.debug_barrier()
    token = _tokens_of(chunk, N, LANES)
    there = ((tl.load(changed + (token >> 5)) >> (token & 31)) & 1) != 0
    count = tl.load(overlay + token, mask=there, other=0).to(tl.float32)
    value = tl.load(logits + token, mask=there, other=0.0).to(tl.float32)
    value = tl.where(value > 0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
    value -= frequency * count
    value -= tl.where(count > 0, presence, 0.0)
    tl.store(overlay + token, value.to(tl.int32, bitcast=True), mask=there)
    tl.debug_barrier()


@triton.jit
def _arrives_last(counter, programs):
    """Whether all others of the row have stored what they have to say; then the counter is 0 again."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _decide_scan(
    row, best, token, mass, kept, is_nan, lanes, out, num_sampled, row_best, row_mass, row_level, state, collected,
    temperature, top_p, min_p, top_k, vocab, greedy_below, ALL_LANES: tl.constexpr,
):  # fmt: skip
    """What is known of a row after the scan, and what has to be done."""
    valid = (is_nan == 0) & (tl.abs(best) < float("inf"))
    tl.store(out + row, tl.where(valid, token, 0).to(out.dtype.element_ty))
    tl.store(num_sampled + row, tl.where(valid, 1, -1))
    tl.store(row_best + row, best)
    tl.store(row_mass + row, mass)
    tl.store(collected + row, 0)
    is_limited = (top_k > 0) & (top_k < vocab)
    next_state = tl.where(is_limited, tl.where(top_k <= _LARGEST_K, _FILTER, _SLOW), _RACE)
    next_state = tl.where(valid & (temperature >= greedy_below), next_state, _DONE)
    tl.store(state + row, next_state)
    if next_state == _FILTER:
        lane = tl.load(lanes + tl.arange(0, ALL_LANES), cache_modifier=".cg")
        reach = distance_reaching(distance_bits(lane - best), tl.full([ALL_LANES], 1, tl.int32), top_k, 11, 0)
        tl.store(row_level + row, tl.minimum(reach, 0x7F800000).to(tl.float32, bitcast=True))
    elif next_state == _RACE:
        # The likeliest token, of mass 1, is never removed.
        mass = tl.maximum(tl.where(top_p < 1.0, top_p * mass, mass), 1.0)
        mass = tl.where(min_p > 0.0, tl.minimum(mass, kept), mass)
        tl.store(row_level + row, tl.log(mass) - _LOG_MEAN)


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _scan_kernel(
    logits, flags, slots, positions, token_ids, floats, ints, out, num_sampled,
    overlay, changed, chunk_best, chunk_token, chunk_mass, chunk_kept, chunk_nan, lanes,
    row_best, row_mass, row_level, state, collected, arrivals,
    vocab, chunks, logits_stride, token_stride, floats_stride, ints_stride, greedy_below,
    SAMPLE: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk); see the module's first pass. `CHUNKS` is the power of two that holds `chunks`."""
    _begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if SAMPLE:
        is_due = (tl.load(flags + row) & SAMPLE) != 0
    else:
        is_due = True
    if not is_due:
        if chunk == 0:
            tl.store(out + row, 0)
            tl.store(num_sampled + row, 0)
            tl.store(state + row, _DONE)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        floats += slot * floats_stride
        ints += slot * ints_stride
        logits += row * logits_stride
        overlay += row * (CHUNKS * N)
        changed += row * (CHUNKS * N // 32)
        lanes += row * (CHUNKS * LANES)
        temperature, top_p, min_p = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
        top_k = tl.load(ints)
        is_penalised = _is_penalised(floats)
        if is_penalised:
            _penalise(
                logits, overlay, changed, token_ids + slot * token_stride, tl.load(positions + row).to(tl.int32),
                tl.load(ints + 2), tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5),
                chunk, vocab, N, LANES, H,
            )  # fmt: skip
        token = _tokens_of(chunk, N, LANES)
        value = _values(logits, overlay, changed, token, vocab, is_penalised)
        lane = tl.max(value, 0)
        best = tl.max(lane, 0)
        place = row * CHUNKS + chunk
        tl.store(chunk_best + place, best)
        tl.store(chunk_token + place, tl.min(tl.min(tl.where(value == best, token, NO_TOKEN), 0), 0))
        tl.store(chunk_nan + place, tl.max(tl.max((value != value).to(tl.int32), 0), 0))  # noqa: PLR0124
        if temperature >= greedy_below:
            base = tl.where(best > float("-inf"), best, 0.0)
            scaled = (value - base) * (1.0 / temperature)
            likelihood = tl.exp(scaled)
            mass = tl.sum(tl.sum(likelihood, 0), 0)
            tl.store(chunk_mass + place, mass)
            # What min-p would keep if the chunk's best were the row's: at least what it does keep.
            kept = mass
            if min_p > 0.0:
                kept = tl.sum(tl.sum(tl.where(scaled >= _log_min_p(min_p) - 1e-3, likelihood, 0.0), 0), 0)
            tl.store(chunk_kept + place, kept)
            if (top_k > 0) & (top_k < vocab):
                tl.store(lanes + chunk * LANES + tl.arange(0, LANES), lane)
        if _arrives_last(arrivals + row, chunks):
            i = tl.arange(0, CHUNKS)
            some = row * CHUNKS + i
            each = tl.load(chunk_best + some, mask=i < chunks, other=float("-inf"), cache_modifier=".cg")
            best = tl.max(each, 0)
            first = tl.load(chunk_token + some, mask=i < chunks, other=NO_TOKEN, cache_modifier=".cg")
            first = tl.min(tl.where(each == best, first, NO_TOKEN), 0)
            is_nan = tl.max(tl.load(chunk_nan + some, mask=i < chunks, other=0, cache_modifier=".cg"), 0)
            mass, kept = 0.0, 0.0
            if temperature >= greedy_below:
                share = tl.exp((each - best) * (1.0 / temperature))
                share = tl.where(each > float("-inf"), share, 0.0)
                mass = tl.sum(share * tl.load(chunk_mass + some, mask=i < chunks, other=0.0, cache_modifier=".cg"), 0)
                kept = tl.sum(share * tl.load(chunk_kept + some, mask=i < chunks, other=0.0, cache_modifier=".cg"), 0)
            _decide_scan(
                row, best, first, mass, kept, is_nan, lanes, out, num_sampled, row_best, row_mass, row_level, state, collected,
                temperature, top_p, min_p, top_k, vocab, greedy_below, CHUNKS * LANES,
            )  # fmt: skip


@triton.jit
def _draw_filtered(
    values,
    tokens,
    count,
    best,
    temperature,
    top_p,
    least,
    top_k,
    k0,
    k1,
    k2,
    k3,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
):
    """The winner among collected tokens that pass top-k, top-p of what passed, and `least`."""
    i = tl.arange(0, SIZE)
    inside = i < count
    value = tl.load(values + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + i, mask=inside, other=NO_TOKEN, cache_modifier=".cg")
    scaled = scaled_logit(value, best, temperature)
    distance = tl.where(inside, distance_bits(scaled), FARTHEST)
    limit = distance_reaching(distance, inside.to(tl.int32), top_k, 0, BITS)
    passed = inside & (distance <= limit)
    if top_p < 1.0:
        # Fixed point: the order in which the tokens were collected does not count.
        weight = tl.where(passed, (tl.exp(scaled) * 1099511627776.0).to(tl.int64), 0)
        wanted = top_p.to(tl.float64) * tl.sum(weight, 0).to(tl.float64)
        target = tl.maximum(tl.ceil(wanted).to(tl.int64), 1)
        passed = passed & (distance <= distance_reaching(distance, weight, target, 0, BITS))
    passed = passed & (scaled >= least)
    score = scaled - log_exponential(mix(token.to(tl.uint32), k0, k1, k2, k3))
    _, winner, _ = winner_of(tl.where(passed, score, float("-inf")), token, scaled)
    return winner


@triton.jit
def _draw_records(
    values, tokens, count, best, temperature, least, level, record_tokens, record_scaled, k0, k1, k2, k3,
    SIZE: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """The collected token of the highest score, `NO_TOKEN` if none reaches the level; and, into memory, the tokens that win if what
    is no likelier than the one before may not."""
    i = tl.arange(0, SIZE)
    inside = i < count
    value = tl.load(values + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + i, mask=inside, other=NO_TOKEN, cache_modifier=".cg")
    scaled = scaled_logit(value, best, temperature)
    score = scaled - log_exponential(mix(token.to(tl.uint32), k0, k1, k2, k3))
    score = tl.where(inside & (scaled >= least) & (score >= level), score, float("-inf"))
    highest, winner, reached = winner_of(score, token, scaled)
    winner = tl.where(highest > float("-inf"), winner, NO_TOKEN)
    first = winner
    for record in range(RECORDS):
        tl.store(record_tokens + record, winner)
        # Above all: without a token there is no mass to be summed.
        tl.store(record_scaled + record, tl.where(winner == NO_TOKEN, 1.0, reached))
        score = tl.where(scaled > reached, score, float("-inf"))
        highest, winner, next_reached = winner_of(score, token, scaled)
        winner = tl.where(highest > float("-inf"), winner, NO_TOKEN)
        reached = tl.where(winner == NO_TOKEN, float("inf"), next_reached)
    return first


@triton.jit
def _collect(values, tokens, counter, value, token, is_candidate, SIZE: tl.constexpr):
    """Appends the candidates while there is room; the counter goes on."""
    place = tl.atomic_add(counter + tl.zeros_like(token), 1, mask=is_candidate, sem="relaxed")
    fits = is_candidate & (place < SIZE)
    tl.store(values + place, value, mask=fits)
    tl.store(tokens + place, token, mask=fits)


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _collect_kernel(
    logits, slots, positions, floats, ints, keys, out,
    overlay, changed, chunk_best, row_best, row_level, state, collected, values, tokens, record_tokens, record_scaled, arrivals,
    vocab, chunks, logits_stride, floats_stride, ints_stride, keys_stride,
    N: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk); see the module's second pass."""
    _begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    task = tl.load(state + row)
    if (task == _FILTER) | (task == _RACE):
        slot = tl.load(slots + row).to(tl.int64)
        floats += slot * floats_stride
        logits += row * logits_stride
        values += row * SIZE
        tokens += row * SIZE
        temperature, top_p = tl.load(floats), tl.load(floats + 1)
        least = _log_min_p(tl.load(floats + 2))
        best, level = tl.load(row_best + row), tl.load(row_level + row)
        highest = tl.load(chunk_best + row * CHUNKS + chunk)
        inverse = 1.0 / temperature
        k0, k1, k2, k3 = row_key(keys + slot * keys_stride, tl.load(positions + row))
        token = _tokens_of(chunk, N, LANES)
        if task == _FILTER:
            if best - highest <= level:
                value = _values(
                    logits,
                    overlay + row * (CHUNKS * N),
                    changed + row * (CHUNKS * N // 32),
                    token,
                    vocab,
                    _is_penalised(floats),
                )
                reaches = (best - value <= level) & (value > float("-inf"))
                _collect(values, tokens, collected + row, value, token, reaches, SIZE)
        elif (highest - best) * inverse >= least - 1e-3:
            value = _values(
                logits,
                overlay + row * (CHUNKS * N),
                changed + row * (CHUNKS * N // 32),
                token,
                vocab,
                _is_penalised(floats),
            )
            scaled = (value - best) * inverse
            # In units of the random word: `u <= exp(scaled - level)`, and a little more for rounding.
            limit = tl.exp(scaled) * (tl.exp(-level) * 4295000000.0)
            word = mix(token.to(tl.uint32), k0, k1, k2, k3).to(tl.float32)
            can_win = (word <= limit) & (scaled >= least - 1e-3) & (value > float("-inf"))
            _collect(values, tokens, collected + row, value, token, can_win, SIZE)
        if _arrives_last(arrivals + row, chunks):
            count = tl.load(collected + row, cache_modifier=".cg")
            records = record_tokens + row * _RECORDS
            heights = record_scaled + row * _RECORDS
            next_state = _DONE
            winner = NO_TOKEN
            if count <= SIZE:
                if task == _FILTER:
                    top_k = tl.load(ints + slot * ints_stride)
                    if count <= FEW:
                        winner = _draw_filtered(
                            values, tokens, count, best, temperature, top_p, least, top_k, k0, k1, k2, k3, FEW, 4
                        )
                    else:
                        winner = _draw_filtered(
                            values, tokens, count, best, temperature, top_p, least, top_k, k0, k1, k2, k3, SIZE, 0
                        )
                elif count <= FEW:
                    winner = _draw_records(
                        values,
                        tokens,
                        count,
                        best,
                        temperature,
                        least,
                        level,
                        records,
                        heights,
                        k0,
                        k1,
                        k2,
                        k3,
                        FEW,
                        _RECORDS,
                    )
                else:
                    winner = _draw_records(
                        values,
                        tokens,
                        count,
                        best,
                        temperature,
                        least,
                        level,
                        records,
                        heights,
                        k0,
                        k1,
                        k2,
                        k3,
                        SIZE,
                        _RECORDS,
                    )
            if winner == NO_TOKEN:
                next_state = _SLOW
            elif (task == _RACE) & (top_p < 1.0):
                next_state = _NUCLEUS
            else:
                tl.store(out + row, winner.to(out.dtype.element_ty))
            tl.store(state + row, next_state)


@triton.jit
def _up_to(
    logits,
    overlay,
    changed,
    is_penalised,
    vocab,
    chunks,
    best,
    temperature,
    limit,
    N: tl.constexpr,
    LANES: tl.constexpr,
):
    """How many tokens have at most the distance of these bits, and their mass."""
    count = tl.zeros([LANES], tl.int32)
    mass = tl.zeros([LANES], tl.float32)
    for chunk in range(chunks):
        token = _tokens_of(chunk, N, LANES)
        scaled = scaled_logit(_values(logits, overlay, changed, token, vocab, is_penalised), best, temperature)
        inside = (token < vocab) & (distance_bits(scaled) <= limit)
        count += tl.sum(inside.to(tl.int32), 0)
        mass += tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _draw_by_bisection(
    logits, overlay, changed, is_penalised, vocab, chunks, best, temperature, top_p, least, top_k, k0, k1, k2, k3,
    N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The winner, of any row, by one program: thresholds bit by bit, then the race of all that pass."""
    limit = 0x7F800000
    if (top_k > 0) & (top_k < vocab):
        low = -1
        for _ in range(31):
            middle = low + (limit - low) // 2
            count, _mass = _up_to(
                logits, overlay, changed, is_penalised, vocab, chunks, best, temperature, middle, N, LANES
            )
            limit = tl.where(count >= top_k, middle, limit)
            low = tl.where(count >= top_k, low, middle)
    if top_p < 1.0:
        _count, mass = _up_to(logits, overlay, changed, is_penalised, vocab, chunks, best, temperature, limit, N, LANES)
        # The farthest distance with less than `wanted` before it.
        wanted, low, high = top_p * mass, 0, limit + 1
        for _ in range(31):
            middle = low + (high - low) // 2
            _count, before = _up_to(
                logits, overlay, changed, is_penalised, vocab, chunks, best, temperature, middle - 1, N, LANES
            )
            low = tl.where(before < wanted, middle, low)
            high = tl.where(before < wanted, high, middle)
        limit = low
    highest, winner = float("-inf"), NO_TOKEN
    for chunk in range(chunks):
        token = _tokens_of(chunk, N, LANES)
        scaled = scaled_logit(_values(logits, overlay, changed, token, vocab, is_penalised), best, temperature)
        passed = (token < vocab) & (distance_bits(scaled) <= limit) & (scaled >= least)
        score = scaled - log_exponential(mix(token.to(tl.uint32), k0, k1, k2, k3))
        score = tl.where(passed, score, float("-inf"))
        largest = tl.max(tl.max(score, 0), 0)
        first = tl.min(tl.min(tl.where(score == largest, token, NO_TOKEN), 0), 0)
        winner = tl.where(largest > highest, first, winner)
        highest = tl.maximum(largest, highest)
    return winner


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _confirm_kernel(
    logits, slots, positions, floats, ints, keys, out,
    overlay, changed, chunk_best, row_best, row_mass, state, record_tokens, record_scaled, above, arrivals,
    vocab, chunks, logits_stride, floats_stride, ints_stride, keys_stride,
    N: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk); see the module's third pass."""
    _begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    task = tl.load(state + row)
    if (task == _NUCLEUS) | ((task == _SLOW) & (chunk == 0)):
        slot = tl.load(slots + row).to(tl.int64)
        floats += slot * floats_stride
        logits += row * logits_stride
        overlay += row * (CHUNKS * N)
        changed += row * (CHUNKS * N // 32)
        temperature, top_p = tl.load(floats), tl.load(floats + 1)
        is_penalised = _is_penalised(floats)
        best = tl.load(row_best + row)
        is_open = task == _SLOW
        if task == _NUCLEUS:
            record = tl.arange(0, _RECORDS)
            heights = record_scaled + row * _RECORDS
            part = above + (row * CHUNKS + chunk) * _RECORDS
            inverse = 1.0 / temperature
            if (tl.load(chunk_best + row * CHUNKS + chunk) - best) * inverse >= tl.load(heights) - 1e-3:
                value = _values(logits, overlay, changed, _tokens_of(chunk, N, LANES), vocab, is_penalised)
                scaled = scaled_logit(value, best, temperature)
                likelihood = tl.exp(scaled)
                for r in range(_RECORDS):
                    height = tl.load(heights + r)
                    tl.store(part + r, tl.sum(tl.sum(tl.where(scaled > height, likelihood, 0.0), 0), 0))
            else:
                tl.store(part + record, tl.zeros([_RECORDS], tl.float32))
            if _arrives_last(arrivals + row, chunks):
                i = tl.arange(0, CHUNKS)
                each = above + (row * CHUNKS + i)[:, None] * _RECORDS + record[None, :]
                before = tl.sum(tl.load(each, mask=(i < chunks)[:, None], other=0.0, cache_modifier=".cg"), 0)
                token = tl.load(record_tokens + row * _RECORDS + record)
                scaled = tl.load(heights + record)
                accepted = (token != NO_TOKEN) & ((before < top_p * tl.load(row_mass + row)) | (scaled == 0.0))
                first = tl.min(tl.where(accepted, record, _RECORDS), 0)
                is_open = first == _RECORDS
                winner = tl.min(tl.where(record == first, token, NO_TOKEN), 0)
                if not is_open:
                    tl.store(out + row, winner.to(out.dtype.element_ty))
        if is_open:
            k0, k1, k2, k3 = row_key(keys + slot * keys_stride, tl.load(positions + row))
            winner = _draw_by_bisection(
                logits, overlay, changed, is_penalised, vocab, chunks, best, temperature, top_p,
                _log_min_p(tl.load(floats + 2)), tl.load(ints + slot * ints_stride), k0, k1, k2, k3, N, LANES,
            )  # fmt: skip
            tl.store(out + row, winner.to(out.dtype.element_ty))


class SplitSampler:
    """Draws for up to `max_rows` rows at a time; owns the memory that its kernels share, `4 V` bytes a row and more.

    Args:
        vocab_size: `V`; further columns of the logits are padding.
        max_rows: `R` at most.
        device: of everything.
        greedy_below: temperatures below it are greedy.
        chunk: `N`, a power of two, at least 256.
    """

    def __init__(
        self, vocab_size: int, max_rows: int, device: torch.device, greedy_below: float, chunk: int = _CHUNK
    ) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self._greedy_below = greedy_below
        self._chunk = chunk
        self._lanes = min(_LANES, chunk // 4)
        self._chunks = triton.cdiv(vocab_size, chunk)
        self._padded = chunks = triton.next_power_of_2(self._chunks)

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(max_rows, *shape, dtype=dtype, device=device)

        def words(*shape: int) -> Tensor:
            return room(*shape, dtype=torch.int32)

        self._overlay, self._changed = words(chunks * chunk), words(chunks * chunk // 32)
        self._chunk_best, self._chunk_mass, self._chunk_kept = room(chunks), room(chunks), room(chunks)
        self._chunk_token, self._chunk_nan = words(chunks), words(chunks)
        # Lanes of chunks behind the last one stay where they are.
        self._maxima = room(chunks * self._lanes).fill_(-torch.inf)
        self._best, self._mass, self._level = room(), room(), room()
        self._state, self._collected = words(), words()
        self._values, self._tokens = room(_CANDIDATES), words(_CANDIDATES)
        self._record_scaled, self._record_tokens = room(_RECORDS.value), words(_RECORDS.value)
        self._above = room(chunks, _RECORDS.value)
        self._arrivals = torch.zeros(_ARRIVAL_KINDS, max_rows, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        num_tokens: Tensor,
        token_ids: Tensor,
        tables: SlotTables,
        out: Tensor,
        num_sampled: Tensor,
        *,
        flags: Tensor | None = None,
        sample_flag: int = 0,
        all_greedy: bool = False,
    ) -> None:
        """Draws a token for each row: three launches, or one if all rows are greedy; a graph can hold them.

        Args:
            logits: fp32, bf16 or fp16 `[R, >= V]`, rows of any stride; read only.
            slots: int `[R]`, all different.
            num_tokens: int `[R]`, known tokens, which is the position of the token to be drawn.
            token_ids: int32 `[S, L]`, known tokens of all slots; read for rows with penalties.
            tables: parameters of all slots.
            out: int `[R]`, written: tokens; 0 for a row that is not sampled or fails.
            num_sampled: int32 `[R]`, written: 1; -1 where the logits leave no token (NaN, or nothing finite); 0 for a row that is
                not sampled.
            flags: int32 `[R]` row flags; `None`: all rows are sampled.
            sample_flag: the flag of `flags` that says so.
            all_greedy: the caller knows that no row is random.

        Raises:
            ValueError: more rows than `max_rows`.
        """
        rows, device = len(slots), logits.device
        if rows > self.max_rows:
            raise ValueError(f"rows: {rows}, at most {self.max_rows}")
        if not rows:
            return
        vocab, chunks, padded = self.vocab_size, self._chunks, self._padded
        dependent = launch.dependent_launch(device)
        # The torch sampler rounds each product: nothing is fused.
        options = {
            "num_warps": max(1, self._chunk // 512),
            "enable_fp_fusion": False,
            **launch.launch_options(dependent),
        }
        if device.type == "cuda":
            # Three blocks of 256 threads on a multiprocessor; what spills is in the paths of one program a row.
            options["maxnreg"] = _REGISTERS
        floats, ints, keys = tables.floats, tables.ints, tables.keys
        strides = (logits.stride(0), floats.stride(0), ints.stride(0), keys.stride(0))
        _scan_kernel[(rows, chunks)](
            logits, slots if flags is None else flags, slots, num_tokens, token_ids, floats, ints, out, num_sampled,
            self._overlay, self._changed, self._chunk_best, self._chunk_token, self._chunk_mass, self._chunk_kept, self._chunk_nan,
            self._maxima, self._best, self._mass, self._level, self._state, self._collected, self._arrivals[0],
            vocab, chunks, logits.stride(0), token_ids.stride(0), floats.stride(0), ints.stride(0), self._greedy_below,
            0 if flags is None else sample_flag, self._chunk, self._lanes, padded, _HISTORY, dependent, **options,
        )  # fmt: skip
        if all_greedy:
            return
        _collect_kernel[(rows, chunks)](
            logits, slots, num_tokens, floats, ints, keys, out,
            self._overlay, self._changed, self._chunk_best, self._best, self._level, self._state, self._collected,
            self._values, self._tokens, self._record_tokens, self._record_scaled, self._arrivals[1], vocab, chunks, *strides,
            self._chunk, self._lanes, padded, _CANDIDATES, _FEW, dependent, **options,
        )  # fmt: skip
        _confirm_kernel[(rows, chunks)](
            logits, slots, num_tokens, floats, ints, keys, out,
            self._overlay, self._changed, self._chunk_best, self._best, self._mass, self._state,
            self._record_tokens, self._record_scaled, self._above, self._arrivals[2], vocab, chunks, *strides,
            self._chunk, self._lanes, padded, dependent, **options,
        )  # fmt: skip
