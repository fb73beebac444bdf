"""The contract between the decoder and a device: what a step brings, and the operations that run it.

`Tensor` is opaque to everyone above this layer: an op set makes tensors and an op set consumes them.
Symbols: `T` tokens of a step, `R` rows, `D` hidden size, `H` query heads, `K` key/value heads, `d` head size,
`B` block size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Tensor: TypeAlias = Any
Weight: TypeAlias = Any
Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(slots=True)
class AttentionMetadata:
    """How the tokens of one step map to rows and to the paged KV cache.

    Row `r` owns the tokens `query_start_loc[r] : query_start_loc[r + 1]` of the step; they are the last ones of its
    `seq_lens[r]` tokens, so token `i` of the row has position `seq_lens[r] - query_len + i`. Integer tensors are int32
    or int64. Rows that are padding have an empty query, `seq_lens` 0, and come last; the tokens after
    `query_start_loc[R]` are padding too.
    """

    slot_mapping: Tensor
    """`[G, T]` where the token's key and value go in each cache group, `block_id * B + offset`; for padding a slot of the null
    block."""
    query_start_loc: Tensor
    """`[R + 1]` first token of each row."""
    seq_lens: Tensor
    """`[R]` tokens of the row after this step, its query included."""
    block_table: Tensor
    """`[G, R, max_blocks]` block ids. Entries past `ceil(seq_lens / B)`, and those that left a group's window, may hold anything
    that is a valid block id."""
    group_windows: tuple[int | None, ...]
    """The window of each cache group; None: its blocks hold the whole sequence."""
    block_size: int
    max_query_len: int
    """An upper bound of the query lengths."""
    max_seq_len: int
    """An upper bound of `seq_lens`."""
    num_decode_rows: int | None
    """The first rows of the step, each with one new known token plus drafts; the other rows are prefills. None: the host does not
    know; rows of at most `max_decode_query_len` queries are decode rows."""
    max_decode_query_len: int
    """An upper bound of the decode rows' query lengths."""
    may_share_keys: bool = False
    """Whether it is worth a look if all rows begin with the same blocks, to read these once."""


@dataclass(slots=True)
class Batch:
    """What the decoder needs for one step."""

    input_ids: Tensor
    """`[T]` token ids."""
    positions: Tensor
    """`[T]` row of the rotary tables: the token's position in its sequence, beyond the first table's rows for sequences that use
    the long frequencies; 0 for padding."""
    logits_indices: Tensor | None
    """`[n]` tokens of the step whose hidden state is wanted, in the order wanted; None: all."""
    attention: AttentionMetadata


class StoredTensor(Protocol):
    """A tensor of a checkpoint, still on disk: a name, a shape, and the bytes in the file's own storage type.

    `shape` is torch's order, outermost first; a linear weight is `[out, in]`. `storage` names the storage type in
    GGUF's words: `F32`, `F16`, `BF16`, `Q4_0` … `Q8_0`, `Q2_K` … `Q6_K`.
    """

    name: str
    shape: tuple[int, ...]
    storage: str

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        ...

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The stored bytes of rows `start:stop` of the outermost dimension, as `[stop - start, bytes per row]`."""
        ...

    def float32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows `start:stop` dequantized, a fresh array."""
        ...

    def release(self, stop: int | None = None) -> None:
        """Tell the system that the pages of the rows before `stop` (None: all) are not needed any more, so that loading never
        holds two copies of a model."""
        ...


@runtime_checkable
class ReadableTensor(StoredTensor, Protocol):
    """A tensor whose file can be read without its memory map, by any thread."""

    def read_into(self, start: int, stop: int, out: npt.NDArray[np.uint8]) -> None:
        """Reads the stored bytes of rows `start:stop` into `out`, as many bytes, contiguous."""
        ...


@runtime_checkable
class MadeTensor(StoredTensor, Protocol):
    """A tensor that is on no disk."""

    def fill(self, out: Tensor) -> None:
        """Writes its numbers to `out` of its shape, where that is."""
        ...


class OpSet(Protocol):
    """The operations of one device. Weights are made once, by the first group; the others run in every step.

    Contract of all step operations: inputs are not modified unless the text says so; results may be reused buffers that
    stay valid until the step ends; nothing waits for the device. `x` is `[T, D]` in the op set's activation dtype, row
    major.
    """

    name: str
    device: Any
    """The torch device of its tensors; `.type` is "cpu" or "cuda"."""
    dtype: Any
    """The torch dtype of the activations."""

    def can_be_captured(self) -> bool:
        """Whether a step may be recorded in a CUDA graph: no operation waits for the device."""
        ...

    # -- weights ---------------------------------------------------------------------------------------------------

    def vector(self, source: StoredTensor, offset: float = 0.0) -> Tensor:
        """A vector such as a norm weight, plus `offset` (families whose norms multiply by `1 + w`)."""
        ...

    def linear_weight(self, parts: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> Weight:
        """A weight for `linear` from `parts`, each `[out_i, in]`, stacked along `out` in the given order.

        Args:
            parts: weights that read the same input (query, key and value; gate and up).
            biases: none, or one `[out_i]` for each part.

        Raises:
            ValueError: a part whose `in` differs, or a storage type this op set cannot hold.
        """
        ...

    def embedding_weight(self, source: StoredTensor, tied: bool) -> tuple[Weight, Weight | None]:
        """The table `[V, D]` for `embed` and, if `tied`, the same table as a weight for `logits`, sharing memory."""
        ...

    def expert_weights(self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]) -> Weight:
        """Weights for `moe`: for each expert gate and up, `[F, D]` each, and down, `[D, F]`."""
        ...

    def rope_table(self, variants: Sequence[Sequence[float]], magnitude: float, max_positions: int) -> Tensor:
        """Cosines and sines of `position * inv_freq`, times `magnitude`, for positions below `max_positions`; the tables of all
        `variants` of `inv_freq` one below the other."""
        ...

    def kv_cache(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> Tensor:
        """An empty cache of one layer, `[num_blocks, 2, K, B, d]`: keys at index 0, values at index 1."""
        ...

    def kv_cache_bytes(self, num_kv_heads: int, block_size: int, head_dim: int) -> int:
        """Bytes of one block of one layer."""
        ...

    # -- a step ----------------------------------------------------------------------------------------------------

    def prepare_attention(self, metadata: AttentionMetadata) -> Sequence[Any]:
        """Work that the layers of a step share. Called once per step; returns for each cache group what its layers give to
        `rotate_and_store` and `attention`."""
        ...

    def embed(self, ids: Tensor, table: Weight, scale: float) -> Tensor:
        """`table[ids] * scale`, `[T, D]`."""
        ...

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """`x @ weight.T + bias`, `[T, out]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; the mean is taken in fp32."""
        ...

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, scale: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`s = residual + scale * x`; returns `(rms_norm(s), s)`. May reuse `residual`'s memory for `s`."""
        ...

    def add(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """`residual + scale * x`. May reuse `residual`'s memory."""
        ...

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
        """Split `qkv`, normalise and rotate queries and keys, write keys and values to the cache, return the queries.

        Args:
            qkv: `[T, (H + 2K) * d]`, queries first, then keys, then values, each head-major. `K`, `d` are the cache's.
            positions: `[T]`.
            rope: of `rope_table`; rotates the first `2 * len(inv_freq)` elements of a head.
            kv_cache: `[num_blocks, 2, K, B, d]`, modified: **all** rows' tokens are stored when this returns, before
                any row's attention reads, so that a row may read blocks that another row of the same step fills.
            step: of `prepare_attention`, for the layer's cache group; its slot mapping says where the tokens go.
            q_norm: weight of an RMS norm of the queries before the rotation, `[d]` for one of each head, `[H * d]` for one of all
                heads together, or None.
            k_norm: the same for keys.
            eps: of these norms.
            interleaved: pair `(2i, 2i + 1)` is rotated; otherwise pair `(i, i + rotary_dim / 2)`.

        Returns:
            `[T, H, d]`.
        """
        ...

    def attention(
        self, q: Tensor, kv_cache: Tensor, step: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of each token to the cached tokens of its row at positions up to its own.

        Args:
            q: `[T, H, d]`; query head `h` reads key/value head `h // (H / K)`.
            kv_cache: of `kv_cache`, this step's keys and values included.
            step: of `prepare_attention`, for the layer's cache group.
            scale: factor of the scores before the soft cap.
            window: a token sees the last `window` positions, its own included; None: all. Not larger than the cache group's.
            softcap: scores become `softcap * tanh(score / softcap)` before masking; None: not.

        Returns:
            `[T, H * d]`; rows of padding tokens may hold anything.
        """
        ...

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """`act(x[:, :F]) * x[:, F:]` for `x` of `[T, 2F]`."""
        ...

    def gated_linear(self, x: Tensor, weight: Weight, activation: Activation) -> Tensor:
        """`gated(linear(x, weight))`: `[T, F]` for a weight of `2F` outputs."""
        ...

    def moe(
        self, x: Tensor, router: Weight, experts: Weight, *, num_per_token: int, normalize: bool, activation: Activation
    ) -> Tensor:
        """`Σ p[e] · down[e](act(gate[e](x)) * up[e](x))` over the `num_per_token` experts of the largest router probabilities `p =
        softmax(router(x))`; with `normalize` these are scaled to sum to 1. `[T, D]`."""
        ...

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """`x[indices]`."""
        ...

    def logits(
        self, x: Tensor, weight: Weight, scale: float, softcap: float | None, out: Tensor | None = None
    ) -> Tensor:
        """`x @ weight.T * scale`, `[n, V]`, then `softcap * tanh(·/softcap)` if given.

        Args:
            x: `[n, D]`.
            weight: of `embedding_weight` or `linear_weight`.
            scale: factor.
            softcap: or None.
            out: where they go, `[n, V]` of the activation dtype; None: fp32, the caller's own.
        """
        ...
