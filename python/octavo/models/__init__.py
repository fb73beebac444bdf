"""Models as data: specs, families, weights, and the one decoder that runs them.

May know specs and the op set. Must not know requests, slots or plans; `decoder.py` and `blocks/` must not import torch.
"""
