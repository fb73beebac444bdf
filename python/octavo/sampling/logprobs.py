"""Log-probabilities that are reported: of the sampled or the real token, and of the likeliest ones.

`m` rows, `N` likeliest tokens, `V` vocabulary. Tokens of equal logits are ordered by id, so reports never depend on a
sort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from octavo.sampling import host

# Elements of logits that are alive at a time while prompt tokens are scored (64 MiB of float32).
_TILE_ELEMENTS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The report for `m` rows."""

    token_ids: Tensor
    """int32 `[m, 1 + N]`: the row's own token, then the likeliest in falling order."""
    logprobs: Tensor
    """float32 `[m, 1 + N]`; -inf for a token that was masked (`processed` mode)."""
    ranks: Tensor
    """int32 `[m]`: rank of the row's own token, from 1; tokens of equal probability share the best rank."""

    @staticmethod
    def cat(parts: list[Logprobs]) -> Logprobs:
        """Reports one after the other."""
        return Logprobs(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )


def likeliest(values: Tensor, count: int) -> Tensor:
    """Ids int64 `[m, count]` of the largest of float32 `[m, V]`, falling; equal values by rising id."""
    if values.device.type == "cpu":
        return host.likeliest(values, count)
    return sorted_ids(values, count)


def sorted_ids(values: Tensor, count: int) -> Tensor:
    """`likeliest` by sorting integers: the float's bits, made monotone, above the complement of the id."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(values.shape[-1], device=values.device)
    keys = ((ordered << 32) | (0xFFFFFFFF - ids)).topk(count, dim=-1).values
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def gather_logprobs(logprobs: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """The report of each row.

    Args:
        logprobs: float32 `[m, V]`.
        tokens: int64 `[m]`, the row's own token.
        count: `N`.
    """
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    ids = tokens[:, None]
    if count > 0:
        top = likeliest(logprobs, min(count, logprobs.shape[1]))
        ids = torch.cat([ids, top], dim=1)
        own = torch.cat([own, logprobs.gather(1, top)], dim=1)
    return Logprobs(ids.int(), own, ranks.int())


def prompt_logprobs(logits: Callable[[int, int], Tensor], targets: Tensor, count: int, vocab_size: int) -> Logprobs:
    """Scores prompt tokens in tiles of rows, so that memory does not grow with the prompt.

    Args:
        logits: gives float `[stop - start, >= V]` for the rows `start:stop`, e.g. the model's head applied to these
            rows, or a slice of a tensor.
        targets: int64 `[T]`, the token that follows each row.
        count: `N` likeliest tokens beside it.
        vocab_size: `V`.

    Returns:
        The reports of all `T >= 1` rows.
    """
    tile = max(1, _TILE_ELEMENTS // vocab_size)
    parts = []
    for start in range(0, len(targets), tile):
        stop = min(start + tile, len(targets))
        rows = logits(start, stop)[:, :vocab_size].float().log_softmax(dim=-1)
        parts.append(gather_logprobs(rows, targets[start:stop], count))
    return Logprobs.cat(parts)
