"""Measurements on one GPU; `python -m benches.gpu.prefill` and the like."""
