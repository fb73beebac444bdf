"""From logits to tokens: logit bias, penalties, bans, grammar, temperature, top-k, top-p, min-p, draw; in that order.

Everything is batched, nothing depends on the other rows of the batch, and no shape depends on data of an accelerator. A
draw is the winner of an exponential race over counter-based numbers (`rng`), so it needs no normalised probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from octavo.sampling import host, rng
from octavo.sampling.adjust import apply_bans, apply_bias, apply_grammar, apply_penalties
from octavo.sampling.filter import keep_thresholds
from octavo.sampling.logprobs import Logprobs, gather_logprobs
from octavo.sampling.rows import ALL, Pick, Positions, RowFlag, SampleRows
from octavo.sampling.state import GREEDY_TEMPERATURE, SlotParams, uploaded

LogprobsMode = Literal["raw", "processed"]

# Elements hashed at a time on an accelerator: bounds the scratch.
_TILE_ELEMENTS: Final = 1 << 25


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What a step drew; `n` requests, `k` drafts at most."""

    token_ids: Tensor
    """int64 `[n, 1 + k]`: the accepted drafts and the token after them; what is behind `num_sampled` means nothing."""
    num_sampled: Tensor
    """int32 `[n]`: tokens that count, or -1: this row's logits leave no token (NaN, or everything is masked)."""
    logprob_rows: Tensor | None
    """int64 `[m]`: requests that asked for logprobs; `None`: none did."""
    logprobs: Logprobs | None
    """Reports of the `m * (1 + k)` positions of `logprob_rows`, row by row."""


class Sampler:
    """Stateless but for its settings; one serves all steps.

    Args:
        vocab_size: `V`; further columns of the logits are padding.
        logprobs_mode: `raw`, the model's own distribution, or `processed`, the one that was drawn from (for a greedy
            row: after bias, penalties and bans).
    """

    def __init__(self, vocab_size: int, logprobs_mode: LogprobsMode = "raw") -> None:
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: SampleRows, params: SlotParams) -> SamplerOutput:
        """Draws the next tokens.

        Args:
            logits: `[n * (1 + k), >= V]`; float32 is overwritten.
            rows: the rows that are sampled, and what is known of them.
            params: the sampling parameters of all slots.
        """
        logits = logits[:, : self.vocab_size].float()
        at = Positions(rows, params)
        reported = at.pick(RowFlag.LOGPROBS)
        logprobs = None
        if reported is not None and self.logprobs_mode == "raw":
            logprobs = logits[reported].log_softmax(dim=-1)
        self._adjust(logits, at, params)
        tokens = _argmax(logits)
        best = logits.gather(1, tokens[:, None]).squeeze(1)
        valid = best.isfinite()
        self._draw(logits, tokens, torch.where(valid, best, 0.0), at, params)
        if reported is not None and logprobs is None:
            logprobs = logits[reported].log_softmax(dim=-1)
        tokens = tokens.view(-1, at.width)
        num_sampled = _accepted(tokens, valid.view(-1, at.width), rows.draft_tokens)
        if logprobs is None:
            return SamplerOutput(tokens, num_sampled, None, None)
        report = self._report(logprobs, tokens.flatten()[reported], rows, params)
        which = uploaded((rows.flags & RowFlag.LOGPROBS).nonzero()[0], logits.device)
        return SamplerOutput(tokens, num_sampled, which, report)

    def _adjust(self, logits: Tensor, at: Positions, params: SlotParams) -> None:
        listed = at.pick(RowFlag.BIAS) is not None
        num_slots = len(params.num_logprobs)
        if listed:
            apply_bias(logits, at, params.token_lists(), num_slots)
        apply_penalties(logits, at, at.pick(RowFlag.PENALTIES))
        if listed:
            apply_bans(logits, at, params.token_lists(), num_slots)
        apply_grammar(logits, at.rows.grammar_mask, at.pick(RowFlag.GRAMMAR))

    def _draw(self, logits: Tensor, tokens: Tensor, best: Tensor, at: Positions, params: SlotParams) -> None:
        """Replaces the greedy tokens of random rows by draws; in `processed` mode their logits too."""
        for chosen, filtered in (
            (at.pick(RowFlag.RANDOM, without=RowFlag.FILTER), False),
            (at.pick(RowFlag.RANDOM | RowFlag.FILTER), True),
        ):
            if chosen is None:
                continue
            temperature = at.params.temperature[chosen]
            random = temperature >= GREEDY_TEMPERATURE
            temperature = torch.where(random, temperature, 1.0)[:, None]
            # In place: the logits of all rows, or a copy of some.
            scaled = logits[chosen].sub_(best[chosen][:, None]).div_(temperature)
            threshold = None
            if filtered:
                limits = at.params.top_k[chosen], at.params.top_p[chosen], at.params.min_p[chosen]
                threshold = keep_thresholds(scaled, *limits)
            keys = _row_keys(params.keys(at.slots[chosen], rng.Domain.TARGET), at.positions[chosen])
            tokens[chosen] = torch.where(random, _race(scaled, keys, threshold), tokens[chosen])
            if self.logprobs_mode == "processed":
                if threshold is not None:
                    scaled.masked_fill_((scaled < threshold[:, None]) & random[:, None], -torch.inf)
                logits[chosen] = scaled

    def _report(self, logprobs: Tensor, tokens: Tensor, rows: SampleRows, params: SlotParams) -> Logprobs:
        wanted = params.num_logprobs[rows.host_slots[(rows.flags & RowFlag.LOGPROBS) != 0]]
        return gather_logprobs(logprobs, tokens, max(0, int(wanted.max())))


def _argmax(values: Tensor) -> Tensor:
    """int64 `[n]`: the first of the largest of each row, any NaN before all."""
    return host.argmax(values) if values.device.type == "cpu" else values.argmax(dim=-1)


def _row_keys(keys: Tensor, positions: Tensor) -> Tensor:
    return host.row_keys(keys, positions) if keys.device.type == "cpu" else rng.row_keys(keys, positions)


def _race(scaled: Tensor, keys: Tensor, threshold: Tensor | None) -> Tensor:
    """Draws from `softmax` of float32 `[m, V]`, of what reaches `threshold` `[m]`; int64 `[m]`."""
    if scaled.device.type == "cpu":
        return host.race(scaled, keys, threshold)
    if threshold is not None:
        scaled = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    vocabulary = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    tile = max(1, _TILE_ELEMENTS // scaled.shape[1])
    parts = zip(scaled.split(tile), keys.split(tile), strict=True)
    return torch.cat([rng.race(some, key, vocabulary).argmax(dim=-1) for some, key in parts])


def _accepted(tokens: Tensor, valid: Tensor, drafts: Tensor | None) -> Tensor:
    """int32 `[n]`: drafts that equal what the target draws at their position (the `coupled` rule), and the token after
    them.

    A position counts only if all before it were accepted; one without a token ends the row there, or fails it if it is
    the first.
    """
    count = torch.ones(len(tokens), dtype=torch.int32, device=tokens.device)
    if drafts is not None:
        good = (drafts == tokens[:, :-1]) & valid[:, 1:]
        count += good.int().cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
    return torch.where(valid[:, 0], count, -1)


__all__ = ["ALL", "LogprobsMode", "Pick", "RowFlag", "SampleRows", "Sampler", "SamplerOutput"]
