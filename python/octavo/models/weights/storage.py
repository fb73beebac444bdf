"""Storage types of checkpoints and their dequantization to fp32, vectorised over all blocks.

The block layouts are those of ggml (`ggml-common.h`): blocks of 32 elements along the rows, low nibbles hold elements
0–15, high nibbles 16–31; the fifth bits of `Q5_*` are a little-endian 32-bit word, bit `i` for element `i`; scales are
fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StorageType:
    """How many elements a block holds, in how many bytes, and how to make them fp32.

    `decode` takes blocks as `[n, block_bytes]` and returns `[n, block_elements]`.
    """

    block_elements: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]


def _half(columns: Bytes) -> Floats:
    """Two bytes per block to one fp32 column."""
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> npt.NDArray[np.uint8]:
    """`[n, 16]` to `[n, 32]` values 0–15."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> npt.NDArray[np.uint8]:
    """`[n, 4]` to `[n, 32]` values 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32).copy()


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8)


STORAGE: dict[str, StorageType] = {
    "F32": StorageType(1, 4, _f32),
    "F16": StorageType(1, 2, _half),
    "BF16": StorageType(1, 2, _bf16),
    "Q4_0": StorageType(32, 18, _q4_0),
    "Q4_1": StorageType(32, 20, _q4_1),
    "Q5_0": StorageType(32, 22, _q5_0),
    "Q5_1": StorageType(32, 24, _q5_1),
    "Q8_0": StorageType(32, 34, _q8_0),
}


def dequantize(data: Bytes, storage: str) -> Floats:
    """All elements of `data`, whole blocks of type `storage` in C order, as a flat fp32 array of its own."""
    kind = STORAGE[storage]
    return kind.decode(data.reshape(-1, kind.block_bytes)).reshape(-1)
