"""The gated feed-forward block."""

from __future__ import annotations

from octavo.models.spec import MlpSpec, ModelSpec
from octavo.models.weights.base import WeightSource
from octavo.ops.base import OpSet, Tensor


class Mlp:
    """`down(act(gate(x)) * up(x))`. `prefix` is the layer's, e.g. `layers.3`."""

    def __init__(self, spec: MlpSpec, model: ModelSpec, ops: OpSet, weights: WeightSource, prefix: str):
        self._ops = ops
        self._activation = spec.activation
        size, hidden = spec.intermediate_size, model.hidden_size
        sizes = {"mlp_gate": size, "mlp_up": size}
        self._gate_up = ops.linear_weight(
            weights.parts(prefix, "mlp_gate_up", sizes, hidden),
            [weights.tensor(f"{prefix}.{name}.bias", (size,)) for name in sizes] if spec.bias else (),
        )
        self._down = ops.linear_weight(
            [weights.tensor(f"{prefix}.mlp_down.weight", (hidden, size))],
            [weights.tensor(f"{prefix}.mlp_down.bias", (hidden,))] if spec.bias else (),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        ops = self._ops
        return ops.linear(ops.gated_linear(x, self._gate_up, self._activation), self._down)
