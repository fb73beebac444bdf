"""Norms and gates of all op sets against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo import _core
from octavo.ops.cpu import CpuOps
from octavo.ops.cuda import CudaOps
from octavo.ops.reference import ReferenceOps

EPS = 1e-5


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = {"cpu": CpuOps, "reference": ReferenceOps, "cuda": lambda: CudaOps(DEVICE, torch.float32)}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu if name == DEVICE else ()) for name in OPS])
def ops(request):
    return OPS[request.param]()


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()).float()


@pytest.mark.parametrize("shape", [(1, 576), (7, 100), (3, 2, 16)])
def test_a_norm_equals_fp64(ops, shape):
    x, weight = torch.randn(shape, device=ops.device), torch.rand(shape[-1], device=ops.device) + 0.5
    torch.testing.assert_close(ops.rms_norm(x, weight, EPS), exact(x, weight))


def test_a_norm_of_a_strided_view_equals_fp64(ops):
    x, weight = torch.randn(5, 6, 16, device=ops.device), torch.rand(16, device=ops.device) + 0.5
    torch.testing.assert_close(ops.rms_norm(x[:, 2:5], weight, EPS), exact(x[:, 2:5], weight))
    torch.testing.assert_close(ops.rms_norm(x[:, 1], weight, EPS), exact(x[:, 1], weight))


def test_a_norm_after_an_addition_returns_the_norm_and_the_sum(ops):
    residual, x = torch.randn(4, 96, device=ops.device), torch.randn(96, 4, device=ops.device).T
    weight = torch.rand(96, device=ops.device) + 0.5
    expected = residual + 0.25 * x
    normed, total = ops.add_rms_norm(residual.clone(), x, 0.25, weight, EPS)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, exact(expected, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_equals_fp64(ops, activation):
    x = torch.randn(5, 2 * 700, device=ops.device) * 3
    gate, up = x.double().chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(ops.gated(x, activation), (act * up).float(), atol=2e-6, rtol=1e-5)


def test_wrong_arguments_of_norms_are_named():
    x, weight, out = np.ones((2, 8), np.float32), np.ones(8, np.float32), np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="x: 16 elements are not rows of 7"):
        _core.rms_norm(x, weight[:7], EPS, out)
    with pytest.raises(ValueError, match="out: 8 elements, expected 16"):
        _core.rms_norm(x, weight, EPS, out[:1])
    with pytest.raises(ValueError, match="residual: 8 elements, expected 16"):
        _core.add_rms_norm(np.ones((1, 8), np.float32), x, 1.0, weight, EPS, out)
    with pytest.raises(ValueError, match="x: not contiguous"):
        _core.rms_norm(np.ones((8, 2), np.float32).T, weight, EPS, out)
