"""Log-probabilities of the model's own distribution: of the sampled token, its rank, and of the likeliest ones.

One program a row reads the tables that the scan made of the logits as they came, and the few blocks that matter again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.launch import begin_dependent
from octavo.kernels.race import NO_TOKEN
from octavo.kernels.sampling_choose import list_blocks
from octavo.kernels.sampling_scan import BLOCK_TABLES, RAW_BEST, RAW_MASS, tokens_of


@triton.jit
def _key(value):
    """Words whose unsigned order is the falling order of fp32."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 equals 0.0
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _smallest_reaching(key, count):
    """The smallest word that `count` of the keys, uint32 `[SIZE]`, do not exceed; the largest word if they are fewer."""
    found, one = tl.full([], 0, tl.uint32), tl.full([], 1, tl.uint32)
    for step in range(32):
        place = one << (31 - step)
        reached = tl.sum((key <= found + (place - 1)).to(tl.int32), 0)
        found += (reached < count).to(tl.uint32) * place
    return found


@triton.jit
def _blocks_of_likeliest(raw_best, wanted):
    """Bool `[BLOCKS]`: the first `wanted` blocks in falling order of their largest logit, of equal ones in rising order.

    The `wanted` likeliest tokens are in them: before a token of another block come the largest of all of these.
    """
    key = _key(raw_best)
    limit = _smallest_reaching(key, wanted)
    is_at = key == limit
    room = wanted - tl.sum((key < limit).to(tl.int32), 0)
    return (key < limit) | (is_at & (tl.cumsum(is_at.to(tl.int32), 0) <= room))


@triton.jit
def _listed_logits(logits, places, first, listed, vocab, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens, logits and which there are, `[TILE, BLOCK]`, of listed blocks from the `first` on."""
    at = first + tl.arange(0, TILE)
    token = tokens_of(tl.load(places + at, mask=at < listed, other=0), BLOCK)
    inside = (at < listed)[:, None] & (token < vocab)
    return token, tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32), inside


@triton.jit(do_not_specialize=["wanted"])
def report_kernel(
    logits, which, out, blocks, places, ids, logprobs, ranks, vocab, wanted, logits_stride,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program of a reported row. `TOP` is a power of two, at least `wanted`; 0 if no likeliest tokens are."""
    begin_dependent(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(which + i).to(tl.int64)
    logits += row * logits_stride
    blocks += row * (BLOCK_TABLES * BLOCKS)
    places += row * (2 * BLOCKS)
    raw_best = tl.load(blocks + RAW_BEST * BLOCKS + tl.arange(0, BLOCKS))
    best = tl.max(raw_best, 0)
    mass = tl.load(blocks + RAW_MASS * BLOCKS + tl.arange(0, BLOCKS))
    mass = tl.sum(tl.where(raw_best > float("-inf"), tl.exp(raw_best - best) * mass, 0.0), 0)
    norm = tl.log(mass)
    drawn = tl.load(out + row)
    own = tl.load(logits + drawn).to(tl.float32)
    ids += i * (1 + wanted)
    logprobs += i * (1 + wanted)
    tl.store(ids, drawn.to(tl.int32))
    tl.store(logprobs, own - best - norm)
    listed = list_blocks(places, raw_best > own, BLOCKS)
    above = tl.zeros([TILE, BLOCK], tl.int32)
    for first in range(0, listed, TILE):
        _token, value, _inside = _listed_logits(logits, places, first, listed, vocab, TILE, BLOCK)
        above += (value > own).to(tl.int32)
    tl.store(ranks + i, 1 + tl.sum(tl.sum(above, 1), 0))
    if TOP > 0:
        listed = list_blocks(places, _blocks_of_likeliest(raw_best, wanted), BLOCKS)
        token, value, inside = _listed_logits(logits, places, 0, listed, vocab, TOP, BLOCK)
        last, last_token = float("inf"), -1
        for place in range(wanted):
            is_left = inside & ((value < last) | ((value == last) & (token > last_token)))
            last = tl.max(tl.max(tl.where(is_left, value, float("-inf")), 1), 0)
            last_token = tl.min(tl.min(tl.where(is_left & (value == last), token, NO_TOKEN), 1), 0)
            tl.store(ids + 1 + place, last_token)
            tl.store(logprobs + 1 + place, last - best - norm)
