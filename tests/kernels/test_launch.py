"""Launches: what is compiled ahead is not run, and nobody else's kernels are left out for it."""

from __future__ import annotations

import threading

import torch

from octavo.kernels import fused, launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_kernels_of_other_threads_run_while_one_compiles_ahead() -> None:
    x, weight = torch.ones(1, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    mine, theirs = torch.zeros_like(x), torch.zeros_like(x)
    with launch.compiling_ahead(1):
        fused.add_rms_norm(mine, x, 1.0, weight, 1e-6)
        other = threading.Thread(target=fused.add_rms_norm, args=(theirs, x, 1.0, weight, 1e-6))
        other.start()
        other.join()
    assert torch.equal(theirs, x)
    assert not mine.any()
    fused.add_rms_norm(mine, x, 1.0, weight, 1e-6)
    assert torch.equal(mine, x), "afterwards they run again"
