"""Shapes of well-known models, for engines with random weights."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from octavo import LLM

LLAMA_3_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN3: Final[dict[str, Any]] = {
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN3_0_6B: Final[dict[str, Any]] = _QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B: Final[dict[str, Any]] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TINY: Final[dict[str, Any]] = LLAMA_3_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 12288,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""For a look at the benchmarks themselves, on any machine."""
SHAPES: Final = {
    "llama-3-8b": LLAMA_3_8B,
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "tiny": TINY,
}


def random_llm(name: str, **settings: Any) -> LLM:
    """An engine of the shape with random weights, contexts of 16k at most and, unless asked for, no prefix cache.

    Memory of an engine that nobody names any more is given back first: one that is made after another in the same process has to
    be the only one that a variable still holds.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix=f"octavo-{name}-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        usual = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": min(16384, SHAPES[name]["max_position_embeddings"]),
            "enable_prefix_caching": False,
        }
        return LLM(folder, **usual | settings)
