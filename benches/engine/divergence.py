"""How often a greedy answer depends on its batch: the same prompts alone and among sixteen, on real text.

The exact path promises 0; the default one may differ where the arithmetic ties. The gap is that between the two likeliest
tokens, in nats, where the texts part.

    python -m benches.engine.divergence
"""

from __future__ import annotations

import argparse
import json
import statistics

from benches.data import sharegpt
from octavo import LLM, SamplingParams


def measure(count: int, tokens: int, batch: int) -> dict[str, float]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    with LLM(max_model_len=512, enable_prefix_caching=False, disable_log_stats=True) as llm:
        questions = [turns[0][0] for turns in sharegpt(count, seed=1)]
        prompts = [ids[:64] for ids in llm.get_tokenizer().encode_batch(questions) if len(ids) >= 8]
        alone = [llm.generate([p], params, use_tqdm=False)[0].outputs[0] for p in prompts]
        together = []
        for start in range(0, len(prompts), batch):
            outputs = llm.generate(prompts[start : start + batch], params, use_tqdm=False)
            together += [o.outputs[0] for o in outputs]
    parted, gaps = [], []
    for one, many in zip(alone, together, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one.token_ids, many.token_ids, strict=True)) if a != b), None)
        if at is not None:
            assert one.logprobs is not None
            likeliest = sorted((entry.logprob for entry in one.logprobs[at].values()), reverse=True)
            parted.append(at)
            gaps.append(likeliest[0] - likeliest[1])
    return {
        "requests": len(prompts),
        "tokens": tokens,
        "batch": batch,
        "parted": len(parted),
        "parted_share": len(parted) / len(prompts),
        "median_first_difference": statistics.median(parted) if parted else -1,
        "largest_gap_nats": max(gaps, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.requests, arguments.tokens, arguments.batch), indent=2))


if __name__ == "__main__":
    main()
