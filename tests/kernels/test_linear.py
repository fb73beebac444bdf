"""Products of few rows against fp64; compiled for Hopper without spills everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels import fused, launch, linear
from octavo.kernels.tiles import GemvTiles, SplitTiles, invariant_tiles, ring_tiles, split_tiles

# Without a GPU, Triton's interpreter runs the kernels (conftest.py).
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# The interpreter multiplies matrices of fp16 only.
DTYPES = [torch.bfloat16, torch.float16] if torch.cuda.is_available() else [torch.float16]
GEMV = GemvTiles(outputs=4, depth=64, warps=1)
SPLIT = SplitTiles(outputs=64, depth=32, stages=2, warps=4, splits=3)


def expected(x, weight, bias=None, silu=None):
    """In fp64; gated if `silu` is given."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if silu is None:
        return y
    gate, up = y.chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")) * up


def operands(rows, outputs, depth, dtype, seed=0):
    torch.manual_seed(seed)
    # Rows of a stride of their own, with something between them that must not be read.
    x = torch.full((rows, depth + 8), torch.nan, device=DEVICE, dtype=dtype)
    x[:, :depth] = torch.randn(rows, depth, device=DEVICE, dtype=dtype)
    weight = torch.randn(outputs, depth, device=DEVICE, dtype=dtype) * depth**-0.5
    bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
    return x[:, :depth], weight, bias


def check(result, reference):
    """Each output is an fp32 sum of about unit size, rounded; the interpreter cuts off instead."""
    torch.testing.assert_close(result.double(), reference, atol=2e-2, rtol=1e-2)
    assert (result.double() - reference).norm() / reference.norm() < 8e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tiles", "rows", "outputs", "depth"),
    [
        (GEMV, 1, 9, 64),
        (GEMV, 1, 1, 200),
        (GEMV, 3, 10, 40),
        (GEMV, 4, 6, 77),
        (SPLIT, 2, 65, 96),
        (SPLIT, 5, 130, 200),
        (SPLIT, 17, 64, 24),
        (SPLIT, 64, 33, 136),
        (SPLIT, 70, 20, 75),
    ],
    ids=str,
)
def test_a_product_of_few_rows_is_that_of_fp64(tiles, rows, outputs, depth, dtype):
    x, weight, bias = operands(rows, outputs, depth, dtype)
    check(linear.linear(x, weight, tiles=tiles), expected(x, weight))
    check(linear.linear(x, weight, bias, tiles=tiles), expected(x, weight, bias))


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "gelu"])
@pytest.mark.parametrize(
    ("tiles", "rows", "outputs", "depth"),
    [
        (GEMV, 1, 18, 64),
        (GEMV, 3, 10, 150),
        (SPLIT, 4, 140, 100),
        (SPLIT, 33, 34, 64),
    ],
    ids=str,
)
def test_a_gated_product_multiplies_its_halves_outputs(tiles, rows, outputs, depth, silu):
    x, weight, _ = operands(rows, outputs, depth, DTYPES[0])
    check(linear.gated_linear(x, weight, silu, tiles=tiles), expected(x, weight, silu=silu))


@pytest.mark.parametrize("rows", [1, 4, 5, 20])
def test_the_default_cut_fits_every_number_of_rows(rows):
    x, weight, bias = operands(rows, 48, 64, torch.float16)
    check(linear.linear(x, weight, bias), expected(x, weight, bias))
    check(linear.gated_linear(x, weight, True), expected(x, weight, silu=True))


def test_what_our_kernels_do_not_take_is_multiplied_too():
    x, weight, bias = (t.float() for t in operands(3, 6, 10, torch.bfloat16))
    torch.testing.assert_close(linear.linear(x, weight, bias).double(), expected(x, weight, bias), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        linear.gated_linear(x, weight, True).double(), expected(x, weight, silu=True), atol=1e-5, rtol=1e-5
    )
    assert linear.linear(x[:0], weight).shape == (0, 6)
    transposed = operands(2, 8, 8, torch.bfloat16)[1].T
    x = operands(2, 8, 8, torch.bfloat16)[0]
    check(linear.linear(x, transposed), expected(x, transposed))


def test_operands_that_do_not_fit_are_refused():
    x, weight, bias = operands(2, 6, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit weight"):
        linear.linear(x[:, :8], weight)
    with pytest.raises(ValueError, match="does not fit weight"):
        linear.linear(x.half(), weight)
    with pytest.raises(ValueError, match="bias"):
        linear.linear(x, weight, bias[:5])
    with pytest.raises(ValueError, match="5 rows"):
        linear.gated_linear(x, weight[:5], True)


def test_split_sums_leave_the_counters_at_zero():
    x, weight, _ = operands(5, 130, 200, DTYPES[0])
    first = linear.linear(x, weight, tiles=SPLIT)
    assert not launch.workspace(x.device).counters.any()
    assert torch.equal(linear.linear(x, weight, tiles=SPLIT), first)


@pytest.mark.usefixtures("ordered_dots")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("silu", [None, True], ids=["plain", "gated"])
def test_a_fixed_cut_gives_a_row_the_same_bits_whatever_is_multiplied_with_it(dtype, silu):
    # So many tiles that a program makes all splits' sums, and so few that each has a program.
    tiles = SplitTiles(outputs=64, depth=32, stages=2, warps=4, splits=3, rows=64)
    many = 64 * -(-launch.multiprocessors(torch.device(DEVICE)) // 3) + 20
    x, weight, bias = operands(many, 136, 200, dtype)

    def product(x):
        return (
            linear.linear(x, weight, bias, tiles=tiles)
            if silu is None
            else linear.gated_linear(x, weight, silu, tiles=tiles)
        )

    whole = product(x)
    check(whole, expected(x, weight, bias if silu is None else None, silu))
    for part in (slice(0, 1), slice(5, 6), slice(63, 80), slice(many - 70, many)):
        assert torch.equal(product(x[part]), whole[part])


def test_a_fixed_cut_is_the_same_for_all_numbers_of_rows():
    assert invariant_tiles(4096, 14336, False, 132).rows == 64
    assert invariant_tiles(4096, 14336, False, 132).splits > 1


def test_a_cut_that_is_asked_for_is_never_exchanged_for_another():
    x, weight, _ = operands(8, 8, 8, torch.float16)
    with pytest.raises(ValueError, match="in one piece"):
        linear.linear(x, weight.T, tiles=SPLIT)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64, 100, 128, 200, 256])
def test_the_ring_gives_the_products_of_fp64(rows, dtype, gated):
    for seed, (outputs, depth) in enumerate([(8, 8), (130, 200), (1026, 512), (6144, 1000), (40000, 64)]):
        x, weight, bias = operands(rows, outputs, depth, dtype, seed)
        tiles = ring_tiles(rows, outputs, gated)
        run = (
            (lambda x=x, w=weight, t=tiles: linear.gated_linear(x, w, True, tiles=t))
            if gated
            else (lambda x=x, w=weight, b=bias, t=tiles: linear.linear(x, w, b, tiles=t))
        )
        result = run()
        check(result, expected(x, weight, silu=True) if gated else expected(x, weight, bias))
        assert not launch.workspace(x.device).counters.any()
        assert torch.equal(run(), result), "the result depends on timing"


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tiles", [None, split_tiles(16, 512, 512, False, 132)], ids=["default", "split"])
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 200])
def test_a_chain_of_dependent_launches_gives_what_separate_ones_do(rows, tiles):
    torch.manual_seed(rows)
    weights = [torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16) * 512**-0.5 for _ in range(12)]
    norm = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)

    def chain():
        residual, y = x.clone(), x
        for weight in weights:
            y = linear.linear(y, weight[:512], tiles=tiles)
            y, residual = fused.add_rms_norm(residual, y, 1.0, norm, 1e-6)
            y = linear.gated_linear(y, weight, True, tiles=tiles)
        return y

    launch.set_dependent_launch(False)
    try:
        separate = chain()
        torch.cuda.synchronize()
    finally:
        launch.set_dependent_launch(True)
    assert launch.dependent_launch(x.device)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, separate)


GEMV_DEFAULTS = [(1, 6144, 4096, False), (1, 4096, 14336, False), (1, 14336, 4096, True), (4, 4096, 4096, False)]
SPLIT_DEFAULTS = [(16, 4096, 4096, False), (64, 4096, 14336, False), (64, 14336, 4096, True)]
INVARIANT_DEFAULTS = [(1, 4096, 14336, False), (8192, 4096, 14336, False), (8192, 14336, 4096, True)]
RING_DEFAULTS = [
    (8, 4096, 4096, False),
    (16, 14336, 4096, True),
    (64, 4096, 14336, False),
    (64, 14336, 4096, True),
    (128, 4096, 4096, False),
    (128, 28672, 4096, False),
    (256, 6144, 4096, False),
    (256, 14336, 4096, True),
]


@pytest.mark.parametrize(
    ("kernel", "cases"),
    [
        ("gemv", GEMV_DEFAULTS),
        ("split", SPLIT_DEFAULTS),
        ("invariant", INVARIANT_DEFAULTS),
        ("ring", RING_DEFAULTS),
    ],
)
def test_the_default_cuts_compile_for_sm_90_without_spills(tmp_path: Path, kernel: str, cases: list) -> None:
    # In a process whose kernels are compiled, not interpreted.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_linear.py")), str(tmp_path), kernel]
    command += [f"{rows},{width},{depth},{int(gated)}" for rows, width, depth, gated in cases]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(cases)
    for line in lines:
        fields = dict(field.split("=") for field in line.split())
        # What does not fit into registers goes to the stack; LOCAL is 0 whatever happens.
        assert fields["stack"] == "0", line
        assert int(fields["shared"]) <= (227 << 10) // int(fields["programs"]), line
