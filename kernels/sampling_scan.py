"""The passes of a draw that read whole rows of logits: penalties, the scan of all blocks, and the race of all tokens.

A program takes some tiles of one row, one after the other, and asks for the next before it works on this one. Nothing is shared
between programs but what the next kernel reads, and no sum is of more than one block, so a row's numbers depend neither on other
rows nor on how many programs share it. `octavo.kernels.sampling` has the whole picture.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.launch import begin_dependent
from octavo.kernels.race import distance_bits, distance_reaching, mix, row_key

# What the bits of a row say.
MASKED = tl.constexpr(1)
"""Only tokens whose bit of the row's mask is set can be drawn."""
REPLACED = tl.constexpr(2)
"""The overlay holds the whole row, penalties included."""
REPORTED = tl.constexpr(4)
"""Log-probabilities are wanted."""

# How a row's token is found.
DONE = tl.constexpr(0)
FILTER = tl.constexpr(1)
RACE = tl.constexpr(2)
SLOW = tl.constexpr(3)

# Tables of blocks: `[BLOCK_TABLES, BLOCKS]` of each row.
BEST = tl.constexpr(0)
MASS = tl.constexpr(1)
BOUND = tl.constexpr(2)
RAW_BEST = tl.constexpr(3)
RAW_MASS = tl.constexpr(4)
BLOCK_TABLES = tl.constexpr(5)

MAX_TOP_K = 1024
"""The largest top-k that the candidates' buffer is for."""
_LARGEST_K = tl.constexpr(MAX_TOP_K)

# `c`: some 55 tokens are looked at, and with probability exp(-55) none of them has the score that is asked for. With min-p the mass
# that takes part is known less well.
_LOG_MEAN = tl.constexpr(4.0)
_LOG_MEAN_OF_MIN_P = tl.constexpr(6.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def has_penalties(floats):
    """Whether the slot whose parameters are pointed to has any penalty."""
    return (tl.load(floats + 3) != 0.0) | (tl.load(floats + 4) != 0.0) | (tl.load(floats + 5) != 1.0)


@triton.jit
def row_source(
    row,
    logits,
    overlay,
    changed,
    mask,
    bits,
    floats,
    penalised,
    vocab,
    logits_stride,
    mask_stride,
    PADDED: tl.constexpr,
):
    """Where a row's logits come from, as `adjusted` and `gathered` take it."""
    is_adjusted = (bits & REPLACED) != 0
    if penalised:
        is_adjusted = is_adjusted | has_penalties(floats)
    return (
        logits + row * logits_stride,
        overlay + row * PADDED,
        changed + row * (PADDED // 32),
        mask + row * mask_stride,
        vocab,
        is_adjusted,
        (bits & MASKED) != 0,
    )


@triton.jit
def _bits(words, block, end, BLOCK: tl.constexpr):
    """Whether each token's bit is set, bool `[TILE, BLOCK]`: one or two of the `end` words for a block, not one for a token."""
    column = tl.arange(0, BLOCK)[None, :]
    first = (block * BLOCK) >> 5
    word = tl.load(words + first, mask=first < end, other=0)[:, None]
    if BLOCK == 64:
        word = tl.where(column < 32, word, tl.load(words + first + 1, mask=first + 1 < end, other=0)[:, None])
        return ((word >> (column & 31)) & 1) != 0
    return ((word >> (((block * BLOCK) & 31)[:, None] + column)) & 1) != 0


@triton.jit
def tokens_of(block, BLOCK: tl.constexpr):
    """The tokens `[TILE, BLOCK]` of blocks `[TILE]`."""
    return block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def adjusted(value, source, block, BLOCK: tl.constexpr):
    """The model's logits of blocks `[TILE]` as those that are drawn from, fp32; NaN as infinity, which leaves no token."""
    words = (source[4] + 31) >> 5
    if source[5]:
        there = _bits(source[2], block, words, BLOCK)
        value = tl.where(there, tl.load(source[1] + tokens_of(block, BLOCK), mask=there, other=0.0), value)
    if source[6]:
        value = tl.where(_bits(source[3], block, words, BLOCK), value, float("-inf"))
    return tl.where(value != value, float("inf"), value)  # noqa: PLR0124 - NaN


@triton.jit
def logits_of(source, block, BLOCK: tl.constexpr):
    """Tokens and adjusted logits of blocks `[TILE]`, -inf behind the vocabulary."""
    token = tokens_of(block, BLOCK)
    value = tl.load(source[0] + token, mask=token < source[4], other=float("-inf")).to(tl.float32)
    return token, adjusted(value, source, block, BLOCK)


@triton.jit
def log_min_p(min_p):
    """The least scaled logit that min-p keeps."""
    return tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf"))


@triton.jit(do_not_specialize=["vocab", "span"])
def penalise_kernel(
    logits, bits, slots, positions, token_ids, floats, ints, overlay, changed,
    vocab, span, logits_stride, token_stride, floats_stride, ints_stride,
    PADDED: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): the penalised logits of the part's `span` tokens, a multiple of 32, into the overlay.

    Only tokens of the history are touched: their counts are made 0, counted where the new logits' bits go, and replaced by who is
    the first to set a token's bit.
    """
    begin_dependent(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    floats += slot * floats_stride
    if has_penalties(floats) & ((tl.load(bits + row) & REPLACED) == 0):
        history = token_ids + slot * token_stride
        known, prompt_len = tl.load(positions + row).to(tl.int32), tl.load(ints + slot * ints_stride + 2)
        presence, frequency, repetition = tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5)
        logits += row * logits_stride
        overlay += row * PADDED
        changed += row * (PADDED // 32)
        lower, upper = part * span, tl.minimum((part + 1) * span, vocab)
        i = tl.arange(0, H)
        end = tl.minimum((part + 1) * span, PADDED) // 32
        for first in range(lower // 32, end, H):
            tl.store(changed + first + i, tl.zeros([H], tl.int32), mask=first + i < end)
        for first in range(0, known, H):
            token = tl.load(history + first + i, mask=first + i < known, other=-1)
            tl.store(overlay + token, tl.zeros([H], tl.int32), mask=(token >= lower) & (token < upper))
        tl.debug_barrier()
        for first in range(0, known, H):
            token = tl.load(history + first + i, mask=(first + i >= prompt_len) & (first + i < known), other=-1)
            tl.atomic_add(overlay + token, 1, mask=(token >= lower) & (token < upper), sem="relaxed")
        tl.debug_barrier()
        for first in range(0, known, H):
            token = tl.load(history + first + i, mask=first + i < known, other=-1)
            mine = (token >= lower) & (token < upper)
            value = tl.load(logits + token, mask=mine, other=0.0).to(tl.float32)
            bit = tl.full([H], 1, tl.int32) << (token & 31)
            before = tl.atomic_or(changed + (token >> 5), bit, mask=mine, sem="relaxed")
            mine = mine & ((before & bit) == 0)
            count = tl.load(overlay + token, mask=mine, other=0, cache_modifier=".cg").to(tl.float32)
            value = tl.where(value > 0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
            value -= frequency * count
            value -= tl.where(count > 0, presence, 0.0)
            tl.store(overlay + token, value.to(tl.int32, bitcast=True), mask=mine)


@triton.jit
def _block_mass(value, best, scale):
    """The sum of exponentials of each block of a tile, in units of the block's largest."""
    base = tl.where(best > float("-inf"), best, 0.0)
    return tl.sum(tl.exp2((value - base[:, None]) * scale), 1)


@triton.jit
def _highest_bound(value, token, scale, k0, k1, k2, k3):
    """What the scores of a tile's blocks do not exceed, in units of log2: those of `-log E <= -log u`, for small `u` nearly equal.

    The logarithm is the one that a float's exponent and mantissa are, at most 0.086 too small.
    """
    word = mix(token.to(tl.uint32), k0, k1, k2, k3).to(tl.float32)
    return tl.max(value * scale + (159.0 - word.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07), 1)


@triton.jit(do_not_specialize=["tiles", "all_tiles", "penalised", "mask_stride"])
def scan_kernel(
    logits, bits, slots, positions, floats, ints, keys, mask, overlay, changed, blocks,
    vocab, tiles, all_tiles, penalised, logits_stride, mask_stride, floats_stride, ints_stride, keys_stride, greedy_below,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part) of `tiles` tiles: the tables of its blocks, as far as the row can need them."""
    begin_dependent(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * tiles
    last = tl.minimum(first + tiles, all_tiles)
    within = tl.arange(0, TILE)
    token = tokens_of(first * TILE + within, BLOCK)
    coming = tl.load(logits + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
    row_bits = tl.load(bits + row)
    slot = tl.load(slots + row).to(tl.int64)
    floats += slot * floats_stride
    temperature, top_k = tl.load(floats), tl.load(ints + slot * ints_stride)
    k0, k1, k2, k3 = row_key(keys + slot * keys_stride, tl.load(positions + row))
    is_raced = (temperature >= greedy_below) & ((top_k <= 0) | (top_k >= vocab))
    scale = LOG2_E / tl.where(is_raced, temperature, 1.0)
    is_reported = (row_bits & REPORTED) != 0
    source = row_source(
        row, logits, overlay, changed, mask, row_bits, floats, penalised, vocab, logits_stride, mask_stride, PADDED
    )
    blocks += row * (BLOCK_TABLES * BLOCKS)
    for tile in range(first, last):
        block = tile * TILE + within
        token = tokens_of(block, BLOCK)
        value = coming.to(tl.float32)
        after = tokens_of(block + TILE, BLOCK)
        coming = tl.load(source[0] + after, mask=(after < vocab) & (tile + 1 < last), other=float("-inf"))
        if is_reported:
            best = tl.max(value, 1)
            tl.store(blocks + RAW_BEST * BLOCKS + block, best)
            tl.store(blocks + RAW_MASS * BLOCKS + block, _block_mass(value, best, LOG2_E))
        value = adjusted(value, source, block, BLOCK)
        best = tl.max(value, 1)
        tl.store(blocks + BEST * BLOCKS + block, best)
        if is_raced:
            tl.store(blocks + MASS * BLOCKS + block, _block_mass(value, best, scale))
            tl.store(blocks + BOUND * BLOCKS + block, _highest_bound(value, token, scale, k0, k1, k2, k3))


@triton.jit
def _reach(bits, weight, target, LAST: tl.constexpr):
    """`distance_reaching` as fp32, rounded up a little; infinity if all together do not reach the target."""
    reach = distance_reaching(bits, weight, target, LAST)
    return tl.minimum(reach, 0x7F800000).to(tl.float32, bitcast=True) * 1.00001


@triton.jit
def row_task(
    blocks, best, temperature, top_p, min_p, top_k, vocab, greedy_below, BLOCKS: tl.constexpr, FEW_BLOCKS: tl.constexpr
):
    """What has to be done for a row whose blocks are known.

    Returns:
        the task; the distance up to which tokens are collected (`FILTER`, a little generous), or the score from which on they are
        (`RACE`); the row's mass in units of its likeliest token, for rows without top-k.
    """
    task, level, mass = DONE, tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if (tl.abs(best) < float("inf")) & (temperature >= greedy_below):
        i = tl.arange(0, BLOCKS)
        scaled = (tl.load(blocks + BEST * BLOCKS + i) - best) * (1.0 / temperature)
        bits = distance_bits(scaled)
        if (top_k > 0) & (top_k < vocab):
            task = tl.where(top_k <= _LARGEST_K, FILTER, SLOW)
            level = _reach(bits, tl.full([BLOCKS], 1, tl.int32), top_k, 15)
        else:
            share = tl.exp(scaled)
            weight = tl.where(scaled > float("-inf"), share * tl.load(blocks + MASS * BLOCKS + i), 0.0)
            mass = tl.sum(weight, 0)
            wanted, reach, log_mean = mass, float("inf"), _LOG_MEAN
            if top_p < 1.0:
                # The largest of some blocks alone are enough for the nucleus: no token of it is farther than they are.
                wanted = top_p * mass
                reach = _reach(bits, share, wanted, 17)
            # The likeliest token, of mass 1, is never removed.
            wanted = tl.maximum(wanted, 1.0)
            if min_p > 0.0:
                border = 1e-3 - tl.log(min_p)
                wanted = tl.minimum(wanted, tl.sum(tl.where(scaled >= -border, weight, 0.0), 0))
                reach = tl.minimum(reach, border)
                log_mean = _LOG_MEAN_OF_MIN_P
            is_few = tl.sum((scaled >= -reach).to(tl.int32), 0) <= FEW_BLOCKS
            is_few = is_few & (reach < float("inf"))
            task = tl.where(is_few, FILTER, RACE)
            level = tl.where(is_few, reach, tl.log(wanted) - log_mean)
    return task, level, mass
