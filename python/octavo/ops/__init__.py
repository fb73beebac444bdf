"""The op set: a dozen operations on tensors, and their implementations.

Owns tensors and how weights are stored. Must not know model specs or requests.
"""

from octavo.ops.base import AttentionMetadata, Batch, OpSet, StoredTensor

__all__ = ["AttentionMetadata", "Batch", "OpSet", "StoredTensor"]
