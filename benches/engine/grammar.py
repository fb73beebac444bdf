"""What a grammar costs a decode: `python -m benches.engine.grammar [MODEL]`.

The same prompts with and without a JSON schema, in turn, so that what else the machine does meets both; the best of each.
"""

from __future__ import annotations

import sys
import time

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.config import DEFAULT_MODEL

TOKENS = 96
ROUNDS = 5
# Never satisfied within the budget: every step of both kinds draws a token.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def tokens_per_second(llm: LLM, params: SamplingParams, rows: int) -> float:
    """Output tokens of `rows` prompts at once, over the time from the first to the last."""
    began = time.perf_counter()
    outputs = llm.generate([f"{i} Once upon a time" for i in range(rows)], params, use_tqdm=False)
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert count == rows * TOKENS
    return count / (time.perf_counter() - began)


def main(model: str) -> None:
    """Prints a table."""
    llm = LLM(model, disable_log_stats=True)
    eos = dict.fromkeys(llm.engine.eos_token_ids, -100.0)
    free = SamplingParams(max_tokens=TOKENS, temperature=0, logit_bias=eos)
    form = SamplingParams(
        max_tokens=TOKENS, temperature=0, logit_bias=eos, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    print("| rows | free, tokens/s | with a JSON schema, tokens/s | ratio |\n| --- | --- | --- | --- |")
    for rows in (1, 8):
        best = {"free": 0.0, "form": 0.0}
        for _ in range(ROUNDS):
            best["free"] = max(best["free"], tokens_per_second(llm, free, rows))
            best["form"] = max(best["form"], tokens_per_second(llm, form, rows))
        print(f"| {rows} | {best['free']:.1f} | {best['form']:.1f} | {best['form'] / best['free']:.3f} |")
    llm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL)
