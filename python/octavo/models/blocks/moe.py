"""A routed mixture of gated feed-forward blocks."""

from __future__ import annotations

from octavo.models.spec import ModelSpec, MoeSpec
from octavo.models.weights.base import WeightSource
from octavo.ops.base import OpSet, Tensor


class Moe:
    """`Σ probability[e] · expert[e](x)` over the experts that the router chooses. `prefix` is the layer's, e.g. `layers.3`."""

    def __init__(self, spec: MoeSpec, model: ModelSpec, ops: OpSet, weights: WeightSource, prefix: str):
        self._ops = ops
        self._spec = spec
        count, size, hidden = spec.num_experts, spec.expert_intermediate_size, model.hidden_size
        self._router = ops.linear_weight([weights.tensor(f"{prefix}.router.weight", (count, hidden))])
        gate = weights.experts(prefix, "gate", count, (size, hidden))
        up = weights.experts(prefix, "up", count, (size, hidden))
        down = weights.experts(prefix, "down", count, (hidden, size))
        self._experts = ops.expert_weights([[g, u] for g, u in zip(gate, up, strict=True)], down)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        spec = self._spec
        return self._ops.moe(
            x,
            self._router,
            self._experts,
            num_per_token=spec.num_experts_per_token,
            normalize=spec.normalize_weights,
            activation=spec.activation,
        )
