"""What a decoder-only model is, as data. A family's file makes a `ModelSpec`; the decoder runs it.

Nothing here knows a family, a file format or a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding as its frequencies: every scaling scheme is a way to choose them (`models/rope.py`)."""

    inv_freq: tuple[float, ...]
    """Radians per position of each rotated pair; `2 * len(inv_freq)` elements of a head are rotated, the rest not."""
    magnitude: float = 1.0
    """Factor of the cosines and sines (YaRN's and LongRoPE's attention factor)."""
    interleaved: bool = False
    """Pairs are `(2i, 2i + 1)` instead of `(i, i + rotary_dim / 2)`."""
    long_inv_freq: tuple[float, ...] | None = None
    """LongRoPE: the frequencies of a sequence that may grow beyond `long_above` tokens, from its first token on."""
    long_above: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    """Factor of the scores, usually `head_dim ** -0.5`."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    """An RMS norm of queries and keys before the rotation: of each head, or of all heads together."""
    window: int | None = None
    """A token sees this many last positions, its own included."""
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A gated feed-forward block: `down(act(gate(x)) * up(x))`."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A routed mixture of gated feed-forward blocks."""

    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    activation: Activation = "silu"
    normalize_weights: bool = True
    """The chosen experts' router probabilities are scaled to sum to 1."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: `x += attention(norm(x)); x += mlp(norm(x))`, with optional further norms."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norm: bool = True
    """Each block's input is normalised."""
    post_norm: bool = False
    """Each block's output is normalised before it is added to the residual."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder-only model."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    """The output head is the embedding table."""
    norm_offset: float = 0.0
    """Added to every norm weight (1 for Gemma)."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of each block's output before it is added to the residual."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers that own a KV cache."""
        return len(self.layers)

    @property
    def long_rope_above(self) -> int | None:
        """Sequences that may grow beyond so many tokens use the long frequencies; None: there are none."""
        return self.layers[0].attention.rope.long_above
