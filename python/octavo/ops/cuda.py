"""NVIDIA GPUs: matrix products of many rows by cuBLAS, everything else by the Triton kernels of `octavo.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import attention as attention_kernels
from octavo.kernels import fused, launch
from octavo.kernels import linear as linear_kernels
from octavo.kernels import moe as moe_kernels
from octavo.kernels.cascade import CascadeSchedule, cascade_attention, cascade_schedule
from octavo.kernels.decode import decode_attention
from octavo.kernels.decode_schedule import DecodeSchedule, DecodeShape, decode_schedule
from octavo.kernels.expert_tiles import gemm_mixture
from octavo.kernels.prefill_plan import PrefillPlan, prefill_plan
from octavo.kernels.tiles import SplitTiles, invariant_tiles
from octavo.ops.base import Activation, AttentionMetadata, StoredTensor
from octavo.ops.dense import DenseOps, LinearWeight
from octavo.ops.host import read_matrix

try:
    from octavo.kernels import hopper
except ImportError:  # another release of Triton, whose Gluon differs
    hopper = None  # type: ignore[assignment]

_MAX_DECODE_QUERIES = 16
# Longer rows fill a prefill tile of one head.
_FEW_QUERIES = 64
# Between what is fast for one query and for thousands.
_DETERMINISTIC_QUERIES = 64
# Of an expert: the cut for so many serves all.
_DETERMINISTIC_PAIRS = 64


@dataclass(slots=True)
class AttentionStep:
    """One cache group's part of a step; lengths and tables stay on the device."""

    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decode_rows: int | None
    """None: all rows of at most `max_decode_query_len` queries, which the kernels see for themselves."""
    max_decode_query_len: int
    few_queries: bool
    """Whether the rows, or most of those of a captured step, have few queries each."""
    deterministic: bool
    """Whether a token's result must not depend on the step's other tokens: then one kernel does all rows."""
    cascade: bool
    """Whether keys that all rows share are read by a pass of their own."""
    schedules: dict[DecodeShape, DecodeSchedule] = field(default_factory=dict)
    """Of the decode rows, made by the first layer of each shape."""
    cascades: dict[DecodeShape, CascadeSchedule] = field(default_factory=dict)
    prefill_plans: dict[int, PrefillPlan] = field(default_factory=dict)
    """Of the prefill rows, by the queries of a tile."""

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        rows: int,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Attention of the first `rows` rows, those of them that have few queries."""
        heads, (kv_heads, block_size, dim) = q.shape[1], kv_cache.shape[2:]
        shape = DecodeShape(heads, kv_heads, dim, q.dtype, self.max_decode_query_len, window)
        table, starts, lengths = self.block_table[:rows], self.query_start_loc[: rows + 1], self.seq_lens[:rows]
        if self.cascade and window is None:
            if shape not in self.cascades:
                self.cascades[shape] = cascade_schedule(
                    table, starts, lengths, shape,
                    block_size=block_size, num_tokens=q.shape[0],
                )  # fmt: skip
            cascade_attention(
                q, kv_cache, table, starts, lengths, out, self.cascades[shape], scale=scale, softcap=softcap
            )
            return
        if shape not in self.schedules:
            self.schedules[shape] = decode_schedule(starts, lengths, shape)
        decode_attention(q, kv_cache, table, starts, lengths, out, self.schedules[shape], scale=scale, softcap=softcap)

    def prefill(
        self,
        q: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        first: int,
        min_query_len: int,
        window: int | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Attention of the rows from `first` on that have `min_query_len` queries or more."""
        table, starts, lengths = self.block_table[first:], self.query_start_loc[first:], self.seq_lens[first:]
        num_tokens = q.shape[0] - first
        limits: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "min_query_len": min_query_len}
        if hopper is None or not hopper.supports(q, kv_cache.shape[3]):
            attention_kernels.prefill_attention(q, kv_cache, table, starts, lengths, out, num_tokens, **limits)
            return
        tile = hopper.tile_queries(q.shape[1], kv_cache.shape[2], q.shape[2], few=self.few_queries)
        if tile not in self.prefill_plans:
            self.prefill_plans[tile] = prefill_plan(starts, lengths, num_tokens, tile=tile, min_query_len=min_query_len)
        plan = self.prefill_plans[tile]
        hopper.prefill_attention(q, kv_cache, table, starts, lengths, out, num_tokens, plan=plan, **limits)


@dataclass(slots=True)
class StackedExperts:
    """A layer's experts."""

    gate_up: Tensor
    """`[E, 2F, D]`: gate's rows, then up's."""
    down: Tensor
    """`[E, D, F]`."""


class CudaOps(DenseOps):
    """The op set of Triton kernels. Activations, weights and cache are `dtype`.

    With `deterministic` a token's numbers are, to the last bit, a function of itself and of the keys and values before it: every
    product is cut in one way whatever the number of rows is, and decodes and prefills share one attention kernel, which goes
    through the keys in tiles from the sequence's first on. Nothing depends on the step's other tokens, on chunks or on blocks.

    Args:
        device: a CUDA device; `"cpu"` under Triton's interpreter, for tests.
        dtype: bf16 or fp16 for speed; fp32 multiplies in full precision.
        deterministic: whether speed is given up for that.
    """

    name = "cuda"

    def __init__(
        self,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        *,
        deterministic: bool = False,
    ):
        super().__init__(device, dtype)
        self._deterministic = deterministic
        # fp32's own cut depends on nothing.
        self._mixture = gemm_mixture(_DETERMINISTIC_PAIRS) if deterministic and dtype != torch.float32 else None

    def can_be_captured(self) -> bool:
        """Always: lengths and the choice of experts stay on the device."""
        return True

    def expert_weights(self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]) -> StackedExperts:
        """All experts of a layer in two tensors."""
        return StackedExperts(self._stacked(gate_up), self._stacked([[part] for part in down]))

    def _stacked(self, experts: Sequence[Sequence[StoredTensor]]) -> Tensor:
        """Each expert's parts one below the other, `[E, out, in]`.

        Raises:
            ValueError: the experts' shapes differ.
        """
        shapes = {(sum(part.shape[0] for part in parts), *(part.shape[1] for part in parts)) for parts in experts}
        if len(shapes) != 1 or len(set(min(shapes)[1:])) != 1:
            raise ValueError(f"experts {experts[0][0].name} and after have outputs and inputs {sorted(shapes)}")
        rows, width = min(shapes)[:2]
        matrix = read_matrix([part for parts in experts for part in parts], self.device, self.dtype)
        return matrix.view(len(experts), rows, width)

    def prepare_attention(self, metadata: AttentionMetadata) -> list[AttentionStep]:
        """The kernels read everything on the device: only views and 32-bit copies are made here."""
        rows, decode_rows = metadata.block_table.shape[1], metadata.num_decode_rows
        # Without prefill rows all queries are short; beside them a decode row has one token and its drafts.
        longest = metadata.max_query_len if decode_rows == rows else metadata.max_decode_query_len
        if longest > _MAX_DECODE_QUERIES:
            decode_rows = 0
        cascade = metadata.may_share_keys and not self._deterministic and decode_rows == rows > 1
        query_start_loc, seq_lens = metadata.query_start_loc.int(), metadata.seq_lens.int()
        return [
            AttentionStep(
                slot_mapping=slot_mapping,
                block_table=block_table,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                num_decode_rows=decode_rows,
                max_decode_query_len=longest,
                few_queries=decode_rows is None or metadata.max_query_len <= _FEW_QUERIES,
                deterministic=self._deterministic,
                cascade=cascade,
            )
            for slot_mapping, block_table in zip(metadata.slot_mapping.int(), metadata.block_table.int(), strict=True)
        ]

    def _tiles(self, weight: Tensor, *, gated: bool = False) -> SplitTiles | None:
        """The cut of all products with this weight; None: the fastest for each."""
        if not self._deterministic:
            return None
        width, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        return invariant_tiles(width, depth, gated, launch.multiprocessors(weight.device))

    def embed(self, ids: Tensor, table: Tensor, scale: float) -> Tensor:
        """`table[ids] * scale`."""
        rows = torch.nn.functional.embedding(ids, table)
        return rows if scale == 1.0 else rows * scale

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ weight.T + bias`."""
        return linear_kernels.linear(x, weight.weight, weight.bias, tiles=self._tiles(weight.weight))

    def logits(
        self, x: Tensor, weight: LinearWeight, scale: float, softcap: float | None, out: Tensor | None = None
    ) -> Tensor:
        """See `OpSet`; without a copy into `out` where nothing follows the product."""
        if out is not None and scale == 1.0 and softcap is None:
            return linear_kernels.linear(x, weight.weight, weight.bias, out=out, tiles=self._tiles(weight.weight))
        return super().logits(x, weight, scale, softcap, out)

    def gated_linear(self, x: Tensor, weight: LinearWeight, activation: Activation) -> Tensor:
        """One kernel for few rows, unless there is a bias."""
        if weight.bias is not None:
            return self.gated(self.linear(x, weight), activation)
        tiles = self._tiles(weight.weight, gated=True)
        return linear_kernels.gated_linear(x, weight.weight, activation == "silu", tiles=tiles)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`."""
        return fused.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, scale: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of `residual + scale * x`, and that sum in `residual`'s memory."""
        return fused.add_rms_norm(residual, x.contiguous(), scale, weight, eps)

    def add(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """`residual + scale * x`."""
        return torch.add(residual, x, alpha=scale)

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: Tensor,
        kv_cache: Tensor,
        step: Any,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        interleaved: bool,
    ) -> Tensor:
        """One kernel, but for norms over all heads; see `OpSet`."""
        plan: AttentionStep = step
        head_dim, kv_size = kv_cache.shape[4], kv_cache.shape[2] * kv_cache.shape[4]
        if q_norm is not None and k_norm is not None and len(q_norm) != head_dim:
            q, k, v = qkv.split([qkv.shape[1] - 2 * kv_size, kv_size, kv_size], dim=1)
            qkv = torch.cat([self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps), v], dim=1)
            q_norm = k_norm = None
        return fused.rotate_and_store(
            qkv.contiguous(), positions, rope, plan.slot_mapping, kv_cache, q_norm, k_norm, eps, interleaved
        )

    def attention(
        self, q: Tensor, kv_cache: Tensor, step: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """The step's decode rows by one kernel, its prefill rows by another, unless it must not matter which; see `OpSet`."""
        plan: AttentionStep = step
        out = torch.empty_like(q)
        if plan.deterministic:
            attention_kernels.prefill_attention(
                q, kv_cache, plan.block_table, plan.query_start_loc, plan.seq_lens, out, q.shape[0],
                scale=scale, window=window, softcap=softcap, tile_queries=_DETERMINISTIC_QUERIES,
            )  # fmt: skip
            return out.view(q.shape[0], -1)
        rows = plan.block_table.shape[0]
        # Each kernel leaves out what is the other's where the host does not know.
        known = plan.num_decode_rows
        decodes, others, least = (rows, 0, plan.max_decode_query_len + 1) if known is None else (known, known, 1)
        if decodes:
            plan.decode(q, kv_cache, out, decodes, window, scale, softcap)
        if rows > others:
            plan.prefill(q, kv_cache, out, others, least, window, scale, softcap)
        return out.view(q.shape[0], -1)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """`act(x[:, :F]) * x[:, F:]`."""
        return fused.gated(x.contiguous(), activation == "silu")

    def moe(
        self,
        x: Tensor,
        router: LinearWeight,
        experts: StackedExperts,
        *,
        num_per_token: int,
        normalize: bool,
        activation: Activation,
    ) -> Tensor:
        """All experts at once; see `OpSet`."""
        return moe_kernels.mixture(
            x,
            moe_kernels.router_logits(x, router.weight, router.bias, tiles=self._tiles(router.weight)),
            experts.gate_up,
            experts.down,
            num_per_token=num_per_token,
            normalize=normalize,
            silu=activation == "silu",
            tiles=self._mixture,
        )
