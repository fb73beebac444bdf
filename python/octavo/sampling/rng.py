"""Random numbers without state: each is a pure function of (seed, choice, domain, position, token id).

Three levels, from once per request to once per token:

1. *slot key* (four words): Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC '11) with
   the seed as key and (choice, domain, 0, 0) as counter. Computed on the host when a request gets its slot.
2. *row key* (four words): ``mix(slot key, 4 * position + i)``. Computed on the device for each row of a step.
3. *bits* of a token: ``mix(row key, token id)``.

``mix`` is an iterated Even-Mansour permutation of 32-bit words: the rounds and constants are those of Wellons'
``triple32`` (the hash of lowest known bias that fits a 32-bit word, github.com/skeeto/hash-prospector), with one key
word added or XORed in each round. It needs 32-bit products only, so it costs the same in torch, Triton and SIMD code,
and about a tenth of Philox per token. Positions are below 2**30. ``rust/core/src/rng.rs`` is its twin;
``tests/vectors/rng.json`` binds the two.
"""

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK: Final = 0xFFFF_FFFF
_PHILOX_MULTIPLIERS: Final = (0xD251_1F53, 0xCD9E_8D57)
_PHILOX_WEYL: Final = (0x9E37_79B9, 0xBB67_AE85)
_PHILOX_ROUNDS: Final = 10

_LARGEST_UNIFORM: Final = 1.0 - 2.0**-24  # float32 would round the last 128 words up to 1


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word; torch has no arithmetic on uint32."""
    return word - (1 << 32) if word >> 31 else word


# (right shift, multiplier) of each round of `triple32`, and its last shift.
ROUNDS: Final = ((17, 0xED5A_D4BB), (11, 0xAC4C_1B51), (15, 0x3184_8BAB))
LAST_SHIFT: Final = 14
_SIGNED_ROUNDS: Final = tuple((shift, _signed(factor)) for shift, factor in ROUNDS)


class Domain(IntEnum):
    """What a number is drawn for; the same position never shares numbers between domains."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter, in unsigned 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        p0 = c0 * _PHILOX_MULTIPLIERS[0]
        p1 = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _PHILOX_WEYL[0]) & _MASK
        k1 = (k1 + _PHILOX_WEYL[1]) & _MASK
    return c0, c1, c2, c3


def slot_keys(seed: int, choice: int) -> npt.NDArray[np.int32]:
    """The slot keys of all four domains of one request's choice.

    Args:
        seed: any integer; only its low 64 bits count.
        choice: the index among the request's ``n`` choices.

    Returns:
        int32 ``[4 domains, 4 words]``, unsigned words by their bits.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    words = [philox4x32((choice & _MASK, int(domain), 0, 0), key) for domain in Domain]
    return np.array(words, dtype=np.uint32).view(np.int32)


def _xor_shift_(x: Tensor, shift: int, scratch: Tensor) -> None:
    """``x ^= x >> shift`` with a logical shift: torch's shift of int32 copies the sign, the mask removes it."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    x.bitwise_xor_(scratch)


def mix(keys: Tensor, words: Tensor) -> Tensor:
    """The keyed permutation, elementwise over a broadcast of rows and words.

    Args:
        keys: int32 ``[n, 4]``, a key per row.
        words: int32 ``[n, m]`` or ``[m]``, what is mixed.

    Returns:
        int32 ``[n, m]``: 32 random bits each.
    """
    k0, k1, k2, k3 = keys[:, :, None].unbind(1)
    x = words + k0
    scratch = torch.empty_like(x)
    (shift0, factor0), (shift1, factor1), (shift2, factor2) = _SIGNED_ROUNDS
    _xor_shift_(x, shift0, scratch)
    x.mul_(factor0).bitwise_xor_(k1)
    _xor_shift_(x, shift1, scratch)
    x.mul_(factor1).add_(k2)
    _xor_shift_(x, shift2, scratch)
    x.mul_(factor2).bitwise_xor_(k3)
    _xor_shift_(x, LAST_SHIFT, scratch)
    return x


def row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """The key of each row of a step.

    Args:
        keys: int32 ``[n, 4]``, slot keys of one domain.
        positions: integers ``[n]``, the index in the sequence of the token to be drawn, below 2**30.

    Returns:
        int32 ``[n, 4]``.
    """
    lanes = torch.arange(4, dtype=torch.int32, device=keys.device)
    return mix(keys, positions.to(torch.int32)[:, None] * 4 + lanes)


def uniform(bits: Tensor) -> Tensor:
    """float32 in the open interval (0, 1): ``(x + 1/2) * 2**-32`` of the unsigned word ``x`` behind each int32."""
    return bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential float32 numbers, ``-log1p(-uniform)``: exact in the small values, which win races."""
    return uniform(bits).neg_().log1p_().neg_()


def race(logits: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    """Scores whose argmax is a draw from ``softmax(logits)`` (the Gumbel-max trick, Maddison et al. 2014).

    Args:
        logits: float32 ``[n, m]``, log-probabilities up to a constant per row; -inf excludes a token.
        keys: int32 ``[n, 4]``, row keys.
        token_ids: int32 ``[n, m]`` or ``[m]``, the token behind each column.

    Returns:
        float32 ``[n, m]``: ``logits - log E``.
    """
    return torch.sub(logits, exponential(mix(keys, token_ids)).log_())
