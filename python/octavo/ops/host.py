"""From stored tensors to torch tensors: what every torch op set does when it loads weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.ops.base import MadeTensor, StoredTensor
from octavo.ops.upload import uploader

_PIECE_BYTES = 16 << 20


def read_vector(source: StoredTensor, device: torch.device, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """The vector plus `offset`."""
    vector = torch.from_numpy(source.float32()) + offset
    source.release()
    return vector.to(device, dtype)


def read_matrix(parts: Sequence[StoredTensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The parts, each `[out_i, in]`, dequantized and stacked; needs the result and one piece of 16 MiB at a time.

    Raises:
        ValueError: the parts' inputs differ.
    """
    width = parts[0].shape[1]
    if any(part.shape[1] != width for part in parts):
        raise ValueError(f"weights {[part.name for part in parts]} have inputs {[part.shape[1] for part in parts]}")
    result = torch.empty(sum(part.shape[0] for part in parts), width, device=device, dtype=dtype)
    read_into(parts, result)
    return result


def read_into(parts: Sequence[StoredTensor], out: Tensor) -> None:
    """Dequantizes the parts, each `[out_i, in]`, into `out` `[Σ out_i, in]`, one below the other, 16 MiB at a time a thread."""
    places = out.split([part.shape[0] for part in parts])
    stored = [(part, place) for part, place in zip(parts, places, strict=True) if not isinstance(part, MadeTensor)]
    for part, place in zip(parts, places, strict=True):
        if isinstance(part, MadeTensor):
            part.fill(place)
    if out.device.type == "cuda":
        uploader(out.device).upload(stored)
        return
    step = max(1, _PIECE_BYTES // (4 * out.shape[1]))
    for part, place in stored:
        for start in range(0, part.shape[0], step):
            stop = min(start + step, part.shape[0])
            place[start:stop] = torch.from_numpy(part.float32(start, stop))
            part.release(stop)
        part.release()


def read_bias(biases: Sequence[StoredTensor], device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The biases one after another, or None."""
    return torch.cat([read_vector(bias, device, dtype) for bias in biases]) if biases else None


def rope_angles(variants: Sequence[Sequence[float]], magnitude: float, max_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[max_positions * len(variants), len(inv_freq)]` times `magnitude`; angles are fp32, as in training."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.cat([torch.outer(positions, torch.tensor(inv_freq)) for inv_freq in variants]).double()
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def lazy_zeros(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. On the CPU they are pages that the system maps when first written, so a large cache costs nothing at the start."""
    if device.type != "cpu":
        return torch.zeros(*shape, device=device, dtype=dtype)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(*shape)
