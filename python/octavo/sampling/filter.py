"""Top-k, top-p and min-p as one threshold per row: a token stays if its logit reaches it.

With thresholds, tokens of equal logits stay or go together, so the set depends neither on the order of a sort nor on
how many candidates were looked at. `m` rows, `V` vocabulary, `K` leading values.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.sampling import host

# On a CPU so many leading values are tried before the whole row; constants, so that no row depends on another.
_HEADS: Final = (512, 8192)


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
    vocab_size = logits.shape[1]
    top_k = torch.where(top_k < vocab_size, top_k, 0)
    if logits.device.type != "cpu":
        values = logits.sort(dim=-1, descending=True).values
        return _thresholds(values, _mass(logits), top_k, top_p, min_p, whole=True)[0]
    threshold = min_p.log()
    mass = torch.ones(len(logits), dtype=torch.float64)
    open_nucleus = ((top_k <= 0) & (top_p < 1)).nonzero().squeeze(1)
    if len(open_nucleus):
        mass[open_nucleus] = _mass(_of(logits, open_nucleus))
    rest = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    for head in (*_HEADS, vocab_size):
        if not len(rest):
            break
        if head > vocab_size:
            continue
        values = host.largest(_of(logits, rest), head)
        found, settled = _thresholds(
            values, mass[rest], top_k[rest], top_p[rest], min_p[rest], whole=head == vocab_size
        )
        threshold[rest] = found
        rest = rest[~settled]
    return threshold


def _of(logits: Tensor, rows: Tensor) -> Tensor:
    """Some rows, in order; no copy if that is all of them."""
    return logits if len(rows) == len(logits) else logits[rows]


def _mass(logits: Tensor) -> Tensor:
    """float64 `[m]`: sum of `exp` of each row whose largest is 0; by `softmax`, whose sums never depend on other rows."""
    return torch.softmax(logits, dim=-1).amax(dim=-1).double().reciprocal()


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
