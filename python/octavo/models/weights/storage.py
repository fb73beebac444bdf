"""Storage types of checkpoints and their dequantization to fp32, vectorised over many blocks.

The block layouts are those of ggml (`ggml-common.h`). Here: plain types, and blocks of 32 elements along the rows, in which low
nibbles hold elements 0–15 and high nibbles 16–31; the fifth bits of `Q5_*` are a little-endian 32-bit word, bit `i` for element
`i`; scales are fp16. Super-blocks of 256 are in `storage_k`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.models.weights import storage_k
from octavo.models.weights.storage_bits import Bytes, Floats, fields, half

_CHUNK = 1 << 18
"""Elements decoded at a time: the intermediate arrays of so many stay in the cache."""


@dataclass(frozen=True, slots=True)
class StorageType:
    """How many elements a block holds, in how many bytes, and how to make them fp32.

    `decode` takes blocks as `[n, block_bytes]` and fills `[n, block_elements]`.
    """

    block_elements: int
    block_bytes: int
    decode: Callable[[Bytes, Floats], None]


def _f32(blocks: Bytes, out: Floats) -> None:
    out.view(np.uint8)[...] = blocks


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(blocks).view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(np.ascontiguousarray(blocks).view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _nibbles(packed: Bytes) -> Bytes:
    """`[n, 16]` to `[n, 32]` values 0–15."""
    return fields(packed[:, None], 4).reshape(-1, 32)


def _fifth_bits(packed: Bytes) -> Bytes:
    """`[n, 4]` to `[n, 32]` values 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_nibbles(blocks[:, 2:]), np.float32(8), out=out)
    out *= half(blocks[:, :2])


def _q4_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(half(blocks[:, :2]), _nibbles(blocks[:, 4:]), out=out)
    out += half(blocks[:, 2:4])


def _q5_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), np.float32(16), out=out)
    out *= half(blocks[:, :2])


def _q5_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(half(blocks[:, :2]), _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), out=out)
    out += half(blocks[:, 2:4])


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(half(blocks[:, :2]), blocks[:, 2:].view(np.int8), out=out)


def _iq4_nl(blocks: Bytes, out: Floats) -> None:
    np.take(storage_k.NON_LINEAR, _nibbles(blocks[:, 2:]), out=out, mode="clip")
    out *= half(blocks[:, :2])


STORAGE: dict[str, StorageType] = {
    "F32": StorageType(1, 4, _f32),
    "F16": StorageType(1, 2, _f16),
    "BF16": StorageType(1, 2, _bf16),
    "Q4_0": StorageType(32, 18, _q4_0),
    "Q4_1": StorageType(32, 20, _q4_1),
    "Q5_0": StorageType(32, 22, _q5_0),
    "Q5_1": StorageType(32, 24, _q5_1),
    "Q8_0": StorageType(32, 34, _q8_0),
    "Q2_K": StorageType(256, 84, storage_k.q2_k),
    "Q3_K": StorageType(256, 110, storage_k.q3_k),
    "Q4_K": StorageType(256, 144, storage_k.q4_k),
    "Q5_K": StorageType(256, 176, storage_k.q5_k),
    "Q6_K": StorageType(256, 210, storage_k.q6_k),
    "IQ4_NL": StorageType(32, 18, _iq4_nl),
    "IQ4_XS": StorageType(256, 136, storage_k.iq4_xs),
}


def dequantize(data: Bytes, storage: str) -> Floats:
    """All elements of `data`, whole blocks of type `storage` in C order, as a flat fp32 array of its own."""
    kind = STORAGE[storage]
    blocks = data.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_elements), dtype=np.float32)
    step = _CHUNK // kind.block_elements
    for start in range(0, len(blocks), step):
        kind.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)
