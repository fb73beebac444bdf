"""Dequantization of ggml's super-blocks of 256 elements: the K-quants and `IQ4_XS`.

A super-block has fp16 scales for the whole and small integer scales for its parts: 8 of 32 elements in `Q4_K`, `Q5_K` and `IQ4_XS`,
16 of 16 elements in the others. Layouts are those of ggml (`ggml-common.h`, `ggml-quants.c`); offsets below are bytes of a block.
Every function takes blocks `[n, block_bytes]` and fills `out`, `[n, 256]`.
"""

from __future__ import annotations

import numpy as np

from octavo.models.weights.storage_bits import Bytes, Floats, fields, half

NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
"""The values that the 4-bit codes of `IQ4_NL` and `IQ4_XS` stand for."""


def q2_k(blocks: Bytes, out: Floats) -> None:
    """Scales and minima in nibbles 0–15, 2-bit codes 16–79, d 80, dmin 82."""
    parts = out.reshape(-1, 16, 16)
    out.reshape(-1, 2, 4, 32)[...] = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    parts *= (half(blocks[:, 80:82]) * (blocks[:, :16] & 15))[:, :, None]
    parts -= (half(blocks[:, 82:84]) * (blocks[:, :16] >> 4))[:, :, None]


def q3_k(blocks: Bytes, out: Floats) -> None:
    """Third bits 0–31, low 2 bits 32–95, 6-bit scales 96–107, d 108; a third bit of 0 means minus 4."""
    low = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 256)
    third = fields(blocks[:, :32].reshape(-1, 1, 32), 1).reshape(-1, 256)
    out[...] = low | (third << 2)
    out -= 4
    parts = out.reshape(-1, 16, 16)
    parts *= (half(blocks[:, 108:110]) * _q3_scales(blocks[:, 96:108]))[:, :, None]


def _q3_scales(packed: Bytes) -> Floats:
    """`[n, 12]` to `[n, 16]`: nibbles of the first eight bytes, their upper two bits in the last four; biased by 32."""
    low = fields(packed[:, None, :8], 4).reshape(-1, 16)
    high = fields(packed[:, None, 8:], 2).reshape(-1, 16)
    return (low | (high << 4)).astype(np.float32) - 32


def q4_k(blocks: Bytes, out: Floats) -> None:
    """d 0, dmin 2, 6-bit scales and minima 4–15, 4-bit codes 16–143."""
    out.reshape(-1, 4, 2, 32)[...] = fields(blocks[:, 16:].reshape(-1, 4, 32), 4)
    _scale_and_shift(blocks, out)


def q5_k(blocks: Bytes, out: Floats) -> None:
    """d 0, dmin 2, 6-bit scales and minima 4–15, fifth bits 16–47, low 4 bits 48–175."""
    low = fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 256)
    fifth = fields(blocks[:, 16:48].reshape(-1, 1, 32), 1).reshape(-1, 256)
    out[...] = low | (fifth << 4)
    _scale_and_shift(blocks, out)


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    """Codes to values in `Q4_K` and `Q5_K`, whose first 16 bytes are alike."""
    scales, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([scales & 63, (rest & 15) | (scales >> 2 & 48)], axis=1)
    minimum = np.concatenate([minima & 63, (rest >> 4) | (minima >> 2 & 48)], axis=1)
    parts = out.reshape(-1, 8, 32)
    parts *= (half(blocks[:, :2]) * scale)[:, :, None]
    parts -= (half(blocks[:, 2:4]) * minimum)[:, :, None]


def q6_k(blocks: Bytes, out: Floats) -> None:
    """Low 4 bits 0–127, high 2 bits 128–191, signed scales 192–207, d 208; codes are biased by 32."""
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    out[...] = low | (high << 4)
    out -= 32
    parts = out.reshape(-1, 16, 16)
    parts *= (half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8))[:, :, None]


def iq4_xs(blocks: Bytes, out: Floats) -> None:
    """d 0, upper 2 bits of the scales 2–3, their low 4 bits 4–7, codes 8–135; scales are biased by 32."""
    low = fields(blocks[:, 4:8, None], 4).reshape(-1, 8)
    high = fields(blocks[:, 2:4, None], 2).reshape(-1, 8)
    scale = (low | (high << 4)).astype(np.float32) - 32
    parts = out.reshape(-1, 8, 32)
    np.take(NON_LINEAR, fields(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32), out=parts, mode="clip")
    parts *= (half(blocks[:, :2]) * scale)[:, :, None]
