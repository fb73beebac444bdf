"""Matrices that several threads copy piece by piece equal what the file says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.models.weights.base import PermutedTensor, WeightError
from octavo.models.weights.dummy import DummyTensor
from octavo.models.weights.safetensors import SafetensorsFile
from octavo.ops import upload
from octavo.ops.base import MadeTensor, ReadableTensor
from octavo.ops.upload import Uploader

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def stored(request, tmp_path: Path):
    torch.manual_seed(3)
    matrix = torch.randn(37, 24).to(request.param)
    save_file({"a": torch.zeros(5), "w": matrix}, tmp_path / "m.safetensors")
    return SafetensorsFile(tmp_path / "m.safetensors").tensors["w"], matrix


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("piece", [16, 200, 1 << 20])
def test_a_matrix_in_pieces_of_any_size_is_the_files(stored, device, dtype, piece, monkeypatch):
    monkeypatch.setattr(upload, "_PIECE_BYTES", piece)
    source, matrix = stored
    assert isinstance(source, ReadableTensor)
    out = torch.full(matrix.shape, float("nan"), dtype=dtype, device=device)
    Uploader(torch.device(device), 3).upload([(source, out)])
    assert torch.equal(out.cpu(), matrix.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_another_order_are_read_through_the_map(stored, device):
    source, matrix = stored
    order = np.random.default_rng(0).permutation(len(matrix))
    out = torch.empty(matrix.shape, dtype=matrix.dtype, device=device)
    Uploader(torch.device(device), 2).upload([(PermutedTensor(source, order), out)])
    assert torch.equal(out.cpu(), matrix[torch.from_numpy(order)])


def test_a_file_that_shrinks_while_it_is_read_is_refused_by_name(stored, tmp_path: Path):
    source, matrix = stored
    path = tmp_path / "m.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 8)
    with pytest.raises(WeightError, match=r"m\.safetensors"):
        Uploader(torch.device("cpu"), 2).upload([(source, torch.empty(matrix.shape, dtype=matrix.dtype))])


def test_a_dummy_is_made_where_it_is_wanted_and_the_same_for_the_same_name():
    dummy = DummyTensor("layers.0.attn_q.weight", (64, 32))
    assert isinstance(dummy, MadeTensor)
    first, second, other = torch.empty(64, 32), torch.empty(64, 32), torch.empty(64, 32)
    dummy.fill(first)
    dummy.fill(second)
    DummyTensor("layers.1.attn_q.weight", (64, 32)).fill(other)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert 0.01 < first.std() < 0.03
    assert (DummyTensor("norm.weight", (32,)).float32() == 1).all()
