"""`make demo`: an answer, shared prefixes, and the distance to this machine's limit, on real weights."""

from __future__ import annotations

import time

from octavo.benchmark.speed import WasteMeter, latency
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

_QUESTION = "Name the capital city of France."
_SYSTEM = (
    "You are a helpful assistant in the reading room of a public library. You answer in one short sentence, in plain words, "
    "and you never invent a fact. If you do not know something, you say so and name the shelf where the reader may find "
    "it. You are polite to everyone, you do not talk about politics, and you keep your answers free of lists, tables and code. "
)
_SUBJECTS = ("the moon", "the sea", "bread", "a violin", "snow", "iron", "a honeybee", "the number seven")
_NUM_REQUESTS = 32


def main() -> None:
    """Runs the three parts and prints what each shows."""
    print("octavo demo: SmolLM2-135M-Instruct on this machine's CPU (about one minute)\n", flush=True)
    with LLM("smollm2-135m", max_model_len=2048, max_num_seqs=_NUM_REQUESTS) as llm:
        _chat(llm)
        _shared_prefix(llm)
        _limit(llm)


def _chat(llm: LLM) -> None:
    print(f"\n1. A streamed answer\n   > {_QUESTION}\n   ", end="", flush=True)
    shown = ""
    for output in llm.stream([{"role": "user", "content": _QUESTION}], SamplingParams(temperature=0.0, max_tokens=40)):
        text = output.outputs[0].text
        print(text[len(shown) :].replace("\n", "\n   "), end="", flush=True)
        shown = text
    print(flush=True)


def _shared_prefix(llm: LLM) -> None:
    print(f"\n2. {_NUM_REQUESTS} requests at once that share a system prompt", flush=True)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=32)
    conversations = [
        [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"Question {i + 1}: tell me something about {_SUBJECTS[i % len(_SUBJECTS)]}."},
        ]
        for i in range(_NUM_REQUESTS)
    ]
    submissions = [llm.engine.submission(llm.engine.render_chat(c), params, stream=True) for c in conversations]
    before, waste, start = llm.stats(), WasteMeter(), time.perf_counter()
    with llm.engine.submit(submissions) as batch:
        for _ in batch.updates():
            waste.sample(llm.stats())
        outputs = [assembler.output for assembler in batch.assemblers.values()]
    seconds, after = time.perf_counter() - start, llm.stats()
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    prompts = sum(len(o.prompt_token_ids) for o in outputs)
    hits = after["hit_tokens"] - before["hit_tokens"]
    print(f"   {generated:,} tokens in {seconds:.1f} s: {generated / seconds:,.0f} tokens/s")
    print(f"   prefix cache: {hits:,.0f} of {prompts:,} prompt tokens were found ready ({hits / prompts:.0%})")
    print(f"   KV cache: {waste.fraction:.1%} of the allocated tokens held nothing")
    print(f"   one of them: {outputs[0].outputs[0].text.strip()[:100]!r}", flush=True)


def _limit(llm: LLM) -> None:
    print("\n3. The limit: a token cannot be made faster than its weights can be read from memory", flush=True)
    found = latency(llm, prompt_tokens=128, output_tokens=64, repeats=3)
    assert found.fraction_of_limit is not None
    print(
        f"   decode runs at {found.fraction_of_limit:.0%} of this machine's limit: {found.decode_tokens_per_s:.0f} tokens/s "
        f"(prefill of 128 tokens: {found.prefill_tokens_per_s:,.0f} tokens/s)\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
