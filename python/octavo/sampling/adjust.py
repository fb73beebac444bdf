"""What changes logits before the temperature: bias, penalties, bans, grammar. All in place, on float32 `[N, V]`.

Lists are applied by additive scatters in which entries of slots that are not sampled now add 0: no shape depends on
device data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.sampling.rows import ALL, Pick, Positions
from octavo.sampling.state import TokenLists

_BITS = 32


def _add(logits: Tensor, positions: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """`logits[positions[e, j], token_ids[e]] += values[e, j]`."""
    ids = token_ids[:, None].expand_as(positions)
    logits.index_put_((positions, ids), values.expand_as(positions), accumulate=True)


def _ban(logits: Tensor, positions: Tensor, token_ids: Tensor, banned: Tensor) -> None:
    zero = torch.zeros((), dtype=logits.dtype, device=logits.device)
    _add(logits, positions, token_ids, torch.where(banned, -torch.inf, zero))


def apply_bias(logits: Tensor, at: Positions, lists: TokenLists, num_slots: int) -> None:
    """Adds the logit biases; a ban is a bias of -inf."""
    if lists.bias is None:
        return
    slots, token_ids, values = lists.bias
    positions, sampled = at.of_slots(slots, num_slots)
    _add(logits, positions, token_ids, torch.where(sampled, values[:, None], torch.zeros_like(values[:, None])))


def apply_penalties(logits: Tensor, at: Positions, chosen: Pick) -> None:
    """Repetition over prompt and outputs, then frequency and presence over outputs alone.

    Touches only the logits of tokens that occur: counts are scattered over the vocabulary, and read back where the
    sequence points. A token that occurs twice is written twice with the same value.
    """
    if chosen is None:
        return
    some = logits[chosen]
    token_ids, _, output = at.history(chosen)
    counts = torch.zeros_like(some).scatter_add_(1, token_ids, output.to(some.dtype)).gather(1, token_ids)
    repetition = at.params.repetition[chosen][:, None]
    found = some.gather(1, token_ids)
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= at.params.frequency[chosen][:, None] * counts
    found -= at.params.presence[chosen][:, None] * (counts > 0)
    some.scatter_(1, token_ids, found)
    if chosen is not ALL:
        logits[chosen] = some


def apply_bans(logits: Tensor, at: Positions, lists: TokenLists, num_slots: int) -> None:
    """Stop ids before `min_tokens`, the last token of bad words that the outputs began, all but an allow-list."""
    if lists.stops is not None:
        slots, token_ids = lists.stops
        positions, sampled = at.of_slots(slots, num_slots)
        early = at.positions - at.params.prompt_len < at.params.min_tokens
        _ban(logits, positions, token_ids, sampled & early[positions])
    if lists.bad_words is not None:
        slots, last, prefix, lengths = lists.bad_words
        positions, sampled = at.of_slots(slots, num_slots)
        _ban(logits, positions, last, sampled & _prefix_matches(at, positions, prefix, lengths))
    if lists.allowed is not None and lists.has_allowed is not None:
        slots, token_ids = lists.allowed
        positions, sampled = at.of_slots(slots, num_slots)
        keep = torch.zeros(logits.shape[0] + 1, logits.shape[1], dtype=torch.bool, device=logits.device)
        keep[torch.where(sampled, positions, logits.shape[0]), token_ids[:, None]] = True
        keep[:-1] |= ~lists.has_allowed[at.slots][:, None]
        logits.masked_fill_(~keep[:-1], -torch.inf)


def _prefix_matches(at: Positions, positions: Tensor, prefix: Tensor, lengths: Tensor) -> Tensor:
    """Bool `[E, 1 + k]`: the outputs before each position end with the word's first tokens (no prompt counts)."""
    longest = prefix.shape[1]
    columns = torch.arange(longest, device=prefix.device)
    ends = at.positions[positions]
    indices = ends[:, :, None] - longest + columns
    tokens = at.tokens_at(positions[:, :, None].expand_as(indices), indices)
    same = (tokens == prefix[:, None, :]) | (columns < longest - lengths[:, None, None])
    return same.all(dim=-1) & (ends - lengths[:, None] >= at.params.prompt_len[positions])


def apply_grammar(logits: Tensor, mask: Tensor | None, chosen: Pick) -> None:
    """Removes the tokens whose bit in `mask`, int32 `[N, ceil(V / 32)]`, is 0, at the chosen positions."""
    if mask is None or chosen is None:
        return
    shifts = torch.arange(_BITS, dtype=torch.int32, device=mask.device)
    forbidden = ((mask[chosen][:, :, None] >> shifts) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    if chosen is ALL:
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits[chosen] = logits[chosen].masked_fill_(forbidden, -torch.inf)
