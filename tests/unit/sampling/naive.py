"""The sampler of docs/engine.md for one row, in float64 and plain loops; and rows as both samplers understand them."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import plain_rng
import torch

from octavo.sampling import RowFlag, SampleRows, SlotParams


@dataclass
class Row:
    """One request at one step: its parameters, its tokens, its logits `[1 + drafts, V]`."""

    logits: np.ndarray
    tokens: list = field(default_factory=lambda: [0])
    prompt_len: int = 1
    seed: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0
    stop_ids: list = field(default_factory=list)
    bias: dict = field(default_factory=dict)
    bad_words: list = field(default_factory=list)
    allowed: list = field(default_factory=list)
    grammar: list | None = None
    drafts: list = field(default_factory=list)
    num_logprobs: int = -1

    def __post_init__(self):
        self.logits = np.atleast_2d(np.asarray(self.logits, dtype=np.float32))


@dataclass
class Entry:
    """A `slot_init` entry as the plan decodes it."""

    row: Row
    slot: int

    def __post_init__(self):
        row = self.row
        self.bias_ids = np.array(list(row.bias), dtype=np.int32)
        self.bias_values = np.array(list(row.bias.values()), dtype=np.float32)
        self.stop_ids = np.array(row.stop_ids, dtype=np.int32)
        self.bad_words = [np.array(word, dtype=np.int32) for word in row.bad_words]
        self.allowed_ids = np.array(row.allowed, dtype=np.int32)

    def integer(self, name):
        low, high = self.row.seed & 0xFFFFFFFF, self.row.seed >> 32 & 0xFFFFFFFF
        words = {"slot": self.slot, "num_prompt_tokens": self.row.prompt_len, "num_prompt_logprobs": -1}
        words |= {"seed_lo": low - (low >> 31 << 32), "seed_hi": high - (high >> 31 << 32)}
        return words[name] if name in words else getattr(self.row, name)

    def number(self, name):
        return getattr(self.row, name)


def flags(row):
    """Row flags as the plan sets them."""
    value = 0
    value |= RowFlag.LOGPROBS * (row.num_logprobs >= 0)
    value |= RowFlag.PENALTIES * ((row.presence, row.frequency, row.repetition) != (0, 0, 1))
    value |= RowFlag.RANDOM * (row.temperature > 0)
    value |= RowFlag.FILTER * (row.top_k > 0 or row.top_p < 1 or row.min_p > 0)
    early = len(row.tokens) - row.prompt_len < row.min_tokens
    value |= RowFlag.BIAS * bool(row.bias or row.bad_words or row.allowed or early)
    value |= RowFlag.GRAMMAR * (row.grammar is not None)
    return int(value)


def batch(rows, vocab_size, slots=None):
    """Logits, `SampleRows` and `SlotParams` of some rows, in the given slots."""
    slots = list(range(len(rows))) if slots is None else slots
    params = SlotParams(max(slots) + 2, vocab_size, torch.device("cpu"))
    longest = max(len(row.tokens) for row in rows)
    token_ids = torch.full((max(slots) + 2, longest + 3), vocab_size - 1, dtype=torch.int32)
    for slot, row in zip(slots, rows, strict=True):
        params.set(Entry(row, slot))
        token_ids[slot, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
    width = 1 + max(len(row.drafts) for row in rows)
    drafts = torch.full((len(rows), width - 1), -1, dtype=torch.int32)
    logits = torch.zeros(len(rows), width, vocab_size)
    for i, row in enumerate(rows):
        drafts[i, : len(row.drafts)] = torch.tensor(row.drafts, dtype=torch.int32)
        logits[i, : len(row.logits)] = torch.from_numpy(row.logits[:width])
    sample = SampleRows(
        slots=torch.tensor(slots),
        host_slots=np.array(slots, dtype=np.int32),
        flags=np.array([flags(row) for row in rows], dtype=np.int32),
        num_tokens=torch.tensor([len(row.tokens) for row in rows]),
        max_num_tokens=longest + 2,
        token_ids=token_ids,
        draft_tokens=drafts if width > 1 else None,
        grammar_mask=grammar_mask(rows, width, vocab_size),
    )
    return logits.flatten(0, 1), sample, params


def grammar_mask(rows, width, vocab_size):
    if all(row.grammar is None for row in rows):
        return None
    words = np.zeros((len(rows) * width, -(-vocab_size // 32)), dtype=np.uint32)
    for i, row in enumerate(rows):
        for token in row.grammar or []:
            words[i * width : (i + 1) * width, token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


def processed(row, index=0):
    """float64 `[V]`: logits after everything but the draw, -inf for what cannot be drawn; `None` if no token is left.

    Greedy rows stop before the temperature.
    """
    logits = adjusted(row, index)
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return None
    return logits if row.temperature < 1e-5 else filtered(row, (logits - logits.max()) / row.temperature)


def adjusted(row, index):
    """Bias, penalties, bans, grammar."""
    logits = row.logits[index].astype(np.float64)
    known = row.tokens + row.drafts[:index]
    outputs = known[row.prompt_len :]
    for token, value in row.bias.items():
        logits[token] += -math.inf if value <= -100 else value
    for token in set(known):
        logits[token] *= 1 / row.repetition if logits[token] > 0 else row.repetition
    for token, count in Counter(outputs).items():
        logits[token] -= row.frequency * count + row.presence
    if len(outputs) < row.min_tokens:
        logits[row.stop_ids] = -math.inf
    for word in row.bad_words:
        if len(word) == 1 or outputs[1 - len(word) :] == word[:-1]:
            logits[word[-1]] = -math.inf
    for permitted in (row.allowed or None, row.grammar):
        if permitted is not None:
            logits[[token for token in range(len(logits)) if token not in set(permitted)]] = -math.inf
    return logits


def filtered(row, logits):
    """Top-k, top-p, min-p."""
    if 0 < row.top_k < len(logits):
        logits[logits < sorted(logits, reverse=True)[row.top_k - 1]] = -math.inf
    if row.top_p < 1:
        weights = np.exp(logits) / np.exp(logits).sum()
        likelier = np.array([weights[logits > value].sum() for value in logits])
        logits[likelier >= row.top_p] = -math.inf
    if row.min_p > 0:
        logits[logits < math.log(row.min_p)] = -math.inf
    return logits


def scores(row, index=0):
    """float64 `[V]`: what the draw maximises; `None` if no token is left."""
    logits = processed(row, index)
    if logits is None or row.temperature < 1e-5:
        return logits
    key = plain_rng.row_key(row.seed, row.choice, 0, len(row.tokens) + index)
    noise = [-math.log(plain_rng.exponential(plain_rng.mix(key, token))) for token in range(len(logits))]
    return logits + np.array(noise)


def log_softmax(logits):
    """float64 log-probabilities."""
    logits = np.asarray(logits, dtype=np.float64)
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())
