"""A mixture of experts out of an op set's own products: routing, then expert by expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.ops.base import Activation, StoredTensor, Weight


class ExpertOps(ABC):
    """`expert_weights` and `moe` of an op set; the products and gates are a subclass's."""

    @abstractmethod
    def linear_weight(self, parts: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> Weight:
        """See `OpSet`."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Any) -> Tensor:
        """See `OpSet`."""

    @abstractmethod
    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """See `OpSet`."""

    def gated_linear(self, x: Tensor, weight: Any, activation: Activation) -> Tensor:
        """See `OpSet`."""
        return self.gated(self.linear(x, weight), activation)

    def expert_weights(self, gate_up: Sequence[Sequence[StoredTensor]], down: Sequence[StoredTensor]) -> Any:
        """Two weights for each expert."""
        return [(self.linear_weight(g), self.linear_weight([d])) for g, d in zip(gate_up, down, strict=True)]

    def moe(
        self,
        x: Tensor,
        router: Weight,
        experts: Any,
        *,
        num_per_token: int,
        normalize: bool,
        activation: Activation,
    ) -> Tensor:
        """Expert by expert; see `OpSet`."""

        def run(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = experts[expert]
            return self.linear(self.gated_linear(rows, gate_up, activation), down)

        chosen, probabilities = _route(self.linear(x, router), num_per_token, normalize)
        return _mix(x, chosen, probabilities, run)


def _route(router_logits: Tensor, num_per_token: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The chosen experts of each token, `[T, num_per_token]`, and their probabilities, fp64."""
    probabilities, experts = router_logits.double().softmax(-1).topk(num_per_token, dim=-1)
    if normalize:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return experts, probabilities


def _mix(x: Tensor, experts: Tensor, probabilities: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Each expert once for the tokens that chose it, their outputs `run(expert, x[tokens])` added up in the order of the experts.

    Waits for the device to learn which tokens chose which expert.
    """
    out = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, rank = (experts == expert).nonzero(as_tuple=True)
        out[token] += run(expert, x[token]) * probabilities[token, rank, None].to(x.dtype)
    return out
