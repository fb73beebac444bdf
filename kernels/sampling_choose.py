"""The row's token among the few that can win, by one program: filters, the race, and the search that always ends.

Only blocks whose largest logit is in reach are read again. `octavo.kernels.sampling` has the whole picture.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.launch import begin_dependent
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
from octavo.kernels.sampling_scan import (
    BEST,
    BLOCK_TABLES,
    BOUND,
    DONE,
    FILTER,
    LOG2_E,
    RACE,
    SLOW,
    log_min_p,
    logits_of,
    row_source,
    row_task,
)


@triton.jit
def list_blocks(places, chosen, BLOCKS: tl.constexpr):
    """Writes the numbers of the chosen blocks, of bool `[BLOCKS]`, in rising order; their count."""
    tl.debug_barrier()
    one = chosen.to(tl.int32)
    tl.store(places + tl.cumsum(one, 0) - 1, tl.arange(0, BLOCKS), mask=chosen)
    tl.debug_barrier()
    return tl.sum(one, 0)


@triton.jit
def gathered(source, places, first, listed, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens and logits `[TILE, BLOCK]` of listed blocks from the `first` on, -inf where there are no more."""
    at = first + tl.arange(0, TILE)
    block = tl.load(places + at, mask=at < listed, other=0)
    token, value = logits_of(source, block, BLOCK)
    return token, tl.where((at < listed)[:, None], value, float("-inf"))


@triton.jit
def _likeliest(source, blocks, best, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The first token of the row's largest logit."""
    block = tl.arange(0, BLOCKS)
    first = tl.min(tl.where(tl.load(blocks + BEST * BLOCKS + block) == best, block, NO_TOKEN), 0)
    token, value = logits_of(source, tl.full([1], 0, tl.int32) + first, BLOCK)
    return tl.min(tl.min(tl.where(value == best, token, NO_TOKEN), 1), 0)


@triton.jit
def _collect(values, tokens, counter, value, token, is_candidate, SIZE: tl.constexpr):
    """Appends the candidates while there is room; the counter goes on."""
    place = tl.atomic_add(counter + tl.zeros_like(token), 1, mask=is_candidate, sem="relaxed")
    fits = is_candidate & (place < SIZE)
    tl.store(values + place, value, mask=fits)
    tl.store(tokens + place, token, mask=fits)


@triton.jit
def _winner_of_passed(passed, scaled, token, k0, k1, k2, k3):
    score = scaled - log_exponential(mix(token.to(tl.uint32), k0, k1, k2, k3))
    _, winner, _ = winner_of(tl.where(passed, score, float("-inf")), token, scaled)
    return winner


@triton.jit
def _fixed_point(scaled):
    """Masses whose sum does not depend on its order: the tokens were collected in any."""
    return (tl.exp(scaled) * 1099511627776.0).to(tl.int64)


@triton.jit
def _nucleus_mass(top_p, top_k, collected, mass):
    """fp64, fixed point: less than this is before a token of the nucleus. The likeliest, with nothing before it, is always in."""
    total = tl.where(top_k > 0, collected.to(tl.float64), mass.to(tl.float64) * 1099511627776.0)
    return tl.maximum(top_p.to(tl.float64) * total, 1.0)


@triton.jit
def _draw_of_few(
    values, tokens, count, best, temperature, top_p, least, top_k, mass, k0, k1, k2, k3, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The winner among collected tokens that pass top-k, top-p of what passed, and `least`: each is compared with each.

    The mass is that of a row without top-k.
    """
    i = tl.arange(0, SIZE)
    value = tl.load(values + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + i, mask=i < count, other=NO_TOKEN, cache_modifier=".cg")
    scaled = scaled_logit(value, best, temperature)
    likelier, before = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int64)
    for first in range(0, count, PART):
        j = first + tl.arange(0, PART)
        other = tl.load(values + j, mask=j < count, other=float("-inf"), cache_modifier=".cg")
        other = scaled_logit(other, best, temperature)
        is_above = other[:, None] > scaled[None, :]
        likelier += tl.sum(is_above.to(tl.int32), 0)
        before += tl.sum(tl.where(is_above, _fixed_point(other)[:, None], 0), 0)
    passed = (i < count) & (likelier < tl.where(top_k > 0, top_k, SIZE))
    collected = tl.sum(tl.where(passed, _fixed_point(scaled), 0), 0)
    limit = tl.where(top_p < 1.0, _nucleus_mass(top_p, top_k, collected, mass), float("inf"))
    passed = passed & (before.to(tl.float64) < limit)
    return _winner_of_passed(passed & (scaled >= least), scaled, token, k0, k1, k2, k3)


@triton.jit
def _draw_of_many(
    values, tokens, count, best, temperature, top_p, least, top_k, mass, k0, k1, k2, k3, SIZE: tl.constexpr
):
    """`_draw_of_few` by two searches for a threshold."""
    i = tl.arange(0, SIZE)
    inside = i < count
    value = tl.load(values + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(tokens + i, mask=inside, other=NO_TOKEN, cache_modifier=".cg")
    scaled = scaled_logit(value, best, temperature)
    distance = tl.where(inside, distance_bits(scaled), FARTHEST)
    passed = inside
    if top_k > 0:
        passed = inside & (distance <= distance_reaching(distance, inside.to(tl.int32), top_k, 0))
    if top_p < 1.0:
        weight = tl.where(passed, _fixed_point(scaled), 0)
        target = tl.ceil(_nucleus_mass(top_p, top_k, tl.sum(weight, 0), mass)).to(tl.int64)
        passed = passed & (distance <= distance_reaching(distance, weight, target, 0))
    return _winner_of_passed(passed & (scaled >= least), scaled, token, k0, k1, k2, k3)


@triton.jit
def _filter(
    source, blocks, places, values, tokens, counter, best, reach, temperature, top_p, least, top_k, mass, k0, k1, k2, k3,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Collects the tokens in reach, and draws among them; `NO_TOKEN` if there are too many."""
    inverse = 1.0 / temperature
    largest = tl.load(blocks + BEST * BLOCKS + tl.arange(0, BLOCKS))
    chosen = ((largest - best) * inverse >= -reach) & (largest > float("-inf"))
    tl.store(counter, 0)
    listed = list_blocks(places, chosen, BLOCKS)
    for first in range(0, listed, TILE):
        token, value = gathered(source, places, first, listed, TILE, BLOCK)
        reaches = ((value - best) * inverse >= -reach) & (value > float("-inf"))
        _collect(values, tokens, counter, value, token, reaches, SIZE)
    tl.debug_barrier()
    count = tl.load(counter, cache_modifier=".cg")
    winner = NO_TOKEN
    if count <= FEW:
        winner = _draw_of_few(
            values, tokens, count, best, temperature, top_p, least, top_k, mass, k0, k1, k2, k3, FEW, 32
        )
    elif count <= SIZE:
        winner = _draw_of_many(
            values, tokens, count, best, temperature, top_p, least, top_k, mass, k0, k1, k2, k3, SIZE
        )
    return winner


@triton.jit
def _mass_above(source, places, listed, best, temperature, height, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the tokens in listed blocks whose scaled logit is above `height`."""
    mass = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(0, listed, TILE):
        _token, value = gathered(source, places, first, listed, TILE, BLOCK)
        scaled = scaled_logit(value, best, temperature)
        mass += tl.where(scaled > height, tl.exp(scaled), 0.0)
    return tl.sum(tl.sum(mass, 1), 0)


@triton.jit
def _highest_score(
    source, places, listed, best, temperature, least, floor, k0, k1, k2, k3, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest score in listed blocks, its token and scaled logit, of tokens that reach `least` and are above `floor`."""
    highest, winner, height = tl.full([], float("-inf"), tl.float32), NO_TOKEN, tl.full([], 0.0, tl.float32)
    for first in range(0, listed, TILE):
        token, value = gathered(source, places, first, listed, TILE, BLOCK)
        scaled = scaled_logit(value, best, temperature)
        score = scaled - log_exponential(mix(token.to(tl.uint32), k0, k1, k2, k3))
        score = tl.where((scaled >= least) & (scaled > floor), score, float("-inf"))
        largest = tl.max(tl.max(score, 1), 0)
        if largest > highest:
            winner = tl.min(tl.min(tl.where(score == largest, token, NO_TOKEN), 1), 0)
            height = tl.max(tl.max(tl.where(token == winner, scaled, float("-inf")), 1), 0)
            highest = largest
    return highest, winner, height


@triton.jit
def _list_reaching(places, bound, level, BLOCKS: tl.constexpr):
    """`list_blocks` of those whose bound is not below the level: a bound that overflowed to NaN may be anything."""
    return list_blocks(places, (bound < level) == 0, BLOCKS)


@triton.jit
def _race(
    source, blocks, places, best, level, temperature, top_p, least, mass, k0, k1, k2, k3,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token of the highest score that is in the nucleus.

    Looks into the blocks that can have a score of the level, which is lowered if it was too high. A token that is not likelier
    than one that is not in the nucleus isn't either, so each that is asked is likelier than the one before.
    """
    scale = LOG2_E / temperature
    block = tl.arange(0, BLOCKS)
    bound = tl.load(blocks + BOUND * BLOCKS + block) - best * scale
    largest = tl.load(blocks + BEST * BLOCKS + block)
    slack = 1e-3 + 1e-6 * tl.abs(best * scale)
    listed = _list_reaching(places, bound, level * LOG2_E - slack, BLOCKS)
    floor, winner = tl.full([], float("-inf"), tl.float32), NO_TOKEN
    while winner == NO_TOKEN:
        highest, token, height = _highest_score(
            source, places, listed, best, temperature, least, floor, k0, k1, k2, k3, TILE, BLOCK
        )
        if highest < level:
            level -= 4.0
            listed = _list_reaching(places, bound, level * LOG2_E - slack, BLOCKS)
        elif (top_p < 1.0) & (height < 0.0):
            likelier = list_blocks(places + BLOCKS, (largest - best) * (1.0 / temperature) >= height - 1e-3, BLOCKS)
            before = _mass_above(source, places + BLOCKS, likelier, best, temperature, height, TILE, BLOCK)
            winner = tl.where(before < top_p * mass, token, NO_TOKEN)
            floor = height
        else:
            winner = token
    return winner


@triton.jit
def _up_to(source, tiles, best, temperature, limit, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens of the row have at most the distance of these bits, and their mass."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for tile in range(tiles):
        token, value = logits_of(source, tile * TILE + tl.arange(0, TILE), BLOCK)
        scaled = scaled_logit(value, best, temperature)
        inside = (token < source[4]) & (distance_bits(scaled) <= limit)
        count += tl.sum(inside.to(tl.int32), 1)
        mass += tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 1)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _draw_by_bisection(
    source, tiles, best, temperature, top_p, least, top_k, k0, k1, k2, k3, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """The winner of any row: thresholds bit by bit over the whole row, then the race of all that pass."""
    limit = 0x7F800000
    if (top_k > 0) & (top_k < source[4]):
        low = -1
        for _ in range(31):
            middle = low + (limit - low) // 2
            count, _mass = _up_to(source, tiles, best, temperature, middle, TILE, BLOCK)
            limit = tl.where(count >= top_k, middle, limit)
            low = tl.where(count >= top_k, low, middle)
    if top_p < 1.0:
        _count, mass = _up_to(source, tiles, best, temperature, limit, TILE, BLOCK)
        # The farthest distance with less than `wanted` before it.
        wanted, low, high = top_p * mass, 0, limit + 1
        for _ in range(31):
            middle = low + (high - low) // 2
            _count, before = _up_to(source, tiles, best, temperature, middle - 1, TILE, BLOCK)
            low = tl.where(before < wanted, middle, low)
            high = tl.where(before < wanted, high, middle)
        limit = low
    highest, winner = float("-inf"), NO_TOKEN
    for tile in range(tiles):
        token, value = logits_of(source, tile * TILE + tl.arange(0, TILE), BLOCK)
        scaled = scaled_logit(value, best, temperature)
        passed = (token < source[4]) & (distance_bits(scaled) <= limit) & (scaled >= least)
        score = scaled - log_exponential(mix(token.to(tl.uint32), k0, k1, k2, k3))
        score = tl.where(passed, score, float("-inf"))
        largest = tl.max(tl.max(score, 1), 0)
        first = tl.min(tl.min(tl.where(score == largest, token, NO_TOKEN), 1), 0)
        winner = tl.where(largest > highest, first, winner)
        highest = tl.maximum(largest, highest)
    return winner


@triton.jit(do_not_specialize=["all_tiles", "penalised", "mask_stride"])
def choose_kernel(
    logits, bits, slots, positions, floats, ints, keys, mask, overlay, changed, blocks, places, count, values, tokens,
    tasks, out, num_sampled,
    vocab, all_tiles, penalised, logits_stride, mask_stride, floats_stride, ints_stride, keys_stride, greedy_below,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, FEW_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program of a row: its token."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    floats += slot * floats_stride
    blocks += row * (BLOCK_TABLES * BLOCKS)
    best = tl.max(tl.load(blocks + BEST * BLOCKS + tl.arange(0, BLOCKS)), 0)
    is_valid = tl.abs(best) < float("inf")
    temperature, top_p, min_p = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
    top_k = tl.load(ints + slot * ints_stride)
    top_k = tl.where(top_k < vocab, top_k, 0)
    source = row_source(
        row, logits, overlay, changed, mask, tl.load(bits + row), floats, penalised, vocab, logits_stride, mask_stride, PADDED
    )  # fmt: skip
    task, level, mass = row_task(
        blocks, best, temperature, top_p, min_p, top_k, vocab, greedy_below, BLOCKS, FEW_BLOCKS
    )
    winner = tl.full([], 0, tl.int32)
    if task != DONE:
        least = log_min_p(min_p)
        k0, k1, k2, k3 = row_key(keys + slot * keys_stride, tl.load(positions + row))
        places += row * (2 * BLOCKS)
        if task == RACE:
            winner = _race(
                source,
                blocks,
                places,
                best,
                level,
                temperature,
                top_p,
                least,
                mass,
                k0,
                k1,
                k2,
                k3,
                TILE,
                BLOCK,
                BLOCKS,
            )
        else:
            winner = NO_TOKEN
            if task == FILTER:
                winner = _filter(
                    source, blocks, places, values + row * SIZE, tokens + row * SIZE, count + row, best, level, temperature, top_p,
                    least, top_k, mass, k0, k1, k2, k3, TILE, BLOCK, BLOCKS, SIZE, FEW,
                )  # fmt: skip
            if winner == NO_TOKEN:
                task = SLOW
                winner = _draw_by_bisection(
                    source, all_tiles, best, temperature, top_p, least, top_k, k0, k1, k2, k3, TILE, BLOCK
                )
    elif is_valid:
        winner = _likeliest(source, blocks, best, BLOCK, BLOCKS)
    tl.store(out + row, winner.to(out.dtype.element_ty))
    tl.store(num_sampled + row, tl.where(is_valid, 1, -1))
    # For measurements: how it was found.
    tl.store(tasks + row, task)
