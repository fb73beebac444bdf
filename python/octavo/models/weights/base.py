"""What all formats share: a stored tensor over a memory map, and a checkpoint seen under the decoder's names."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.models.weights.storage import STORAGE, dequantize
from octavo.ops.base import StoredTensor

_PIECE_BYTES = 16 << 20


class WeightError(ModelError):
    """A checkpoint that cannot be loaded; the message names the file and the tensor."""


class MappedFile:
    """A file mapped read-only. Pages are dropped by `release` once their tensor is converted."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("rb")
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise WeightError(f"{path}: the file is empty") from error
        self.size = len(self._map)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def read_into(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Read as many bytes as `out` has, from `start` on, without mapping their pages.

        Raises:
            WeightError: the file ends before.
        """
        done, view = 0, out.data
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if count == 0:
                raise WeightError(
                    f"{self.path}: the file ends at byte {start + done}: it was truncated while it was read"
                )
            done += count

    def release(self, start: int, stop: int) -> None:
        """Drop the whole pages inside `start:stop` from this process's memory."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


class MappedTensor:
    """A `StoredTensor` at `offset` of a mapped file."""

    def __init__(self, file: MappedFile, name: str, shape: tuple[int, ...], storage: str, offset: int):
        if storage not in STORAGE:
            raise WeightError(f"{file.path}: tensor {name} is stored as {storage}; supported: {', '.join(STORAGE)}")
        self.name = name
        self.shape = shape
        self.storage = storage
        self._file = file
        self._offset = offset
        kind = STORAGE[storage]
        self._row_elements = int(np.prod(shape[1:], dtype=np.int64)) if len(shape) > 1 else 1
        if len(shape) > 1 and self._row_elements % kind.block_elements:
            raise WeightError(
                f"{file.path}: tensor {name}: rows of {shape[-1]} elements are no multiple of {storage}'s block"
            )
        if len(shape) <= 1 and kind.block_elements > 1:
            raise WeightError(f"{file.path}: tensor {name}: a vector cannot be stored as {storage}")
        self._row_bytes = self._row_elements // kind.block_elements * kind.block_bytes
        self._num_rows = shape[0] if shape else 1
        if offset < 0 or offset + self.num_bytes > file.size:
            raise WeightError(
                f"{file.path}: tensor {name} needs bytes {offset}..{offset + self.num_bytes}, "
                f"the file has {file.size}: it is truncated"
            )

    @property
    def path(self) -> Path:
        """The file that holds the tensor."""
        return self._file.path

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return self._num_rows * self._row_bytes

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """A view of the stored bytes of rows `start:stop`, `[stop - start, bytes per row]`."""
        first, last = self._offset + start * self._row_bytes, self._offset + stop * self._row_bytes
        return self._file.bytes[first:last].reshape(stop - start, self._row_bytes)

    def read_into(self, start: int, stop: int, out: npt.NDArray[np.uint8]) -> None:
        """Read the stored bytes of rows `start:stop` into `out`, contiguous and as large."""
        self._file.read_into(self._offset + start * self._row_bytes, out)

    def float32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `start:stop` dequantized, a fresh array."""
        stop = self._num_rows if stop is None else stop
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        return dequantize(self.rows(start, stop), self.storage).reshape(shape)

    def release(self, stop: int | None = None) -> None:
        """Drop the pages of the rows before `stop` from this process's memory; a later read maps them again."""
        rows = self._num_rows if stop is None else stop
        self._file.release(self._offset, self._offset + rows * self._row_bytes)


class PermutedTensor:
    """Another `StoredTensor` with its rows in another order; rows are whole storage blocks, so no value changes."""

    def __init__(self, source: StoredTensor, order: npt.NDArray[np.int64]):
        self.name, self.shape, self.storage = source.name, source.shape, source.storage
        self._source = source
        self._order = order

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return self._source.num_bytes

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """A copy of the stored bytes of rows `start:stop`, `[stop - start, bytes per row]`."""
        return self._source.rows(0, self.shape[0])[self._order[start:stop]]

    def float32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `start:stop` dequantized, a fresh array."""
        rows = self.rows(start, self.shape[0] if stop is None else stop)
        return dequantize(rows, self.storage).reshape(len(rows), *self.shape[1:])

    def release(self, stop: int | None = None) -> None:
        """Drop the source's pages from this process's memory, if all rows are done: before, any of them may be read again."""
        if stop is None or stop >= self.shape[0]:
            self._source.release()


class StackedSlice:
    """Entry `index` of a stacked `StoredTensor` `[experts, out, in]`, as an `[out, in]` one."""

    def __init__(self, source: StoredTensor, index: int):
        self.name, self.shape, self.storage = f"{source.name}[{index}]", source.shape[1:], source.storage
        self._source = source
        self._index = index

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return self._source.num_bytes // self._source.shape[0]

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """A view of the stored bytes of rows `start:stop`, `[stop - start, bytes per row]`."""
        entry = self._source.rows(self._index, self._index + 1)
        return entry.reshape(self.shape[0], -1)[start:stop]

    def float32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `start:stop` dequantized, a fresh array."""
        rows = self.rows(start, self.shape[0] if stop is None else stop)
        return dequantize(rows, self.storage).reshape(len(rows), *self.shape[1:])

    def release(self, stop: int | None = None) -> None:
        """Drop the pages of this entry and those before it, once all its rows are done."""
        if stop is None or stop >= self.shape[0]:
            self._source.release(self._index + 1)


class Checkpoint(Protocol):
    """A file or folder of tensors under the names it gives them."""

    @property
    def path(self) -> Path:
        """The file or folder."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor that belongs to the checkpoint."""
        ...


class WeightSource(Protocol):
    """A checkpoint under the decoder's names."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of that name; `WeightError` if it is missing or its shape is not `shape`."""
        ...

    def parts(self, prefix: str, fused: str, parts: Mapping[str, int], width: int) -> list[StoredTensor]:
        """Weights `[out_i, width]` that read the same input, in order: one by one, or as the tensor `fused` of some files."""
        ...

    def experts(self, prefix: str, part: str, count: int, shape: tuple[int, int]) -> list[StoredTensor]:
        """The weights `part` of all experts, stored one by one or stacked `[count, *shape]`."""
        ...


class NamedWeights:
    """A checkpoint seen through a family's name map.

    Args:
        checkpoint: the tensors under the file's names.
        name_map: from a name of the decoder to the file's, with `{}` for the numbers of layer and expert in both, e.g.
            `layers.{}.attn_q.weight` → `blk.{}.attn_q.weight`.
        adapt: turns a stored tensor into the decoder's layout (row orders); gets the decoder's name.
        prefixes: beginnings of the file's names to be replaced before they are looked up.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        name_map: Mapping[str, str],
        adapt: Callable[[str, StoredTensor], StoredTensor] | None = None,
        prefixes: Mapping[str, str] | None = None,
    ):
        self.path = checkpoint.path
        self._tensors = {_renamed(name, prefixes or {}): tensor for name, tensor in checkpoint.tensors.items()}
        if len(self._tensors) != len(checkpoint.tensors):
            raise WeightError(
                f"{self.path}: tensors have the same name once their beginnings {list(prefixes or {})} are cut"
            )
        self._name_map = name_map
        self._adapt = adapt
        self._used: set[str] = set()

    def file_name(self, name: str) -> str | None:
        """The checkpoint's name of the decoder's tensor `name`; None if the family has no such tensor."""
        parts = name.split(".")
        numbers = [part for part in parts if part.isdigit()]
        key = ".".join("{}" if part.isdigit() else part for part in parts)
        pattern = self._name_map.get(key)
        return None if pattern is None else pattern.format(*numbers)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the decoder's tensor `name`."""
        return self.file_name(name) in self._tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of that name; `WeightError` if it is missing or its shape is not `shape`."""
        file_name = self.file_name(name)
        stored = None if file_name is None else self._tensors.get(file_name)
        if file_name is None or stored is None:
            raise WeightError(f"{self.path}: tensor {file_name} ({name}) is missing")
        if stored.shape != shape:
            where = getattr(stored, "path", self.path)
            raise WeightError(f"{where}: tensor {file_name} has shape {list(stored.shape)}, expected {list(shape)}")
        self._used.add(file_name)
        return self._adapt(name, stored) if self._adapt is not None else stored

    def equal(self, name: str, other: str) -> bool:
        """Whether the checkpoint holds two tensors of the decoder's and their stored bytes are the same."""
        if not (self.has(name) and self.has(other)):
            return False
        first, second = (self._tensors[str(self.file_name(one))] for one in (name, other))
        if (first.shape, first.storage) != (second.shape, second.storage):
            return False
        rows = first.shape[0]
        step = max(1, _PIECE_BYTES * rows // max(1, first.num_bytes))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            same = np.array_equal(first.rows(start, stop), second.rows(start, stop))
            first.release(stop)
            second.release(stop)
            if not same:
                return False
        return True

    def parts(self, prefix: str, fused: str, parts: Mapping[str, int], width: int) -> list[StoredTensor]:
        """See `WeightSource`."""
        if self.has(f"{prefix}.{fused}.weight"):
            return [self.tensor(f"{prefix}.{fused}.weight", (sum(parts.values()), width))]
        return [self.tensor(f"{prefix}.{name}.weight", (size, width)) for name, size in parts.items()]

    def experts(self, prefix: str, part: str, count: int, shape: tuple[int, int]) -> list[StoredTensor]:
        """See `WeightSource`."""
        if self.has(f"{prefix}.experts.{part}.weight"):
            stack = self.tensor(f"{prefix}.experts.{part}.weight", (count, *shape))
            return [StackedSlice(stack, index) for index in range(count)]
        return [self.tensor(f"{prefix}.experts.{index}.{part}.weight", shape) for index in range(count)]

    def used_bytes(self) -> int:
        """Bytes, as stored, of the tensors handed out so far."""
        return sum(self._tensors[name].num_bytes for name in self._used)

    def unused(self, ignore: Iterable[str] = ()) -> list[str]:
        """Names of the tensors nobody asked for, sorted, without those that contain a word of `ignore`."""
        words = tuple(ignore)
        return sorted(n for n in self._tensors if n not in self._used and not any(w in n for w in words))


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name
