"""The CUDA op set with `deterministic`: a token's numbers are the same bits whatever else is in the step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from octavo.ops.base import AttentionMetadata
from octavo.ops.cuda import CudaOps, StackedExperts
from octavo.ops.dense import LinearWeight

# Without a GPU, Triton's interpreter runs the kernels; it multiplies matrices of fp16 only.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else [pytest.mark.usefixtures("ordered_dots")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
HEADS, KV_HEADS, DIM, BLOCK, LENGTH = 4, 2, 16, 16, 70


@pytest.fixture
def ops() -> CudaOps:
    torch.manual_seed(0)
    return CudaOps(DEVICE, DTYPE, deterministic=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def metadata(table: torch.Tensor, rows: list[tuple[int, int]]) -> AttentionMetadata:
    """Of rows of the same sequence, `(computed, new)` tokens each."""
    starts = list(itertools.accumulate((new for _, new in rows), initial=0))
    return AttentionMetadata(
        slot_mapping=torch.zeros(1, starts[-1], dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([old + new for old, new in rows], dtype=torch.int32, device=DEVICE),
        block_table=table.expand(1, len(rows), -1),
        group_windows=(None,),
        block_size=BLOCK,
        max_query_len=max(new for _, new in rows),
        max_seq_len=LENGTH,
        num_decode_rows=sum(new == 1 for _, new in rows),
        max_decode_query_len=1,
    )


@pytest.mark.parametrize("limits", [{}, {"window": 20}, {"window": 33, "softcap": 5.0}], ids=str)
def test_attention_of_a_token_is_the_same_bits_in_any_chunk(ops: CudaOps, limits: dict[str, Any]) -> None:
    columns = -(-LENGTH // BLOCK)
    cache = random(columns + 1, 2, KV_HEADS, BLOCK, DIM)
    table = torch.randperm(columns, device=DEVICE, dtype=torch.int32)[None, None] + 1
    q = random(LENGTH, HEADS, DIM)
    options = {"scale": DIM**-0.5, "window": None, "softcap": None, **limits}

    def attend(rows: list[tuple[int, int]]) -> torch.Tensor:
        (step,) = ops.prepare_attention(metadata(table, rows))
        queries = torch.cat([q[old : old + new] for old, new in rows])
        return ops.attention(queries, cache, step, **options)

    whole = attend([(0, LENGTH)])
    assert whole.isfinite().all()
    # Single tokens beside a chunk, as in a step of decodes and a prefill; then chunks that begin anywhere.
    rows = [(69, 1), (3, 1), (40, 1), (17, 23)]
    at = torch.cat([torch.arange(old, old + new) for old, new in rows])
    assert torch.equal(attend(rows), whole[at])
    for old, new in ((0, 7), (7, 60), (67, 3)):
        assert torch.equal(attend([(old, new)]), whole[old : old + new])


def test_products_and_experts_of_a_token_are_the_same_bits_beside_any_others(ops: CudaOps) -> None:
    hidden, size, experts, many = 32, 24, 4, 67
    x = random(many, hidden)
    weight = LinearWeight(random(136, hidden), random(136))
    gate_up = LinearWeight(random(2 * size, hidden), None)
    router = LinearWeight(random(experts, hidden), None)
    stacked = StackedExperts(random(experts, 2 * size, hidden), random(experts, hidden, size))

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            ops.linear(x, weight),
            ops.gated_linear(x, gate_up, "silu"),
            ops.moe(x, router, stacked, num_per_token=2, normalize=True, activation="silu"),
            ops.logits(x, weight, 0.5, 30.0),
        ]

    whole = results(x)
    for part in (slice(0, 1), slice(66, 67), slice(3, 12)):
        for found, expected in zip(results(x[part]), whole, strict=True):
            assert torch.equal(found, expected[part])
