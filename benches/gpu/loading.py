"""How fast a checkpoint comes onto the GPU, against the rate of the page cache in the same run.

python -m benches.gpu.loading [--layers 16]

Writes a checkpoint of Llama-3-8B's shape with so many layers to the temporary folder, reads it whole with as many threads as
loading uses, and then loads it. Both find it in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from benches.gpu.models import LLAMA_3_8B
from benches.gpu.rows import Row, show
from octavo.models.catalog import resolve_model
from octavo.models.loader import open_model
from octavo.ops.cuda import CudaOps

THREADS = min(8, len(os.sched_getaffinity(0)))
PIECE = 16 << 20


def write(folder: Path, layers: int) -> int:
    """A checkpoint of random numbers, one file for each layer; returns its bytes."""
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B | {"num_hidden_layers": layers}))
    hidden, inner, vocab = 4096, 14336, 128256

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).cpu()

    places: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        places.update(dict.fromkeys(tensors, name))

    head = {
        "model.embed_tokens.weight": random(vocab, hidden),
        "lm_head.weight": random(vocab, hidden),
        "model.norm.weight": random(hidden),
    }
    save("model-head.safetensors", head)
    for number in range(layers):
        at = f"model.layers.{number}"
        shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (1024, hidden),
            "self_attn.v_proj": (1024, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors = {f"{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        save(f"model-{number}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_seconds(folder: Path) -> float:
    """All files through pread into warm memory, by as many threads as load."""
    lane = threading.local()

    def read(piece: tuple[Path, int]) -> None:
        if not hasattr(lane, "buffer"):
            lane.buffer = bytearray(PIECE)
        path, start = piece
        with path.open("rb", buffering=0) as file:
            os.preadv(file.fileno(), [lane.buffer], start)

    pieces = [(path, start) for path in folder.glob("*.safetensors") for start in range(0, path.stat().st_size, PIECE)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, pieces[:THREADS]))
        began = time.perf_counter()
        list(pool.map(read, pieces))
        return time.perf_counter() - began


def load_seconds(folder: Path) -> float:
    """From the opened model to weights on the device."""
    opened = open_model(resolve_model(str(folder)))
    torch.cuda.synchronize()
    began = time.perf_counter()
    loaded = opened.load(CudaOps(), 4096)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del loaded
    torch.cuda.empty_cache()
    return seconds


def rows(layers: int = 16) -> Iterator[Row]:
    """Medians of three turns; the limit is the page cache's rate."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-loading-"))
    try:
        size = write(folder, layers)
        reads, loads = [], []
        for _ in range(3):
            reads.append(read_seconds(folder))
            loads.append(load_seconds(folder))
    finally:
        shutil.rmtree(folder)
    read, load = size / statistics.median(reads) / 1e9, size / statistics.median(loads) / 1e9
    yield Row(
        f"loading of {size / 1e9:.1f} GB from the page cache, {THREADS} threads", load, "GB/s", 0.8 * read, limit=read
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    show(rows(parser.parse_args().layers))


if __name__ == "__main__":
    main()
