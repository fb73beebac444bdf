"""What the op sets of dense torch weights share: how weights are held, and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.base import StoredTensor
from octavo.ops.experts import ExpertOps
from octavo.ops.host import lazy_zeros, read_bias, read_matrix, read_vector, rope_angles


@dataclass(slots=True)
class LinearWeight:
    """`weight` is `[out, in]`, `bias` `[out]` or None."""

    weight: Tensor
    bias: Tensor | None


class DenseOps(ExpertOps):
    """Activations, weights and cache of one `dtype` on one device; the products and gates are a subclass's."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device = torch.device(device)
        self.dtype = dtype

    # -- weights ---------------------------------------------------------------------------------------------------

    def vector(self, source: StoredTensor, offset: float = 0.0) -> Tensor:
        """A copy of the vector plus `offset`."""
        return read_vector(source, self.device, self.dtype, offset)

    def linear_weight(self, parts: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> LinearWeight:
        """`parts` stacked along `out`, with their biases."""
        weight = read_matrix(parts, self.device, self.dtype)
        return LinearWeight(weight, read_bias(biases, self.device, self.dtype))

    def embedding_weight(self, source: StoredTensor, tied: bool) -> tuple[Tensor, LinearWeight | None]:
        """The table, and the same memory as a head."""
        table = read_matrix([source], self.device, self.dtype)
        return table, LinearWeight(table, None) if tied else None

    def rope_table(self, variants: Sequence[Sequence[float]], magnitude: float, max_positions: int) -> Tensor:
        """`[max_positions * len(variants), 2 * len(inv_freq)]` fp32: cosines, then sines."""
        return torch.cat(rope_angles(variants, magnitude, max_positions), dim=1).to(self.device)

    def kv_cache(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> Tensor:
        """Zeros."""
        return lazy_zeros((num_blocks, 2, num_kv_heads, block_size, head_dim), self.device, self.dtype)

    def kv_cache_bytes(self, num_kv_heads: int, block_size: int, head_dim: int) -> int:
        """Bytes of one block of one layer."""
        return 2 * num_kv_heads * block_size * head_dim * self.dtype.itemsize

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """`x[indices]`."""
        return x[indices.long()]

    def logits(
        self, x: Tensor, weight: LinearWeight, scale: float, softcap: float | None, out: Tensor | None = None
    ) -> Tensor:
        """fp32 logits; see `OpSet`."""
        logits = self.linear(x, weight).float()
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits if out is None else out.copy_(logits)
