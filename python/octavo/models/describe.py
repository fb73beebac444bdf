"""What a model is and needs, from its headers alone: a decoder is made whose op set counts weights instead of reading them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby
from math import prod
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from octavo.models.loader import OpenedModel
from octavo.models.spec import LayerSpec, ModelSpec, MoeSpec
from octavo.models.weights.storage import STORAGE
from octavo.ops.base import OpSet, StoredTensor

CACHE_BYTES: Final = {"bfloat16": 2, "float32": 4}
"""Bytes of an element of the KV cache, by its type; the first is the default."""
# A size that is whole blocks of every storage type, and whole groups of rows of every packed layout.
_MINIATURE_ROWS: Final = 16
_MINIATURE_COLUMNS: Final = 256


@dataclass(frozen=True, slots=True)
class Machine:
    """A device that could run models, as far as their size matters."""

    name: str
    total_bytes: int
    free_bytes: int
    cache_dtype: str
    """A key of `CACHE_BYTES`."""
    ops: OpSet
    cache_budget: Callable[[int], int]
    """Bytes that the KV cache may take once so many bytes of weights are loaded."""


@dataclass(frozen=True, slots=True)
class StorageShare:
    """The weights of one storage type."""

    storage: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Layers whose attention has one shape."""

    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What the KV cache of one request takes."""

    dtype: str
    bytes_per_token: int
    """Within every window: all layers grow."""
    bytes_per_token_beyond_windows: int
    """Only layers without a window grow."""
    bytes_at_max_length: int


@dataclass(frozen=True, slots=True)
class Fit:
    """How the model fits one machine."""

    machine: str
    total_bytes: int
    free_bytes: int
    weight_bytes: int
    """Of the weights as this machine holds them."""
    weights_fit: bool
    cache_dtype: str
    cache_bytes: int
    """What is left for the KV cache."""
    cache_tokens: int
    """Tokens of short requests that fit into it."""
    longest_request: int
    """Tokens of the longest single request, at most the model's context."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Everything `octavo models show` tells about weights; text is described by `octavo.text`."""

    name: str
    path: str
    family: str
    parameters: int
    active_parameters: int
    """Used for one token: of a mixture of experts, the chosen ones."""
    stored_bytes: int
    storage: tuple[StorageShare, ...]
    """The largest first."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    """0: none."""
    num_experts_per_token: int
    attention: tuple[AttentionShape, ...]
    window_pattern: str
    context_length: int
    vocab_size: int
    tied_embeddings: bool
    cache: tuple[CacheCost, ...]
    fits: tuple[Fit, ...]


def describe_model(opened: OpenedModel, machines: Sequence[Machine]) -> ModelDescription:
    """Describe an opened model; no weight is read.

    Raises:
        ModelError: the checkpoint cannot be run: what `OpenedModel.load` would say.
    """
    spec = opened.spec
    counters = [SizeOps(machine.ops) for machine in machines] or [SizeOps(None)]
    for counter in counters:
        opened.load(cast(OpSet, counter))
    counted = counters[0]
    mlp = spec.layers[0].mlp
    moe = mlp if isinstance(mlp, MoeSpec) else None
    return ModelDescription(
        name=opened.source.name,
        path=str(opened.source.path),
        family=spec.family,
        parameters=counted.parameters,
        active_parameters=counted.parameters - _idle_parameters(spec),
        stored_bytes=sum(share.bytes for share in counted.shares()),
        storage=tuple(counted.shares()),
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=mlp.expert_intermediate_size if isinstance(mlp, MoeSpec) else mlp.intermediate_size,
        num_experts=moe.num_experts if moe else 0,
        num_experts_per_token=moe.num_experts_per_token if moe else 0,
        attention=_attention_shapes(spec),
        window_pattern=window_pattern([layer.attention.window for layer in spec.layers]),
        context_length=spec.max_positions,
        vocab_size=spec.vocab_size,
        tied_embeddings=spec.tied_embeddings,
        cache=tuple(_cache_cost(spec, dtype) for dtype in CACHE_BYTES),
        fits=tuple(_fit(spec, m, c.held_bytes) for m, c in zip(machines, counters, strict=False)),
    )


def cache_bytes(spec: ModelSpec, length: int, dtype: str) -> int:
    """Bytes of the keys and values that a request of `length` tokens keeps, without the rounding to blocks."""
    # The prefix cache is made of layers that keep everything; where there are none, all layers do.
    bounded = any(layer.attention.window is None for layer in spec.layers)
    return sum(
        _layer_bytes(layer, dtype) * min(length, (layer.attention.window or length) if bounded else length)
        for layer in spec.layers
    )


def longest_request(spec: ModelSpec, budget: int, dtype: str) -> int:
    """Tokens of the longest request whose keys and values fit into `budget` bytes, at most the model's context."""
    low, high = 0, spec.max_positions
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cache_bytes(spec, middle, dtype) <= budget else (low, middle - 1)
    return low


def window_pattern(windows: Sequence[int | None]) -> str:
    """The windows of the layers in order, with the shortest repeated unit: `(5 × window 512, 1 × full) × 3`."""
    count = len(windows)
    period = next(p for p in range(1, count + 1) if all(windows[i] == windows[i % p] for i in range(count)))
    runs = [(window, len(list(run))) for window, run in groupby(windows[:period])]
    parts = [f"{n} × {'full' if window is None else f'window {window:,}'}" for window, n in runs]
    repeats, rest = divmod(count, period)
    if len(parts) == 1:
        return f"{count} × {parts[0].split(' × ')[1]}"
    if repeats == 1:
        return ", ".join(parts)
    more = f", then its first {rest}" if rest else ""
    return f"({', '.join(parts)}) × {repeats}{more}"


class SizeOps:
    """An op set for weights alone: counts those that a decoder asks for, and the bytes that `inner` would hold for them.

    These are measured on miniatures, zeros of the same storage types, so that this class knows no layout of `inner`.
    """

    def __init__(self, inner: OpSet | None):
        self.parameters = 0
        self.held_bytes = 0
        self._inner = inner
        self._tensors: Counter[str] = Counter()
        self._elements: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._ratios: dict[Any, float] = {}

    def shares(self) -> list[StorageShare]:
        """The counted tensors by storage type, the largest first."""
        return [
            StorageShare(storage, self._tensors[storage], self._elements[storage], size)
            for storage, size in self._bytes.most_common()
        ]

    def vector(self, source: StoredTensor, offset: float = 0.0) -> None:
        """Counts a vector; op sets hold fp32."""
        self._count([source])
        self.held_bytes += 4 * prod(source.shape)

    def linear_weight(self, parts: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> None:
        """Counts a matrix and its biases."""
        for bias in biases:
            self.vector(bias)
        self._hold(parts, lambda ops, miniatures: ops.linear_weight(miniatures))

    def embedding_weight(self, source: StoredTensor, tied: bool) -> tuple[None, object]:
        """Counts a table; a tied head shares its memory."""
        self._hold([source], lambda ops, miniatures: ops.embedding_weight(miniatures[0], tied)[0])
        return None, tied or None

    def expert_weights(self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]) -> None:
        """Counts the experts of a layer."""
        for pair, last in zip(gate_up, down, strict=True):
            self._hold(pair, lambda ops, miniatures: ops.linear_weight(miniatures))
            self._hold([last], lambda ops, miniatures: ops.linear_weight(miniatures))

    def rope_table(self, *_: object) -> None:
        """No weight."""

    def _count(self, sources: Sequence[StoredTensor]) -> None:
        for source in sources:
            elements = prod(source.shape)
            self.parameters += elements
            self._tensors[source.storage] += 1
            self._elements[source.storage] += elements
            self._bytes[source.storage] += source.num_bytes

    def _hold(self, parts: Sequence[StoredTensor], make: Callable[[OpSet, Sequence[StoredTensor]], object]) -> None:
        self._count(parts)
        if self._inner is None:
            return
        smallest = min(part.shape[0] for part in parts)
        key = tuple((part.storage, round(part.shape[0] / smallest)) for part in parts)
        if key not in self._ratios:
            miniatures: list[StoredTensor] = [Miniature(storage, _MINIATURE_ROWS * rows) for storage, rows in key]
            held: int = sum(_held(make(self._inner, miniatures)))
            self._ratios[key] = held / sum(prod(miniature.shape) for miniature in miniatures)
        self.held_bytes += round(self._ratios[key] * sum(prod(part.shape) for part in parts))


class Miniature:
    """A stored matrix of zeros, `[rows, 256]`."""

    def __init__(self, storage: str, rows: int):
        self.name = f"a miniature of {storage}"
        self.storage = storage
        self.shape: tuple[int, ...] = (rows, _MINIATURE_COLUMNS)
        kind = STORAGE[storage]
        self._row_bytes = _MINIATURE_COLUMNS // kind.block_elements * kind.block_bytes

    @property
    def num_bytes(self) -> int:
        """Size as stored."""
        return self.shape[0] * self._row_bytes

    def rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Zeros."""
        return np.zeros((stop - start, self._row_bytes), np.uint8)

    def float32(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Zeros."""
        return np.zeros(((self.shape[0] if stop is None else stop) - start, self.shape[1]), np.float32)

    def release(self, stop: int | None = None) -> None:
        """Nothing is mapped."""


def _held(weight: Any) -> Iterator[int]:
    """Bytes of the arrays inside a weight of any op set."""
    if isinstance(weight, list | tuple):
        for part in weight:
            yield from _held(part)
    elif is_dataclass(weight):
        for field in fields(weight):
            yield from _held(getattr(weight, field.name))
    else:
        yield int(getattr(weight, "nbytes", 0) or getattr(weight, "num_bytes", 0))


def _idle_parameters(spec: ModelSpec) -> int:
    """Parameters of the experts that a token does not use; an expert has three matrices."""
    return sum(
        (layer.mlp.num_experts - layer.mlp.num_experts_per_token)
        * 3
        * spec.hidden_size
        * layer.mlp.expert_intermediate_size
        for layer in spec.layers
        if isinstance(layer.mlp, MoeSpec)
    )


def _attention_shapes(spec: ModelSpec) -> tuple[AttentionShape, ...]:
    shapes = [layer.attention for layer in spec.layers]
    counted = Counter((a.num_heads, a.num_kv_heads, a.head_dim, a.window) for a in shapes)
    return tuple(AttentionShape(count, *shape) for shape, count in counted.items())


def _layer_bytes(layer: LayerSpec, dtype: str) -> int:
    """Bytes of one token's key and value."""
    return 2 * layer.attention.num_kv_heads * layer.attention.head_dim * CACHE_BYTES[dtype]


def _cache_cost(spec: ModelSpec, dtype: str) -> CacheCost:
    per_layer = [_layer_bytes(layer, dtype) for layer in spec.layers]
    full = [b for b, layer in zip(per_layer, spec.layers, strict=True) if layer.attention.window is None]
    return CacheCost(
        dtype=dtype,
        bytes_per_token=sum(per_layer),
        bytes_per_token_beyond_windows=sum(full or per_layer),
        bytes_at_max_length=cache_bytes(spec, spec.max_positions, dtype),
    )


def _fit(spec: ModelSpec, machine: Machine, weight_bytes: int) -> Fit:
    budget = machine.cache_budget(weight_bytes)
    fits = weight_bytes <= machine.free_bytes
    return Fit(
        machine=machine.name,
        total_bytes=machine.total_bytes,
        free_bytes=machine.free_bytes,
        weight_bytes=weight_bytes,
        weights_fit=fits,
        cache_dtype=machine.cache_dtype,
        cache_bytes=budget if fits else 0,
        cache_tokens=budget // cache_bytes(spec, 1, machine.cache_dtype) if fits else 0,
        longest_request=longest_request(spec, budget, machine.cache_dtype) if fits else 0,
    )
