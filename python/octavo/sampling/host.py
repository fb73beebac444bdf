"""The expensive parts of sampling for a CPU, in NumPy: its sorts, searches and integer products use SIMD where torch's do not.

Each function has a twin for accelerators (`rng.row_keys`, `rng.race` with an argmax, `logprobs.sorted_ids`) and gives what that
gives, but may look at data to do less: tokens that cannot win a race are never given a logarithm, the others get it in float64.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.sampling import rng

# Elements hashed at a time: scratch stays in a core's second-level cache.
_TILE_ELEMENTS: Final = 1 << 16

UInt32Array = npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def argmax(values: Tensor) -> Tensor:
    """int64 `[m]`: the first of the largest of each row of `[m, V]`, any NaN before all."""
    return torch.from_numpy(values.numpy().argmax(axis=-1))


def largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row of float32 `[m, V]`, falling."""
    array = values.numpy()
    rest = array.shape[1] - count
    head = np.sort(np.partition(array, rest, axis=1)[:, rest:] if rest else array, axis=1)
    return torch.from_numpy(head[:, ::-1].copy())


def likeliest(values: Tensor, count: int) -> Tensor:
    """Ids int64 `[m, count]` of the largest values of float32 `[m, V]`, falling; equal values by rising id, NaN last."""
    values = values.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    array = values.numpy()
    border = largest(values, count)[:, -1:].numpy()
    row, token = _where(array >= border)
    order = np.lexsort((token, -array[row, token], row))
    starts = np.searchsorted(row, np.arange(len(array)))
    return torch.from_numpy(token[order][starts[:, None] + np.arange(count)])


def row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """The key of each row, int32 `[n, 4]`, of slot keys int32 `[n, 4]` and positions int64 `[n]`."""
    first: UInt32Array = positions.numpy().astype(np.uint32)[:, None]
    lanes = np.left_shift(first, np.uint32(2)) + np.arange(4, dtype=np.uint32)
    return torch.from_numpy(_mix(keys.numpy().view(np.uint32), lanes).view(np.int32))


def race(scaled: Tensor, keys: Tensor, threshold: Tensor | None) -> Tensor:
    """Draws from `softmax` of each row, of what reaches a threshold.

    Args:
        scaled: float32 `[m, V]`; the largest of each row is 0. (A row with NaN gets any token.)
        keys: int32 `[m, 4]`, row keys.
        threshold: float32 `[m]`, or `None` for everything.

    Returns:
        int64 `[m]`.
    """
    logits, words = scaled.numpy(), keys.numpy().view(np.uint32)
    if threshold is not None:
        row, token = _where(logits >= threshold.numpy()[:, None])
        bits = _mix(words[row], token.astype(np.uint32)[:, None])[:, 0]
        return torch.from_numpy(_winners(len(logits), row, token, logits[row, token] + _noise(bits)))
    tile = max(1, _TILE_ELEMENTS // logits.shape[1])
    winners = [_race_all(logits[i : i + tile], words[i : i + tile]) for i in range(0, len(logits), tile)]
    return torch.from_numpy(np.concatenate(winners))


def _race_all(logits: Float32Array, keys: UInt32Array) -> Int64Array:
    """The race of all tokens of a few rows.

    The likeliest token has the logit 0 and the score `-log E`. A token of logit `l` with the word `x` has an exponential above
    `x / 2**32`, so it can win only if `log2 x <= l log2 e + log2 E + 32`. The exponent and mantissa of the float `x`, read as
    one integer, are `log2 x` but for up to 0.09 too little (Mitchell 1962), which lets a few more pass and loses none.
    """
    rows = np.arange(len(logits))
    best = logits.argmax(axis=1)
    bits = _mix(keys, np.arange(logits.shape[1], dtype=np.uint32)[None])
    log2_x = bits.astype(np.float32).view(np.int32).astype(np.float32)
    # In units of the last place of the mantissa, with the exponent's bias; 0.001 is beyond any rounding.
    mark = (-_noise(bits[rows, best]) / np.log(2) + 32 + 127 + 0.001) * 2**23
    bound = logits * np.float32(2**23 / np.log(2))
    bound += mark.astype(np.float32)[:, None]
    may_win = log2_x <= bound
    may_win[rows, best] = True
    row, token = _where(may_win)
    return _winners(len(logits), row, token, logits[row, token] + _noise(bits[row, token]))


def _where(mask: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """`mask.nonzero()` of `[m, V]`; several times faster where few are set."""
    return np.divmod(np.flatnonzero(mask), mask.shape[1])


def _mix(keys: UInt32Array, words: UInt32Array) -> UInt32Array:
    """`rng.mix` in unsigned words: keys `[m, 4]`, words `[m or 1, V]`."""
    k0, k1, k2, k3 = (keys[:, i : i + 1] for i in range(4))
    x = words + k0
    scratch = np.empty_like(x)
    joins = ((k1, np.bitwise_xor), (k2, np.add), (k3, np.bitwise_xor))
    for (shift, factor), (key, join) in zip(rng.ROUNDS, joins, strict=True):
        np.right_shift(x, np.uint32(shift), out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        np.multiply(x, np.uint32(factor), out=x)
        join(x, key, out=x)
    np.right_shift(x, np.uint32(rng.LAST_SHIFT), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    return x


def _noise(bits: UInt32Array) -> Float64Array:
    """`-log E` of each word, which makes a race of logits."""
    noise: Float64Array = -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))
    return noise


def _winners(count: int, row: Int64Array, token: Int64Array, scores: Float64Array) -> Int64Array:
    """The first token of the best score of each row; entries are sorted by row, then token. 0 for a row without entries."""
    winners = np.zeros(count, dtype=np.int64)
    # Backwards and the worst first: the last write of a row, its first and best token, stays.
    order = np.lexsort((-token, scores, row))
    winners[row[order]] = token[order]
    return winners
