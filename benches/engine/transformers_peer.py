"""octavo against transformers on the same weights in the same run: decode, prefill, eight requests at once.

The two take turns, so that a busy machine slows both; each figure is the median of the rounds. transformers runs the
dequantized weights in bfloat16 with its default attention and a dynamic cache.

    python -m benches.engine.transformers_peer
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from octavo import LLM, SamplingParams
from octavo.analysis.bandwidth import read_bandwidth
from octavo.benchmark.speed import random_prompt
from octavo.models.catalog import resolve_model

PROMPT, OUTPUT, BATCH, PREFILL = 128, 32, 8, 1024


class Peer:
    """transformers, greedy, without a tokenizer."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start


class Ours:
    """octavo through its public API, with the default settings."""

    def __init__(self, path: Path) -> None:
        self.llm = LLM(str(path), max_model_len=2048)

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        self.llm.reset_prefix_cache()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start


def measure(engine: Peer | Ours, seed: int) -> dict[str, float]:
    """Tokens a second. Decode is the difference between a long and a short run of the same prompt."""
    vocab = 49_000
    prompt = [random_prompt(PROMPT, vocab, seed)]
    short, long = engine.run(prompt, 1), engine.run(prompt, 1 + OUTPUT)
    many = [random_prompt(PROMPT, vocab, seed * 1000 + i) for i in range(BATCH)]
    return {
        "decode_tokens_per_s": OUTPUT / (long - short),
        "prefill_tokens_per_s": PREFILL / engine.run([random_prompt(PREFILL, vocab, seed)], 1),
        "batch8_output_tokens_per_s": BATCH * OUTPUT / engine.run(many, OUTPUT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = resolve_model().path
    engines = {"transformers": Peer(path), "octavo": Ours(path)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for seed in range(arguments.rounds + 1):
        for name, engine in engines.items():
            found = measure(engine, seed)
            if seed:  # the first round warms up
                rounds[name].append(found)
    ours = engines["octavo"]
    assert isinstance(ours, Ours)
    bandwidth = read_bandwidth(arguments.threads)
    table = {
        metric: {name: statistics.median(r[metric] for r in found) for name, found in rounds.items()}
        for metric in rounds["octavo"][0]
    }
    for row in table.values():
        row["ratio"] = row["octavo"] / row["transformers"]
    engine = ours.llm.engine
    bytes_per_token = engine.stored_bytes + (PROMPT + OUTPUT / 2) * engine.kv_bytes_per_token
    limit = bandwidth / bytes_per_token
    result = {
        "table": table,
        "read_bandwidth_gb_per_s": bandwidth / 1e9,
        "decode_limit_tokens_per_s": limit,
        "fraction_of_limit": table["decode_tokens_per_s"]["octavo"] / limit,
        "threads": arguments.threads,
        "load_average": os.getloadavg(),
    }
    print(json.dumps(result, indent=2))
    ours.llm.shutdown()


if __name__ == "__main__":
    main()
