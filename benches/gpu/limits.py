"""What a GPU needs at least for a step of a dense or mixture model: bytes for decode, operations for prefill.

An H200 as measured: 4.25 TB/s, 750 TFLOP/s of bf16 products. Weights are read once but for the input embedding's; keys and values
of all rows; of a prefill only the last position goes to the head.
"""

from __future__ import annotations

from typing import Any, Final

BYTES_PER_SECOND: Final = 4.25e12
OPERATIONS_PER_SECOND: Final = 750e12
_BF16: Final = 2


def _head_dim(shape: dict[str, Any]) -> int:
    return int(shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"]))


def attention_weights(shape: dict[str, Any]) -> int:
    """Of a layer's projections."""
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    return int(shape["hidden_size"] * heads * _head_dim(shape))


def mlp_weights(shape: dict[str, Any], rows: int | None) -> float:
    """Of a layer, that `rows` tokens read; None: those one token multiplies with.

    In a mixture of `E` experts of which each token takes `k` by chance, `rows` tokens meet `E · (1 − (1 − k/E)^rows)` of them.
    """
    hidden, experts = shape["hidden_size"], shape.get("num_experts", 0)
    if not experts:
        return float(3 * hidden * shape["intermediate_size"])
    top = shape["num_experts_per_tok"]
    met = top if rows is None else experts * (1 - (1 - top / experts) ** rows)
    return float(experts * hidden + met * 3 * hidden * shape["moe_intermediate_size"])


def decode_ms(shape: dict[str, Any], rows: int, context: int) -> float:
    """Of a step of `rows` sequences of `context` tokens."""
    layers = shape["num_hidden_layers"]
    weights = layers * (attention_weights(shape) + mlp_weights(shape, rows))
    weights += shape["vocab_size"] * shape["hidden_size"]
    cache = layers * 2 * shape["num_key_value_heads"] * _head_dim(shape) * rows * context
    return (weights + cache) * _BF16 / BYTES_PER_SECOND * 1e3


def prefill_ms(shape: dict[str, Any], rows: int, length: int) -> float:
    """Of `rows` prompts of `length` tokens, causal attention's visible half counted."""
    layers = shape["num_hidden_layers"]
    products = 2 * rows * length * layers * (attention_weights(shape) + mlp_weights(shape, None))
    scores = 2 * rows * length**2 * layers * shape["num_attention_heads"] * _head_dim(shape)
    return (products + scores) / OPERATIONS_PER_SECOND * 1e3
