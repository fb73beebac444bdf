"""Checkpoints on disk, safetensors and GGUF, read through numpy and memory maps: no pickle, no torch."""
