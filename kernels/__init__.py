"""Triton kernels, each beside its launcher. Tensors in, tensors out; nothing here knows a model or a request."""
