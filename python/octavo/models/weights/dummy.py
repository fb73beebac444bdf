"""Random weights in the place of a checkpoint, for measuring speed without one (`load_format="dummy"`)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from octavo.ops.base import StoredTensor

# Keeps activations of any depth far from the limits of the 16-bit types.
_DEVIATION: Final = 0.02


class DummyTensor:
    """A `StoredTensor` of normal random numbers, the same for the same name; weights of norms are 1."""

    storage = "F32"

    def __init__(self, name: str, shape: tuple[int, ...]):
        self.name = name
        self.shape = shape

    @property
    def num_bytes(self) -> int:
        """As a checkpoint of 16-bit weights would have."""
        return 2 * int(np.prod(self.shape, dtype=np.int64))

    def float32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `start:stop`."""
        shape = (len(range(*slice(start, stop).indices(self.shape[0]))), *self.shape[1:])
        if self._is_norm:
            return np.ones(shape, dtype=np.float32)
        random = np.random.default_rng([self._seed, start]).standard_normal(shape, dtype=np.float32)
        return random * np.float32(_DEVIATION)

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """`float32(start, stop)` as bytes, `[stop - start, bytes per row]`."""
        return self.float32(start, stop).reshape(stop - start, -1).view(np.uint8)

    def fill(self, out: Any) -> None:
        """Writes the torch tensor `out` of `shape` where it is: no copy from the host, other numbers than `float32`."""
        import torch  # noqa: PLC0415 - formats are read without torch

        generator = torch.Generator(out.device).manual_seed(self._seed)
        if self._is_norm:
            out.fill_(1.0)
        else:
            out.normal_(0.0, _DEVIATION, generator=generator)

    def release(self, stop: int | None = None) -> None:
        """Nothing is mapped."""

    @property
    def _is_norm(self) -> bool:
        return self.name.endswith("norm.weight")

    @property
    def _seed(self) -> int:
        return zlib.crc32(self.name.encode())


class DummyWeights:
    """A `WeightSource` that has every tensor it is asked for."""

    def __init__(self, path: Path):
        self.path = path
        self._bytes: dict[str, int] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Random numbers of that shape."""
        made = DummyTensor(name, shape)
        self._bytes[name] = made.num_bytes
        return made

    def parts(self, prefix: str, fused: str, parts: Mapping[str, int], width: int) -> list[StoredTensor]:
        """One tensor for all parts."""
        return [self.tensor(f"{prefix}.{fused}.weight", (sum(parts.values()), width))]

    def experts(self, prefix: str, part: str, count: int, shape: tuple[int, int]) -> list[StoredTensor]:
        """One tensor for each expert."""
        return [self.tensor(f"{prefix}.experts.{index}.{part}.weight", shape) for index in range(count)]

    def file_name(self, name: str) -> str | None:
        """The decoder's own name."""
        return name

    def used_bytes(self) -> int:
        """Bytes of the tensors handed out so far, in 16 bits each."""
        return sum(self._bytes.values())

    def unused(self, ignore: Iterable[str] = ()) -> list[str]:
        """None: there is nothing but what was asked for."""
        return []
