"""Which layers share block tables: all layers that keep the whole sequence, and windows' layers in groups of the same size.

Every group has the same number of layers, so that a block of any group has the same bytes and one pool serves them all
(the layout of vLLM's hybrid allocator). Gemma 3 270M with 3 full and 15 window layers has 1 + 5 groups of 3 layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table."""

    window: int | None
    """Tokens that a token of these layers sees; None: all, nothing is ever given back."""
    layers: tuple[int, ...]


def cache_groups(spec: ModelSpec, max_model_len: int) -> tuple[CacheGroup, ...]:
    """The groups of a model whose sequences have at most `max_model_len` tokens; the first one keeps everything.

    Layers are in one group if windows would save nothing: sequences are not longer, no layer keeps everything (the
    prefix cache is made of blocks of such layers), or the heads differ in shape.
    """
    every = tuple(range(spec.num_layers))
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        window = layer.attention.window
        by_window.setdefault(None if window is None or window >= max_model_len else window, []).append(index)
    shapes = {(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in spec.layers}
    if len(by_window) == 1 or None not in by_window or len(shapes) > 1:
        return (CacheGroup(None, every),)
    size = min(map(len, by_window.values()))
    return tuple(
        CacheGroup(window, tuple(layers[start : start + size]))
        for window, layers in sorted(by_window.items(), key=lambda item: item[0] is not None)
        for start in range(0, len(layers), size)
    )
