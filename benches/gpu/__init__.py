"""Measurements on one GPU; `python -m benches.gpu.attention` and the like."""
