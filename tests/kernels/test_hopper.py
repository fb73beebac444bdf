"""The Gluon prefill kernel: against plain attention in fp32 on a Hopper GPU; compiled without spills everywhere."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.prefill_plan import prefill_plan

hopper = pytest.importorskip("octavo.kernels.hopper", reason="Gluon of Triton 3.6")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
HEADS = (8, 2)
"""Of queries, and of keys and values."""
UNTOUCHED = 7.0
ROWS = {
    "one_token": [(0, 1)],
    "whole_tiles": [(0, 256), (0, 128)],
    "uneven": [(0, 1), (0, 63), (0, 200), (0, 129)],
    "prefixes": [(5, 17), (1000, 300), (130, 128), (64, 1)],
    "empty_rows": [(0, 40), (16, 0), (0, 0), (7, 90)],
    "many_tiles_a_program": [(0, 3000), (77, 2500), (0, 1)] + [(9 * i, 100 + 7 * i) for i in range(20)],
}


def case(
    rows: list[tuple[int, int]],
    dim: int,
    block: int,
    dtype: torch.dtype,
    seed: int,
    heads: tuple[int, int] = HEADS,
) -> dict[str, torch.Tensor]:
    """Rows of (tokens in the cache before, new tokens), in scattered blocks of which the last ones are not full."""
    torch.manual_seed(seed)
    columns = [-(-(old + new) // block) for old, new in rows]
    cache = torch.randn(sum(columns) + 3, 2, heads[1], block, dim, device="cuda", dtype=dtype)
    ids = (torch.randperm(sum(columns), device="cuda", dtype=torch.int32) + 1).split(columns)
    table = torch.zeros(len(rows), max(1, *columns), device="cuda", dtype=torch.int32)
    for row, blocks in zip(table, ids, strict=True):
        row[: len(blocks)] = blocks
    starts = torch.tensor([0, *[new for _, new in rows]], device="cuda", dtype=torch.int32).cumsum(0).int()
    tokens = int(starts[-1])
    # The kernel may get rows that do not begin with the step's first token.
    before = 3
    q = torch.randn(tokens + before, heads[0], dim, device="cuda", dtype=dtype)
    return {
        "q": q,
        "kv_cache": cache,
        "block_table": table,
        "query_start_loc": starts + before,
        "seq_lens": torch.tensor([old + new for old, new in rows], device="cuda", dtype=torch.int32),
        "num_tokens": tokens,
    }


def plain(
    arguments, scale, window=None, softcap=None, sinks=None, min_query_len=1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps in fp32 by all scores of a row at once; `UNTOUCHED` where there is nothing to do."""
    q, cache = arguments["q"].float(), arguments["kv_cache"]
    out, lse = torch.full_like(q, UNTOUCHED), torch.full(q.shape[:2], UNTOUCHED, device=q.device)
    starts, lengths = arguments["query_start_loc"].tolist(), arguments["seq_lens"].tolist()
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        count = tokens.stop - tokens.start
        if count < max(1, min_query_len):
            continue
        kept = cache[arguments["block_table"][row].long()].float().permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = kept[:, :, :length].repeat_interleave(q.shape[1] // cache.shape[2], 1)
        scores = torch.einsum("thd,hld->htl", q[tokens], keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length - count, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        scores.masked_fill_(hidden, float("-inf"))
        total = scores.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None].expand_as(total))
        out[tokens] = torch.einsum("htl,hld->thd", (scores - total[..., None]).exp(), values)
        lse[tokens] = total.T
    return out, lse


def check(arguments, **options) -> None:
    """Also that the outputs of tokens without a tile are left alone."""
    scale = arguments["q"].shape[2] ** -0.5
    tiles = options.pop("tiles", None)
    expected, expected_lse = plain(arguments, scale, **options)
    out = torch.full_like(arguments["q"], UNTOUCHED)
    lse = torch.full(out.shape[:2], UNTOUCHED, device="cuda")
    assert hopper.supports(arguments["q"], arguments["kv_cache"].shape[3])
    limits = {"window": None, "softcap": None, **options}
    heads, kv_heads, dim = arguments["q"].shape[1], *arguments["kv_cache"].shape[2::2]
    for few in (False, True):
        plan = prefill_plan(
            arguments["query_start_loc"], arguments["seq_lens"], arguments["num_tokens"],
            tile=hopper.tile_queries(heads, kv_heads, dim, few=few, tiles=tiles),
            min_query_len=options.get("min_query_len", 1),
        )  # fmt: skip
        hopper.prefill_attention(
            out=out.fill_(UNTOUCHED),
            lse=lse.fill_(UNTOUCHED),
            scale=scale,
            tiles=tiles,
            plan=plan,
            **arguments,
            **limits,
        )
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, expected_lse, atol=1e-2, rtol=1e-3)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("dim", "block", "dtype", "heads"),
    [
        (64, 32, torch.float16, (6, 2)),
        (80, 16, torch.bfloat16, (8, 4)),
        (96, 16, torch.bfloat16, (16, 1)),
        (128, 16, torch.bfloat16, (32, 8)),
        (128, 32, torch.bfloat16, (6, 2)),
        (256, 64, torch.bfloat16, (4, 1)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 100}, {"softcap": 20.0}, {"window": 37, "softcap": 5.0}, {"window": 1}, {"min_query_len": 18}],
    ids=str,
)
def test_the_kernel_equals_plain_attention(rows, options, dim, block, dtype, heads):
    check(case(rows, dim, block, dtype, len(rows), heads), **options)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_sinks_join_the_sum_of_weights(dim, window):
    sinks = torch.linspace(-2, 6, HEADS[0], device="cuda", dtype=torch.bfloat16)
    for seed, rows in enumerate(ROWS.values()):
        check(case(rows, dim, 16, torch.bfloat16, seed), sinks=sinks, window=window)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("dim", "changes"),
    [
        (128, {"ping_pong": False}),
        (128, {"q_buffers": 2}),
        (128, {"out_in_q": True, "q_buffers": 2}),
        (64, {"groups": 2, "stages": 2}),
        (64, {"ping_pong": False}),
        (256, {"ping_pong": False}),
    ],
    ids=str,
)
def test_every_cut_gives_the_same(dim, changes):
    tiles = dataclasses.replace(hopper.tiles_for(dim), **changes)
    for seed, rows in enumerate(ROWS.values()):
        check(case(rows, dim, 16, torch.bfloat16, seed), tiles=tiles)


@pytest.mark.gpu
@needs_hopper
def test_a_captured_step_follows_the_lengths_on_the_device():
    """A graph of padded size, replayed with other rows."""
    first, second = (case(ROWS[name], 128, 16, torch.bfloat16, 1) for name in ("whole_tiles", "uneven"))
    arguments = {**first, "query_start_loc": torch.zeros(5, device="cuda", dtype=torch.int32)}
    arguments |= {
        name: torch.zeros(4, *first[name].shape[1:], device="cuda", dtype=torch.int32) for name in ("seq_lens",)
    }
    arguments["block_table"] = torch.zeros(4, 64, device="cuda", dtype=torch.int32)
    arguments["q"] = torch.zeros(512, HEADS[0], 128, device="cuda", dtype=torch.bfloat16)
    arguments["kv_cache"] = torch.zeros(64, *first["kv_cache"].shape[1:], device="cuda", dtype=torch.bfloat16)
    arguments["num_tokens"] = 500
    out = torch.full_like(arguments["q"], UNTOUCHED)
    limits = {"scale": 0.1, "window": None, "softcap": None, "min_query_len": 2}

    def run() -> None:
        hopper.prefill_attention(out=out, **arguments, **limits)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for step in (first, second):
        for name in ("q", "kv_cache", "seq_lens"):
            arguments[name][: len(step[name])] = step[name]
        rows = len(step["seq_lens"])
        arguments["seq_lens"][rows:] = 0
        arguments["block_table"][:rows, : step["block_table"].shape[1]] = step["block_table"]
        arguments["query_start_loc"].fill_(step["query_start_loc"][-1])[: rows + 1] = step["query_start_loc"]
        out.fill_(UNTOUCHED)
        graph.replay()
        expected, _ = plain(arguments, 0.1, min_query_len=2)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


CASES = ("64,0,0", "96,0,0,pack=4", "256,0,0", "128,512,1,pack=2", "128,0,0,extras=1", "64,0,0,groups=2")


def test_it_compiles_for_sm_90_within_its_registers(tmp_path: Path) -> None:
    # In a process whose kernels are compiled, not interpreted.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_prefill.py")), str(tmp_path), *CASES]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(CASES)
    for line in lines:
        found = {name: int(value) for name, value in re.findall(r"(stack|shared)=(\d+)", line)}
        assert found["stack"] == 0, f"registers spill: {line}"
        assert found["shared"] <= 227 << 10, line
