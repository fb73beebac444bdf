"""Decode attention and its schedule: against plain loops, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.kernels.cascade import cascade_attention, cascade_schedule
from octavo.kernels.decode import decode_attention
from octavo.kernels.decode_schedule import DecodeShape, DecodeTiles, decode_schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 8
TILES = DecodeTiles(keys=16, warps=4, stages=1, programs=1, least=1)
SHAPE = DecodeShape(HEADS, KV_HEADS, DIM, torch.float32, max_query_len=3)
UNTOUCHED = 7.0
# Tokens in the cache before, and new ones: one and several queries, empty rows between and behind, a row that is somebody else's.
ROWS = [(40, 1), (0, 0), (0, 3), (100, 2), (9, 5), (31, 1), (15, 1), (0, 1), (0, 0), (0, 0)]
pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


def case(rows: list[tuple[int, int]], shared_blocks: int = 0) -> dict[str, torch.Tensor]:
    """Scattered blocks; what no row owns is NaN. The rows may begin with the same blocks."""
    generator = torch.Generator().manual_seed(len(rows))
    columns = [-(-(old + new) // BLOCK) for old, new in rows]
    cache = torch.randn(sum(columns) + 2, 2, KV_HEADS, BLOCK, DIM, generator=generator)
    cache[-1] = torch.nan
    table = torch.full((len(rows), max(columns) + 1), len(cache) - 1, dtype=torch.int32)
    ids = torch.randperm(sum(columns), generator=generator).int() + 1
    for row, blocks in zip(table, ids.split(columns), strict=True):
        row[: len(blocks)] = blocks
        if len(blocks):
            row[:shared_blocks] = table[0, :shared_blocks]
    starts = torch.tensor([2, *[new for _, new in rows]]).cumsum(0).int()
    lengths = torch.tensor([old + new for old, new in rows], dtype=torch.int32)
    q = torch.randn(int(starts[-1]) + 3, HEADS, DIM, generator=generator)
    arguments = {"q": q, "kv_cache": cache, "block_table": table, "query_start_loc": starts, "seq_lens": lengths}
    return {name: tensor.to(DEVICE) for name, tensor in arguments.items()}


def plain(arguments, shape: DecodeShape, scale: float, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One query and head after the other, in fp64; `UNTOUCHED` where there is nothing to do."""
    q, cache, table, starts, lengths = (tensor.cpu() for tensor in arguments.values())
    out, lse = torch.full_like(q, UNTOUCHED), torch.full(q.shape[:2], UNTOUCHED)
    for row in range(len(lengths)):
        begin, end = int(starts[row]), int(starts[row + 1])
        if not 0 < end - begin <= shape.max_query_len:
            continue
        for token in range(begin, end):
            last = int(lengths[row]) - (end - token)
            first = 0 if shape.window is None else max(0, last - shape.window + 1)
            seen = [(int(table[row, key // BLOCK]), key % BLOCK) for key in range(first, last + 1)]
            for head in range(HEADS):
                of = head // (HEADS // KV_HEADS)
                keys, values = (torch.stack([cache[b, part, of, i] for b, i in seen]).double() for part in (0, 1))
                scores = keys @ q[token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[token, head] = torch.softmax(scores, 0) @ values
                lse[token, head] = torch.logsumexp(scores, 0)
    return out, lse


@pytest.mark.parametrize(
    ("programs", "changes", "softcap"),
    [(1, {}, None), (5, {"window": 21}, 2.0), (60, {}, None)],
    ids=["one_program", "few_with_window_and_cap", "more_than_tiles"],
)
def test_rows_of_few_queries_equal_the_plain_loop(programs, changes, softcap):
    arguments, shape = case(ROWS), replace(SHAPE, **changes)
    schedule = decode_schedule(
        arguments["query_start_loc"], arguments["seq_lens"], shape, tiles=TILES, programs=programs
    )
    expected = plain(arguments, shape, 0.3, softcap)
    # The second time shows that the counters are as they were.
    for _ in range(2):
        out = torch.full_like(arguments["q"], UNTOUCHED)
        lse = torch.full(out.shape[:2], UNTOUCHED, device=DEVICE)
        decode_attention(**arguments, out=out, schedule=schedule, scale=0.3, softcap=softcap, lse=lse)
        torch.testing.assert_close((out.cpu(), lse.cpu()), expected, atol=2e-5, rtol=1e-5)
        assert not schedule.counters.any()


@pytest.mark.parametrize(("shared_blocks", "found"), [(0, 0), (5, 40)])
def test_what_all_rows_share_is_read_by_a_pass_of_its_own(shared_blocks, found):
    rows = [(40, 1), (70, 2), (45, 1), (90, 1), (0, 0)]
    arguments = case(rows, shared_blocks)
    schedule = cascade_schedule(
        arguments["block_table"], arguments["query_start_loc"], arguments["seq_lens"], SHAPE,
        block_size=BLOCK, num_tokens=9, least_keys=16, tiles=TILES,
    )  # fmt: skip
    assert schedule.keys.tolist() == [found]
    out = torch.full_like(arguments["q"], UNTOUCHED)
    cascade_attention(**arguments, out=out, schedule=schedule, scale=0.3, softcap=None)
    torch.testing.assert_close(out.cpu(), plain(arguments, SHAPE, 0.3, None)[0], atol=2e-5, rtol=1e-5)
    assert not schedule.first.counters.any()
    assert not schedule.rest.counters.any()


def test_the_shared_beginning_ends_before_any_query_and_at_the_first_other_block():
    rows = [(40, 1), (24, 2), (45, 1)]
    for own, found in ((None, 24), (1, 8), (0, 0)):
        arguments = case(rows, shared_blocks=3)
        if own is not None:
            arguments["block_table"][2, own] = 1
        schedule = cascade_schedule(
            arguments["block_table"], arguments["query_start_loc"], arguments["seq_lens"], SHAPE,
            block_size=BLOCK, num_tokens=4, least_keys=1,
        )  # fmt: skip
        assert schedule.keys.tolist() == [found]


@pytest.mark.parametrize("programs", [1, 7, 200])
@pytest.mark.parametrize("window", [None, 21])
def test_every_tile_is_in_one_program(monkeypatch, programs, window):
    monkeypatch.setattr("octavo.kernels.decode_schedule._ROWS_AT_ONCE", 4)
    shape = replace(SHAPE, window=window)
    starts = torch.tensor([2, *[new for _, new in ROWS]]).cumsum(0).int().to(DEVICE)
    lengths = torch.tensor([old + new for old, new in ROWS], dtype=torch.int32, device=DEVICE)
    schedule = decode_schedule(starts, lengths, shape, tiles=replace(TILES, least=2), programs=programs)
    # Every tile of the line by brute force: its row, and the row's first tile.
    line = []
    for row, (old, new) in enumerate(ROWS):
        begin = 0 if window is None else max(0, old - window + 1) // 16 * 16
        tiles = -(-(old + new - begin) // 16) if 0 < new <= shape.max_query_len else 0
        line += [(row, len(line))] * (tiles * KV_HEADS)
    covered = []
    for program, entry in enumerate(schedule.entries.tolist()):
        row, base, start, count, length, share, total, shared = entry
        assert (total, shared) == (len(line), 0)
        mine = list(range(program * share, min(total, (program + 1) * share)))
        covered += mine
        if mine:
            assert (row, base) == line[mine[0]]
            assert (start, count, length) == (int(starts[row]), ROWS[row][1], sum(ROWS[row]))
    assert covered == list(range(len(line)))
    assert max(entry[5] for entry in schedule.entries.tolist()) == max(2, -(-len(line) // programs))
    assert not schedule.counters.any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("dim", "group", "queries"),
    [(128, 4, 1), (128, 8, 4), (64, 4, 2), (80, 1, 1), (96, 4, 1), (256, 2, 3), (128, 4, 16)],
)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 20.0}], ids=str)
def test_short_types_and_real_sizes_equal_attention_in_fp32(dim, group, queries, options):
    """All rows' keys and values are gathered and multiplied at once, in fp32."""
    generator = torch.Generator(DEVICE).manual_seed(dim)
    kv_heads, block, rows, longest = 8, 16, 37, 3000
    lengths = torch.randint(queries, longest, (rows,), generator=generator, device=DEVICE, dtype=torch.int32)
    lengths[:2] = torch.tensor([queries, longest])
    columns = -(-longest // block)
    table = torch.randperm(rows * columns, generator=generator, device=DEVICE).int().view(rows, columns)
    size = (rows * columns, 2, kv_heads, block, dim)
    cache = torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(rows * queries, group * kv_heads, dim, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32) * queries
    window, softcap = options.get("window"), options.get("softcap")
    shape = DecodeShape(group * kv_heads, kv_heads, dim, torch.bfloat16, queries, window)
    schedule = decode_schedule(starts, lengths, shape)
    out = torch.full_like(q, torch.nan)
    decode_attention(q, cache, table, starts, lengths, out, schedule, scale=dim**-0.5, softcap=softcap)
    keys, values = cache[table.long()].float().permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :longest]
    split = q.float().view(rows, queries, kv_heads, group, dim)
    scores = torch.einsum("rqkgd,rkld->rkgql", split, keys) * dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(longest, device=DEVICE) - (
        lengths[:, None, None] - queries + torch.arange(queries, device=DEVICE)[:, None]
    )
    hidden = (behind > 0) | (behind <= -window if window is not None else False)
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    expected = torch.einsum("rkgql,rkld->rqkgd", weights, values).reshape(out.shape)
    torch.testing.assert_close(out.float(), expected, atol=1e-2, rtol=2e-2)
    assert not schedule.counters.any()


def test_a_schedule_of_another_shape_is_refused():
    arguments = case([(3, 1)])
    schedule = decode_schedule(
        arguments["query_start_loc"],
        arguments["seq_lens"],
        replace(SHAPE, heads=4),
        tiles=TILES,
        programs=1,
    )
    with pytest.raises(ValueError, match="heads=4"):
        decode_attention(**arguments, out=arguments["q"], schedule=schedule, scale=1.0, softcap=None)


CASES = [
    "64,1,0,0",
    "128,1,0,0",
    "128,1,0,0,rows=64",
    "96,1,512,1,rows=256",
    "256,1,0,0",
    "128,4,0,0",
    "128,16,0,0,shared=1",
]


def test_it_compiles_for_sm_90_within_its_registers(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    # In a process whose kernels are compiled, not interpreted.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_decode.py")), str(tmp_path), *CASES]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(CASES)
    for line in lines:
        found = {name: int(value) for name, value in re.findall(r"(stack|shared)=(\d+)", line)}
        assert found["stack"] == 0, f"registers spill: {line}"
        assert found["shared"] <= 113 << 10, line
