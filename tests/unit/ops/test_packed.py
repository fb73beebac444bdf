"""Weights that stay quantized: linear, head and embedding of the CPU op set against the gguf package's dequantized matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from octavo._core import PackedMatrix
from octavo.ops.cpu import CpuOps

STORAGES = ("Q4_0", "Q4_1", "Q8_0")
WIDTH = 160


class Stored:
    """A `StoredTensor` in memory, quantized by the gguf package."""

    def __init__(self, rows: int, storage: str, seed: int = 0, width: int = WIDTH):
        values = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
        self.name, self.shape, self.storage = f"w{seed}", (rows, width), storage
        self.data = quants.quantize(values, GGMLQuantizationType[storage])
        self.num_bytes = self.data.nbytes

    def rows(self, start: int, stop: int):
        return self.data[start:stop]

    def float32(self, start: int = 0, stop: int | None = None):
        return quants.dequantize(self.data[start:stop], GGMLQuantizationType[self.storage])

    def release(self, stop: int | None = None) -> None:
        pass


def matrix(parts: list[Stored]) -> torch.Tensor:
    return torch.cat([torch.from_numpy(part.float32()) for part in parts])


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(
    "storages", [("Q4_0",), ("Q4_1",), ("Q8_0",), ("Q4_1", "Q4_1", "Q8_0"), ("Q4_0", "Q4_1")], ids="+".join
)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_linear_is_the_product_with_the_stacked_parts_up_to_8_bit_activations(storages, rows):
    parts = [Stored(40 + 3 * i, storage, i) for i, storage in enumerate(storages)]
    x = inputs(rows)
    result = CpuOps().linear(x, CpuOps().linear_weight(parts))
    # Half a step of each activation, as if all errors had the weight's sign.
    steps = x.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1) / 127
    bound = steps / 2 @ matrix(parts).abs().T * 1.01 + 1e-4
    error = (result - x @ matrix(parts).T).abs()
    assert torch.all(error <= bound)
    # Errors are independent: far below the bound in the mean.
    assert error.mean() < 0.25 * bound.mean()


def test_a_bias_is_added():
    class Bias(Stored):
        def float32(self, start: int = 0, stop: int | None = None):
            return np.arange(40, dtype=np.float32)

    ops, part = CpuOps(), Stored(40, "Q4_1")
    plain, biased = ops.linear_weight([part]), ops.linear_weight([part], [Bias(40, "Q8_0")])
    x = inputs(3)
    torch.testing.assert_close(ops.linear(x, biased), ops.linear(x, plain) + torch.arange(40.0))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_row_is_bitwise_the_same_in_any_company_and_on_any_number_of_threads(storage):
    part = Stored(1200, storage)
    weight, x = PackedMatrix([(storage, part.data)]), inputs(40)
    expected = np.empty((40, 1200), dtype=np.float32)
    for row in range(40):
        weight.linear(x[row : row + 1].numpy(), expected[row : row + 1], 1)
    for threads in (1, 2, 3):
        result = np.empty_like(expected)
        weight.linear(x.numpy(), result, threads)
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_packed_table_embeds_exactly_and_is_the_tied_head_too(storage):
    ops, source = CpuOps(), Stored(70, storage)
    embedding, head = ops.embedding_weight(source, tied=True)
    assert head is not None
    ids = torch.tensor([3, 69, 0, 3], dtype=torch.int32)
    torch.testing.assert_close(ops.embed(ids, embedding, 1.0), matrix([source])[ids], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ops.embed(ids, embedding, 2.0), matrix([source])[ids] * 2, rtol=1e-6, atol=1e-6)
    logits = ops.logits(inputs(2), head, 1.0, None)
    assert logits.dtype == torch.float32
    assert logits.bfloat16().float().ne(logits).any()
    torch.testing.assert_close(logits, inputs(2) @ matrix([source]).T, atol=0.4, rtol=0)
    assert ops.embedding_weight(source, tied=False)[1] is None


@pytest.mark.parametrize("storage", STORAGES)
def test_packed_weights_take_no_more_memory_than_the_file(storage):
    part = Stored(64, storage)
    assert PackedMatrix([(storage, part.data)]).num_bytes == part.num_bytes


def test_wrong_arguments_are_named():
    part = Stored(40, "Q4_1")
    weight = PackedMatrix([("Q4_1", part.data)])
    assert weight.shape == (40, WIDTH)
    x, out = np.zeros((2, WIDTH), np.float32), np.zeros((2, 40), np.float32)
    with pytest.raises(ValueError, match=r"x: shape \[2, 128\], expected \[M, 160\]"):
        weight.linear(np.ascontiguousarray(x[:, :128]), out, 1)
    with pytest.raises(ValueError, match="x: not contiguous"):
        weight.linear(np.zeros((WIDTH, 2), np.float32).T, out, 1)
    with pytest.raises(ValueError, match=r"out: shape \[1, 40\], expected \[2, 40\]"):
        weight.linear(x, out[:1], 1)
    with pytest.raises(ValueError, match="out: not contiguous"):
        weight.linear(x, np.zeros((40, 2), np.float32).T, 1)
    with pytest.raises(ValueError, match="ids: 40 is not one of 40 rows"):
        weight.read_rows(np.array([40]), x[:1])
    with pytest.raises(ValueError, match=r"parts\[1\]: storage \"Q5_0\""):
        PackedMatrix([("Q4_1", part.data), ("Q5_0", part.data)])
    with pytest.raises(ValueError, match=r"parts\[1\]: rows of 96 elements, expected 160"):
        PackedMatrix([("Q4_1", part.data), ("Q4_1", Stored(2, "Q4_1", width=96).data)])
