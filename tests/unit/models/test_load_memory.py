"""Loading needs the model's memory and little more, whatever the format."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=60_000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=4,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
# Peak and rest, so that what the interpreter and its libraries take does not count.
CHILD = """
import sys
import torch
from octavo.models.catalog import ModelSource
from octavo.models.loader import load_model, open_model
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps
from pathlib import Path
ops = {"cpu": CpuOps, "float32": ReferenceOps, "bfloat16": lambda: ReferenceOps("cpu", torch.bfloat16)}[sys.argv[2]]()
torch.ones(64, 64) @ torch.ones(64, 64)
def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024
before = status("VmRSS")
model = load_model(ModelSource("test", Path(sys.argv[1])), ops, max_positions=64)
print(before, status("VmHWM"), status("VmRSS"))
"""


def shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, kv = CONFIG.hidden_size, CONFIG.intermediate_size, 4 * 64
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    result = {"model.embed_tokens.weight": (CONFIG.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return result | {f"model.layers.{i}.{n}.weight": shape for i in range(4) for n, shape in layer.items()}


def write_safetensors(folder: Path, dtype: torch.dtype) -> tuple[Path, int]:
    tensors = {name: torch.zeros(shape, dtype=dtype) + 0.01 for name, shape in shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    CONFIG.save_pretrained(folder)
    return folder, sum(tensor.nbytes for tensor in tensors.values())


def write_gguf(folder: Path) -> tuple[Path, int]:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, CONFIG.hidden_size),
        (writer.add_block_count, 4),
        (writer.add_feed_forward_length, CONFIG.intermediate_size),
        (writer.add_head_count, 12),
        (writer.add_head_count_kv, 4),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    names, total = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4), 0
    for name, shape in shapes().items():
        data = np.full(shape, 0.01, dtype=np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(data, kind)
        total += stored.nbytes
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, total


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (lambda folder: write_safetensors(folder, torch.float32), "float32"),
        (lambda folder: write_safetensors(folder, torch.bfloat16), "bfloat16"),
        (write_gguf, "cpu"),
    ],
    ids=["float32", "bfloat16", "packed_q8_0"],
)
def test_loading_takes_at_most_a_tenth_more_than_the_weights(tmp_path, make, ops):
    path, size = make(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), ops], capture_output=True, text=True, check=True, timeout=300
    )
    before, peak, after = map(int, result.stdout.split())
    assert after - before >= 0.95 * size, "the weights are not in memory at all"
    # Beside a tenth of the weights, one piece of 16 MiB and what it is converted through.
    assert peak - before <= 1.1 * size + (40 << 20), f"{(peak - before) / size:.2f} times the weights"
