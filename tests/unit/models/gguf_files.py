"""GGUF files of transformers' models, written with ggml's `gguf` package: keys, tensor names and encodings are its, not ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_TYPES)
_SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}
"""Where the halves `d` and, but for Q3_K and Q6_K, `dmin` lie in a block."""


def write_gguf(path: Path, model: Any, architecture: str, types: tuple[str, ...] = ("F32",)) -> Any:
    """Writes the model, its matrices in turn as one of `types`, and returns a transformers model with the weights as stored."""
    config = model.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config, architecture)
    stored = copy.deepcopy(model)
    weights = stored.state_dict()
    for number, (name, weight) in enumerate(weights.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, data in _parts(name, weight.numpy()):
            target = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert target is not None, part
            layout = _layout(part, data, config, architecture)
            kind = types[number % len(types)] if data.ndim > 1 else "F32"
            encoded, decoded = _encode(layout, kind, seed=number)
            writer.add_tensor(target, encoded, raw_dtype=gguf.GGMLQuantizationType[kind])
            data[...] = _undo_layout(part, decoded, config, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored.tie_weights()
    return stored


def _parts(name: str, weight: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors of a file that a parameter becomes, as views: experts' gate and up are apart, named as before transformers 5."""
    if name.endswith("experts.gate_up_proj"):
        half = weight.shape[1] // 2
        prefix = name.removesuffix("gate_up_proj")
        return [(f"{prefix}gate_proj.weight", weight[:, :half]), (f"{prefix}up_proj.weight", weight[:, half:])]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", weight)]
    return [(name, weight)]


def _heads(name: str, config: Any) -> int | None:
    """How many heads' rows llama.cpp stores pair by pair in this tensor."""
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else None


def _layout(name: str, data: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    if architecture in ("llama", "granite") and (heads := _heads(name, config)):
        return data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    return data + 1 if architecture.startswith("gemma") and "norm" in name else data


def _undo_layout(name: str, data: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    if architecture in ("llama", "granite") and (heads := _heads(name, config)):
        return data.reshape(heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    return data - 1 if architecture.startswith("gemma") and "norm" in name else data


def _encode(data: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored bytes, and the values that `gguf` reads from them. K-quants, which it cannot make, are random blocks."""
    quantization = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        return data, data
    if kind in K_TYPES:
        encoded = _random_blocks(data, kind, seed)
    else:
        encoded = gguf.quants.quantize(np.ascontiguousarray(data), quantization)
    return encoded, gguf.quants.dequantize(encoded, quantization).reshape(data.shape)


def _random_blocks(data: np.ndarray, kind: str, seed: int) -> np.ndarray:
    quantization = gguf.GGMLQuantizationType[kind]
    size, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = np.random.default_rng(seed).integers(0, 256, (data.size // size, num_bytes), dtype=np.uint8)
    start, stop = _SCALES[kind]
    halves = blocks[:, start:stop]

    def set_scales(d: float, dmin: float) -> np.ndarray:
        halves[:] = np.array([d, dmin][: (stop - start) // 2], dtype=np.float16).view(np.uint8)
        return gguf.quants.dequantize(blocks, quantization)

    if stop - start == 4:
        without = set_scales(1.0, 0.0).mean()
        minimum = without - set_scales(1.0, 1.0).mean()
        scale = data.std() / set_scales(1.0, without / minimum).std()
        set_scales(scale, scale * without / minimum)
    else:
        set_scales(data.std() / set_scales(1.0, 0.0).std(), 0.0)
    return blocks.reshape(*data.shape[:-1], -1)


def _write_config(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if (share := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(head_dim * share))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if (local := config.rope_parameters.get("sliding_attention")) is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if (size := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(size)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def rope_factors(config: Any) -> torch.Tensor:
    """What llama.cpp's converter stores of llama3 scaling: by how much each frequency is divided."""
    rope = config.rope_parameters
    dim = config.hidden_size // config.num_attention_heads
    freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
    waves = 2 * torch.pi / freqs
    original = rope["original_max_position_embeddings"]
    smooth = (original / waves - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    return torch.where(waves < high, 1.0, torch.where(waves > low, float(rope["factor"]), between)).float()
