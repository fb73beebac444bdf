"""The generations of attention that benchmarks compare give the same as the product's kernel and as a plain loop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benches.gpu import story, story_kernels

from octavo.kernels import attention

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16


def by_loop(q, k, v, scale):
    """Token by token, in fp64."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for sequence, token, head in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        group = head // (HEADS // KV_HEADS)
        seen = k[sequence, : token + 1, group].double()
        weights = (seen @ q[sequence, token, head].double() * scale).softmax(0)
        out[sequence, token, head] = weights @ v[sequence, : token + 1, group].double()
    return out


def by_the_product(q, k, v, scale):
    """The portable kernel, on a paged cache."""
    batch, length = q.shape[:2]
    columns = -(-length // BLOCK)
    cache = torch.zeros(batch * columns, 2, KV_HEADS, BLOCK, DIM, device=DEVICE)
    table = torch.arange(batch * columns, device=DEVICE, dtype=torch.int32).view(batch, columns)
    position = torch.arange(length, device=DEVICE)
    for sequence in range(batch):
        blocks = table[sequence].long()[position // BLOCK]
        cache[blocks, 0, :, position % BLOCK] = k[sequence]
        cache[blocks, 1, :, position % BLOCK] = v[sequence]
    out = torch.empty(batch * length, HEADS, DIM, device=DEVICE)
    attention.prefill_attention(
        q.reshape(-1, HEADS, DIM), cache, table,
        torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * length,
        torch.full((batch,), length, device=DEVICE, dtype=torch.int32),
        out, batch * length, scale=scale, window=None, softcap=None,
    )  # fmt: skip
    return out.view(q.shape)


@pytest.mark.parametrize("length", [1, 50, 128, 150])
def test_all_generations_agree(length):
    torch.manual_seed(length)
    q = torch.randn(2, length, HEADS, DIM, device=DEVICE)
    k, v = (torch.randn(2, length, KV_HEADS, DIM, device=DEVICE) for _ in range(2))
    expected = by_loop(q, k, v, DIM**-0.5)
    for generation in (story_kernels.naive, story_kernels.flash_1):
        out = torch.full_like(q, torch.nan)
        generation(q, k, v, out, DIM**-0.5)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_the_product(q, k, v, DIM**-0.5).double(), expected, atol=1e-5, rtol=1e-5)


def test_each_generation_moves_fewer_bytes_than_the_one_before():
    for length in (1024, 4096, 16384):
        moved = [
            story_kernels.counted_bytes(generation, 16384 // length, length, 32, 8, 128, tile)
            for generation, tile in (("naive", 0), ("FA-1", 0), ("FA-2", 128))
        ]
        assert moved == sorted(moved, reverse=True)
    # One tile holds everything: queries, keys, values and outputs once each.
    assert story_kernels.counted_bytes("FA-2", 1, 64, 1, 1, 16, 64) == 4 * 64 * 16 * 2


def test_bytes_are_summed_over_kernels_and_units():
    said = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","a","dram__bytes_read.sum","Mbyte","1,200.5"\n"0","a","dram__bytes_write.sum","Gbyte","2"\n'
        '"1","b","sm__cycles.sum","cycle","7"\n"1","b","dram__bytes_read.sum","byte","5"\n'
    )
    assert story.total_bytes(said) == 1_200_500_000 + 2_000_000_000 + 5
    assert story.total_bytes("==ERROR== no permission") is None


def test_the_kernels_compile_for_sm_90_without_spills(tmp_path):
    # In a process whose kernels are compiled, not interpreted.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("compile_attention.py")), str(tmp_path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    lines = [dict(field.split("=") for field in line.split()) for line in result.stdout.splitlines()]
    assert [line["kernel"] for line in lines] == ["portable,128", "portable,64", "FA-1"]
    for line in lines:
        assert line["stack"] == "0", line
        assert int(line["wgmma"]) > 0, line
        assert int(line["shared"]) <= 227 << 10, line
