"""Top-k, top-p and min-p as one threshold per row: a token stays if its logit reaches it.

With thresholds, tokens of equal logits stay or go together, so the set depends neither on the order of a sort nor on
how many candidates were looked at. `m` rows, `V` vocabulary, `K` leading values.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

# On a CPU so many leading values are tried before the whole row is sorted; a constant, so that no row depends on
# another.
_HEAD: Final = 1024


def keep_thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit that passes top-k, then top-p of what is left, then min-p.

    Args:
        logits: float32 `[m, V]`, divided by the temperature, the largest of each row is 0.
        top_k: int32 `[m]`; 0 or less, or `V` and more: all.
        top_p: float32 `[m]`; 1: all. Otherwise a token stays if what is likelier than it adds up to less.
        min_p: float32 `[m]`; a token stays if it is at least this likely relative to the likeliest.

    Returns:
        float32 `[m]`, -inf where everything stays.
    """
    # From `softmax`, whose sum over a row never depends on the other rows.
    mass = torch.softmax(logits, dim=-1).amax(dim=-1).double().reciprocal()
    vocab_size = logits.shape[1]
    top_k = torch.where(top_k < vocab_size, top_k, 0)
    if logits.device.type != "cpu":
        return _thresholds(logits.sort(dim=-1, descending=True).values, mass, top_k, top_p, min_p, whole=True)[0]
    if vocab_size <= _HEAD:
        return _thresholds(_largest(logits, vocab_size), mass, top_k, top_p, min_p, whole=True)[0]
    threshold, settled = _thresholds(_largest(logits, _HEAD), mass, top_k, top_p, min_p, whole=False)
    if not settled.all():
        rest = (~settled).nonzero().squeeze(1)
        values = _largest(logits[rest], vocab_size)
        threshold[rest] = _thresholds(values, mass[rest], top_k[rest], top_p[rest], min_p[rest], whole=True)[0]
    return threshold


def _largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row of a CPU tensor, descending: NumPy sorts with SIMD, torch does not."""
    values = -logits.numpy()
    if count < values.shape[1]:
        values = np.partition(values, count - 1, axis=1)[:, :count]
    values.sort(axis=1)
    return torch.from_numpy(values).neg_()


def _thresholds(
    values: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, whole: bool
) -> tuple[Tensor, Tensor]:
    """Thresholds from the leading values.

    Args:
        values: float32 `[m, K]`, descending, the first is 0.
        mass: float64 `[m]`, sum of `exp` over the whole row.
        top_k: below `V`; otherwise as in `keep_thresholds`, and so are `top_p` and `min_p`.
        whole: `K` is the vocabulary.

    Returns:
        float32 `[m]`, and bool `[m]`: the leading values were enough to know.
    """
    count = values.shape[1]
    lowest = torch.full_like(values[:, 0], -torch.inf)
    limited = top_k > 0
    k = top_k.clamp(1, count).long()
    k_value = torch.where(limited, values.gather(1, k[:, None] - 1).squeeze(1), lowest)
    passed = values >= k_value[:, None]

    cumulative = values.double().exp_().cumsum(dim=-1)
    # Nothing passes in a row of NaN; its result is never looked at.
    k_mass = cumulative.gather(1, (passed.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)).squeeze(1)
    before = torch.cat([torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], dim=1)
    wanted = top_p.double() * torch.where(limited, k_mass, mass)
    nucleus = (passed & (before < wanted[:, None])).sum(dim=-1, keepdim=True).clamp_(min=1)
    p_value = torch.where(top_p < 1, values.gather(1, nucleus - 1).squeeze(1), lowest)

    threshold = torch.maximum(torch.maximum(k_value, p_value), min_p.log())
    if whole:
        return threshold, torch.ones_like(limited)
    last = values[:, -1]
    # A top-k set that may go on behind the last value also leaves its mass, and so the nucleus, unknown.
    open_end = limited & (last >= k_value) | (last >= threshold)
    return threshold, ~open_end | (last == -torch.inf)
