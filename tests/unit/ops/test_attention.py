"""Rotation, storing and paged attention of all op sets against a naive loop over tokens and heads."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.ops.base import AttentionMetadata
from octavo.ops.cpu import CpuOps
from octavo.ops.cuda import CudaOps
from octavo.ops.reference import ReferenceOps

# Without a GPU, Triton's interpreter runs the kernels (conftest.py).
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = {
    "reference": ReferenceOps,
    "cpu": lambda: CpuOps(torch.float32),
    "cuda": lambda: CudaOps(DEVICE, torch.float32),
}
HEADS, KV_HEADS, DIM, BLOCK, EPS = 6, 2, 16, 8, 1e-6
INV_FREQ = [10.0 ** (-i / 4) for i in range(8)]


class Step:
    """Rows of (tokens already cached, new tokens), their keys and values random and the cached ones stored in a first step."""

    def __init__(
        self, ops, rows: list[tuple[int, int]], seed: int = 0, decode_rows: int = 0, *, may_share_keys: bool = False
    ):
        self.ops = ops
        self.may_share_keys = may_share_keys
        self.rows = rows
        self.decode_rows = decode_rows
        generator = torch.Generator().manual_seed(seed)
        self.qkv = [torch.randn(old + new, (HEADS + 2 * KV_HEADS) * DIM, generator=generator) for old, new in rows]
        counts = [-(-(old + new) // BLOCK) for old, new in rows]
        ids = torch.randperm(sum(counts), generator=generator) + 1
        self.blocks = list(ids.split(counts))
        self.strange = sum(counts) + 1
        self.cache = ops.kv_cache(self.strange + 1, KV_HEADS, BLOCK, DIM)
        self.cache[self.strange] = 7.0 if ops.name == "cpu" else torch.nan

    def run(
        self, inv_freq=INV_FREQ, window=None, softcap=None, norms=(None, None), interleaved=False, grouped=False
    ) -> torch.Tensor:
        """With `grouped` in the second of two cache groups, whose blocks before the window belong to somebody else."""
        rope, device = self.ops.rope_table([inv_freq], 1.5, 512), self.ops.device
        norms = [None if norm is None else norm.to(device) for norm in norms]
        for first in (True, False):
            spans = [(0, old) if first else (old, old + new) for old, new in self.rows]
            spans, blocks, qkv = zip(
                *[(s, b, x[s[0] : s[1]]) for s, b, x in zip(spans, self.blocks, self.qkv, strict=True) if s[0] < s[1]],
                strict=True,
            )
            positions = torch.cat([torch.arange(*span) for span in spans])
            slots = torch.cat(
                [
                    b[torch.arange(*s) // BLOCK] * BLOCK + torch.arange(*s) % BLOCK
                    for s, b in zip(spans, blocks, strict=True)
                ]
            )
            lengths = [stop - start for start, stop in spans]
            table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).int()
            tables = [table, table.clone()] if grouped else [table]
            if grouped:
                for row, (start, _) in zip(tables[1], spans, strict=True):
                    row[: max(0, start - window + 1) // BLOCK] = self.strange
            steps = self.ops.prepare_attention(
                AttentionMetadata(
                    slot_mapping=torch.stack([torch.zeros_like(slots), slots][-len(tables) :]).to(device),
                    query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32).to(
                        device
                    ),
                    seq_lens=torch.tensor([stop for _, stop in spans], dtype=torch.int32).to(device),
                    block_table=torch.stack(tables).to(device),
                    group_windows=(None, window)[: len(tables)],
                    block_size=BLOCK,
                    max_query_len=max(lengths),
                    max_seq_len=max(stop for _, stop in spans),
                    num_decode_rows=0 if first else self.decode_rows,
                    max_decode_query_len=max([1, *lengths[: self.decode_rows]]),
                    may_share_keys=self.may_share_keys,
                )
            )
            step = steps[-1]
            q = self.ops.rotate_and_store(
                torch.cat(qkv).to(device),
                positions.to(device),
                rope,
                self.cache,
                step,
                q_norm=norms[0],
                k_norm=norms[1],
                eps=EPS,
                interleaved=interleaved,
            )
        return self.ops.attention(q, self.cache, step, scale=0.3, window=window, softcap=softcap).cpu()

    def naive(
        self, inv_freq=INV_FREQ, window=None, softcap=None, norms=(None, None), interleaved=False, grouped=False
    ) -> torch.Tensor:
        out = []
        for (old, new), qkv in zip(self.rows, self.qkv, strict=True):
            heads = qkv.double().view(old + new, -1, DIM).clone()
            heads[:, :HEADS] = naive_norm(heads[:, :HEADS], norms[0])
            heads[:, HEADS:-KV_HEADS] = naive_norm(heads[:, HEADS:-KV_HEADS], norms[1])
            for token in range(old, old + new):
                for head in range(HEADS):
                    kv = HEADS + head // (HEADS // KV_HEADS)
                    query = naive_rotate(heads[token, head], token, inv_freq, interleaved)
                    scores = {}
                    for other in range(token + 1):
                        if window is not None and token - other >= window:
                            continue
                        key = naive_rotate(heads[other, kv], other, inv_freq, interleaved)
                        score = 0.3 * float(query @ key)
                        scores[other] = softcap * math.tanh(score / softcap) if softcap else score
                    top = max(scores.values())
                    weights = {other: math.exp(score - top) for other, score in scores.items()}
                    values = sum(w * heads[other, kv + KV_HEADS] for other, w in weights.items())
                    out.append(values / sum(weights.values()))
        return torch.stack(out).view(-1, HEADS * DIM).float()


def naive_norm(heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Of each head `[T, heads, d]`, or of all heads of a token, by the weight's length."""
    if weight is None:
        return heads
    rows = [row / (row.square().mean() + EPS).sqrt() * weight.double() for row in heads.reshape(-1, len(weight))]
    return torch.stack(rows).view(heads.shape)


def naive_rotate(x: torch.Tensor, position: int, inv_freq: list[float], interleaved: bool) -> torch.Tensor:
    """With the magnitude 1.5 that `run` gives to the table."""
    result = x.clone()
    for i, freq in enumerate(inv_freq):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + len(inv_freq))
        cos, sin = 1.5 * math.cos(position * freq), 1.5 * math.sin(position * freq)
        result[a], result[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return result


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu if name == DEVICE else ()) for name in OPS])
def ops(request):
    return OPS[request.param]()


MIXED = [(30, 1), (9, 1), (0, 1), (17, 4), (0, 21), (140, 2)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"window": 1},
        {"softcap": 2.0},
        {"window": 12, "softcap": 1.0},
        {"interleaved": True},
        {"inv_freq": INV_FREQ[:3]},
        {"inv_freq": INV_FREQ[:3], "interleaved": True},
        {"norms": (torch.linspace(0.5, 2.0, DIM), torch.linspace(2.0, 0.5, DIM))},
        {"norms": (torch.linspace(0.5, 2.0, HEADS * DIM), torch.linspace(2.0, 0.5, KV_HEADS * DIM))},
        {"window": 5, "grouped": True},
        {"window": 33, "grouped": True, "softcap": 2.0},
    ],
    ids=lambda options: "+".join(f"{k}{v}" if isinstance(v, int) else k for k, v in options.items()) or "plain",
)
def test_a_mixed_step_equals_the_naive_loop(ops, options):
    interpreted = ops.name == "cuda" and DEVICE == "cpu"
    if interpreted and len(options) == 1 and "norms" not in options:
        pytest.skip("the interpreter takes seconds: options are tried together there")
    rows = [(18, 1), (0, 1), (9, 4), (0, 9)] if interpreted else MIXED
    step = Step(ops, rows, decode_rows=3)
    torch.testing.assert_close(step.run(**options), step.naive(**options), atol=2e-5, rtol=1e-5)


def test_many_rows_of_one_token_equal_the_naive_loop(ops):
    rows = [(i, 1) for i in range(0, 40, 3 if ops.name != "cuda" else 13)]
    step = Step(ops, rows, seed=4, decode_rows=len(rows))
    torch.testing.assert_close(step.run(), step.naive(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.gpu if DEVICE == "cuda" else ())
        for mode in ("deterministic", "may_share_keys")
    ],
)
def test_decode_rows_equal_the_naive_loop_in_every_mode(mode):
    rows = [(11, 1), (26, 1), (0, 1)]
    ops = CudaOps(DEVICE, torch.float32, deterministic=mode == "deterministic")
    step = Step(ops, rows, seed=5, decode_rows=len(rows), may_share_keys=mode == "may_share_keys")
    torch.testing.assert_close(step.run(), step.naive(), atol=2e-5, rtol=1e-5)


def test_padding_rows_and_tokens_write_to_the_null_block_only(ops):
    cache = ops.kv_cache(3, KV_HEADS, BLOCK, DIM)
    (step,) = ops.prepare_attention(
        AttentionMetadata(
            slot_mapping=torch.tensor([[BLOCK, 0, 1]], device=ops.device),
            query_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32, device=ops.device),
            seq_lens=torch.tensor([1, 0], dtype=torch.int32, device=ops.device),
            block_table=torch.tensor([[[1], [0]]], dtype=torch.int32, device=ops.device),
            group_windows=(None,),
            block_size=BLOCK,
            max_query_len=1,
            max_seq_len=1,
            num_decode_rows=1,
            max_decode_query_len=1,
        )
    )
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM, device=ops.device)
    q = ops.rotate_and_store(
        qkv,
        torch.zeros(3, dtype=torch.long, device=ops.device),
        ops.rope_table([INV_FREQ], 1.0, 8),
        cache,
        step,
        q_norm=None,
        k_norm=None,
        eps=EPS,
        interleaved=False,
    )
    out = ops.attention(q, cache, step, scale=1.0, window=None, softcap=None)
    torch.testing.assert_close(out[0].view(HEADS, DIM), qkv[0].view(-1, DIM)[-KV_HEADS:].repeat_interleave(3, 0))
    assert not cache[2].any()
    assert not cache[1, :, :, 1:].any()
