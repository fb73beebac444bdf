"""What the sampling kernels compute of single tokens and of few: random numbers, scores of a race, thresholds among distances.

The numbers are those of `octavo.sampling.rng`, whose functions are repeated here in Triton's language. A *distance* is how far a
scaled logit is below the row's largest, fp32 and not negative, so distances are ordered as the integers of their bits are.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Behind every distance: that of a masked token is infinity, 0x7F800000.
FARTHEST = tl.constexpr(0x7FFFFFFF)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mix(word, k0, k1, k2, k3):
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
def row_key(keys, position):
    """`rng.row_keys` of one row: `keys` points to the slot key's four words."""
    s0 = tl.load(keys).to(tl.uint32, bitcast=True)
    s1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    s2 = tl.load(keys + 2).to(tl.uint32, bitcast=True)
    s3 = tl.load(keys + 3).to(tl.uint32, bitcast=True)
    first = position.to(tl.uint32) * 4
    k0 = mix(first, s0, s1, s2, s3)
    k1 = mix(first + 1, s0, s1, s2, s3)
    k2 = mix(first + 2, s0, s1, s2, s3)
    k3 = mix(first + 3, s0, s1, s2, s3)
    return k0, k1, k2, k3


@triton.jit
def log_exponential(bits):
    """The logarithm of `rng.exponential`; `log1p(-u) = log(w) * -u / (1 - w)` with `w = 1 - u` rounded (Kahan)."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    w = 1.0 - u
    near = w == 1.0
    ratio = u / tl.where(near, 1.0, 1.0 - w)
    return tl.log(tl.where(near, u, -tl.log(w) * ratio))


@triton.jit
def scaled_logit(value, best, temperature):
    """`(value - best) / temperature`, rounded as torch rounds it."""
    below = value - best
    return tl.div_rn(below, tl.zeros_like(below) + temperature)


@triton.jit
def distance_bits(scaled):
    """The distance's bits, int32."""
    return (0.0 - scaled).to(tl.int32, bitcast=True)


@triton.jit
def winner_of(score, token, scaled):
    """The largest score of a tile, its token (of equal scores the smallest) and that token's scaled logit."""
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token, NO_TOKEN), 0)
    return best, winner, tl.max(tl.where(token == winner, scaled, float("-inf")), 0)


@triton.jit
def distance_reaching(distance, weight, target, LAST: tl.constexpr):
    """The smallest distance up to which the weights add up to `target`, of bits int32 `[SIZE]`; `FARTHEST` if all together do not.

    Bits below `LAST` are all ones.
    """
    unsigned = distance.to(tl.uint32)
    found, one = tl.full([], 0, tl.uint32), tl.full([], 1, tl.uint32)
    for step in range(31 - LAST):
        place = one << (30 - step)
        total = tl.sum(tl.where(unsigned <= found + place - 1, weight, 0), 0)
        found += (total < target).to(tl.uint32) * place
    return tl.minimum(found + ((1 << LAST) - 1), FARTHEST).to(tl.int32)
