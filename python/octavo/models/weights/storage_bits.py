"""Bit fields of stored blocks, unpacked by numpy; shared by the storage types."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


def half(columns: Bytes) -> Floats:
    """Two bytes per block, `[n, 2]`, to one fp32 column, `[n, 1]`."""
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


def fields(packed: Bytes, bits: int) -> Bytes:
    """`[n, g, w]` bytes of `8 / bits` fields each to `[n, g, 8 / bits, w]` values, the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return (packed[:, :, None, :] >> shifts) & np.uint8((1 << bits) - 1)
