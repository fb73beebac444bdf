"""Triton and Gluon kernels, each beside its launcher."""
