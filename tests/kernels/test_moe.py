"""Routing against brute force; mixtures of experts against fp64; compiled for Hopper without spills everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels import moe, routing
from octavo.kernels.expert_tiles import ExpertGemmTiles, ExpertGemvTiles, GemmMixture, GemvMixture

# Without a GPU, Triton's interpreter runs the kernels (conftest.py).
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies matrices of fp16 and fp32 only.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
GEMV = GemvMixture(ExpertGemvTiles(outputs=32, depth=32, warps=1), ExpertGemvTiles(outputs=32, depth=32, warps=1))


def gemm(rows: int, left: bool, group: int = 1) -> GemmMixture:
    cut = ExpertGemmTiles(outputs=64, depth=32, stages=2, warps=4, group=group, weights_left=left)
    return GemmMixture(rows, cut, cut)


def brute_force(logits: list[float], count: int, normalize: bool) -> tuple[list[int], list[float]]:
    """Of one token, without torch: sorted by value, then by index."""
    exact = torch.tensor(logits, dtype=torch.float64)
    share = (exact - exact.max()).exp()
    chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:count]
    total = sum(share[e] for e in chosen) if normalize else share.sum()
    return chosen, [float(share[e] / total) for e in chosen]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(1, 1), (2, 2), (8, 2), (60, 4), (128, 8), (512, 16)], ids=str)
def test_a_token_goes_to_its_largest_logits_and_of_equal_ones_to_the_lower_expert(experts, count, normalize):
    torch.manual_seed(experts)
    # Halves: many of them equal.
    logits = torch.cat([torch.randn(3, experts), torch.randint(-4, 4, (3, experts)) / 2, torch.zeros(1, experts)])
    routed = routing.route(logits.to(DEVICE), count, normalize)
    for row, ids, weights in zip(logits.tolist(), routed.ids.tolist(), routed.weights.tolist(), strict=True):
        expected = brute_force(row, count, normalize)
        assert ids == expected[0]
        assert weights == pytest.approx(expected[1], rel=1e-5)


def test_rows_that_are_no_numbers_go_to_experts_that_exist():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 5, [inf] * 5, [-inf] * 5, [nan, 1.0, nan, 2.0, nan], [0.0, inf, nan, -inf, inf]])
    ids = routing.route(logits.to(DEVICE), 3, True).ids
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 1, 0], [1, 4, 0]]


def test_more_experts_than_there_are_are_refused():
    logits = torch.zeros(2, 4, device=DEVICE)
    for count in (0, 5):
        with pytest.raises(ValueError, match="4 experts"):
            routing.route(logits, count, True)


@pytest.mark.parametrize(
    ("tokens", "count", "experts", "rows"),
    [(1, 1, 1, 16), (1, 8, 20, 16), (7, 3, 5, 1), (7, 3, 5, 16), (64, 8, 40, 16), (700, 8, 9, 64)],
    ids=str,
)
def test_pairs_are_sorted_by_expert_in_tiles_of_one_expert_each(tokens, count, experts, rows):
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts)[:count] for _ in range(tokens)]).int()
    sorted_ids = routing.by_expert(ids.to(DEVICE), experts, rows)
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert sorted_ids.order.tolist() == order
    tiles, place = [], 0
    for expert in range(experts):
        last = place + flat.count(expert)
        tiles += [[expert, first, last] for first in range(place, last, rows)]
        place = last
    assert sorted_ids.tiles[0, 0].item() == len(tiles) <= sorted_ids.max_tiles
    assert sorted_ids.tiles[1 : 1 + len(tiles), :3].tolist() == tiles


def test_there_is_room_for_the_tiles_of_the_least_even_loads():
    for pairs, experts, rows in [(1, 8, 16), (17, 8, 16), (64, 128, 16), (4096, 128, 64)]:
        # One pair for each expert but the last, which has the rest.
        active = min(pairs, experts)
        uneven = active - 1 + -(-(pairs - active + 1) // rows)
        assert uneven <= routing.most_tiles(pairs, experts, rows)
        # Loads of one more than whole tiles: nothing needs more tiles.
        whole = (pairs - active) // rows
        assert active + whole == routing.most_tiles(pairs, experts, rows)


def operands(tokens, hidden, size, experts, dtype, seed=0):
    torch.manual_seed(seed)
    x = torch.full((tokens, hidden + 8), torch.nan, device=DEVICE, dtype=dtype)
    x[:, :hidden] = torch.randn(tokens, hidden, device=DEVICE, dtype=dtype)
    gate_up = torch.randn(experts, 2 * size, hidden, device=DEVICE, dtype=dtype) * hidden**-0.5
    down = torch.randn(experts, hidden, size, device=DEVICE, dtype=dtype) * size**-0.5
    return x[:, :hidden], torch.randn(tokens, experts, device=DEVICE), gate_up, down


def expected(x, logits, gate_up, down, count, normalize, silu):
    """Token by token, in fp64."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        ids, weights = brute_force(logits[token].tolist(), count, normalize)
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            act = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
            result[token] += weight * (down[expert].double() @ (act * up)).cpu()
    return result


def check(result, reference, bound=8e-3):
    assert (result.double().cpu() - reference).norm() / reference.norm() < bound


CUTS = {
    "gemv": (GEMV, 5), "left16": (gemm(16, True), 20), "right16": (gemm(16, False), 20), "left32": (gemm(32, True, 4), 20),
    "right64": (gemm(64, False, 2), 20), "default": (None, 6),
}  # fmt: skip


@pytest.mark.parametrize(("hidden", "size", "experts", "count"), [(64, 32, 8, 2), (72, 77, 4, 3)], ids=str)
@pytest.mark.parametrize(("tiles", "tokens"), CUTS.values(), ids=CUTS)
def test_a_mixture_is_that_of_fp64(tiles, tokens, hidden, size, experts, count):
    normalize = silu = size == 32
    given = operands(tokens, hidden, size, experts, HALF)
    options = {"num_per_token": count, "normalize": normalize, "silu": silu}
    result = moe.mixture(*given, **options, tiles=tiles)
    check(result, expected(*given, count, normalize, silu))
    assert torch.equal(moe.mixture(*given, **options, tiles=tiles), result)


@pytest.mark.parametrize("tiles", [GEMV, gemm(16, True), gemm(16, False, 8)], ids=["gemv", "left", "right"])
def test_loads_may_be_as_uneven_as_they_like(tiles):
    x, logits, gate_up, down = operands(11, 48, 24, 12, HALF)
    logits[:, [3, 11]] += 100.0
    result = moe.mixture(x, logits, gate_up, down, num_per_token=2, normalize=True, silu=True, tiles=tiles)
    check(result, expected(x, logits, gate_up, down, 2, True, True))


@pytest.mark.parametrize("tiles", [GEMV, gemm(16, True), gemm(32, False)], ids=["gemv", "left", "right"])
def test_rows_of_no_numbers_leave_the_other_rows_alone(tiles):
    x, logits, gate_up, down = operands(6, 48, 24, 8, HALF)
    reference = moe.mixture(x[:4], logits[:4], gate_up, down, num_per_token=3, normalize=True, silu=True, tiles=tiles)
    x, logits = x.clone(), logits.clone()
    x[4:], logits[4:] = torch.nan, torch.nan
    result = moe.mixture(x, logits, gate_up, down, num_per_token=3, normalize=True, silu=True, tiles=tiles)
    assert torch.equal(result[:4], reference)


def test_in_fp32_a_tokens_result_is_exact_and_does_not_depend_on_the_others():
    given = operands(9, 70, 45, 3, torch.float32)
    x, logits, gate_up, down = given
    options = {"num_per_token": 2, "normalize": True, "silu": True}
    whole = moe.mixture(*given, **options)
    check(whole, expected(*given, 2, True, True), 1e-6)
    for token in (0, 8):
        alone = moe.mixture(x[token : token + 1], logits[token : token + 1], gate_up, down, **options)
        # The interpreter multiplies by a library that adds in other orders at other places.
        torch.testing.assert_close(alone[0], whole[token], rtol=0, atol=0 if DEVICE == "cuda" else 1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_logits_of_the_router_are_not_rounded(tokens):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 600, device=DEVICE, dtype=HALF)
    weight = torch.randn(130, 600, device=DEVICE, dtype=HALF) / 25
    logits = moe.router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, atol=1e-5, rtol=1e-5)


def test_operands_that_do_not_fit_are_refused():
    x, logits, gate_up, down = operands(2, 16, 8, 4, HALF)
    options = {"num_per_token": 2, "normalize": True, "silu": True}
    assert moe.mixture(x[:0], logits[:0], gate_up, down, **options).shape == (0, 16)
    for wrong in (
        (x[:, :8], logits, gate_up, down),
        (x, logits[:, :3], gate_up, down),
        (x, logits[:1], gate_up, down),
        (x, logits, gate_up[:, :14], down),
        (x, logits, gate_up.float(), down),
        (x, logits, gate_up, down[:3]),
        (x, logits, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down),
    ):
        with pytest.raises(ValueError, match="do not fit experts"):
            moe.mixture(*wrong, **options)


QWEN = "8,128,2048,768"
MIXTRAL = "2,8,4096,14336"
CASES = [f"{tokens},{shape},0" for shape in (QWEN, MIXTRAL) for tokens in (1, 64, 256, 8192)]


def test_the_default_cuts_compile_for_sm_90_without_spills(tmp_path: Path) -> None:
    # In a process whose kernels are compiled, not interpreted.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_moe.py")), str(tmp_path)]
    command += [*CASES, f"8,{QWEN},1", "64,16,512,2048,512,0"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) >= 4 * len(CASES)
    for line in lines:
        fields = dict(field.split("=") for field in line.split())
        # Spilled registers are on the stack.
        assert fields["stack"] == "0" == fields["local"], line
        assert int(fields["shared"]) <= 227 << 10, line
