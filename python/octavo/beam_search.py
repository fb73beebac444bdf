"""Beam search over ordinary requests: every step asks each live beam for its likeliest next tokens.

The prefix cache makes a step cheap: a beam's tokens are a hit, only its last block is computed again. Scores follow
transformers: cumulative log-probability over (generated length) ** length_penalty; the prompt's length does not count.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ParameterError
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, FinishReason
from octavo.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from octavo.inputs import Prompt
    from octavo.llm_engine import LLMEngine


@dataclass(slots=True)
class _Beam:
    tokens: list[int]
    logprob: float
    finish: FinishReason | None = None


def beam_search(engine: LLMEngine, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
    """The `params.beam_width` best continuations of `prompt`, best first; stops when no live beam can beat them.

    Raises:
        ParameterError: the prompt is wrong or leaves no room, or `beam_width` needs more logprobs than the engine gives.
    """
    limit = engine.config.max_logprobs
    widest = (engine.vocab_size if limit < 0 else min(limit, engine.vocab_size)) // 2
    if params.beam_width > widest:
        raise ParameterError("beam_width", params.beam_width, f"at most {widest}: half of max_logprobs")
    step_params = SamplingParams(
        temperature=params.temperature, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False, ignore_eos=True
    )
    first = engine.submission(prompt, step_params)
    prompt_ids = first.prompt_token_ids
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(engine.eos_token_ids))
    room = engine.max_model_len - len(prompt_ids)

    def score(beam: _Beam) -> float:
        length = len(beam.tokens) - len(prompt_ids)
        return float(beam.logprob / max(length, 1) ** params.length_penalty)

    live = [_Beam(prompt_ids, 0.0)]
    done: list[_Beam] = []
    for _ in range(min(params.max_tokens, room)):
        requests = [engine.submission_of_ids(beam.tokens, step_params) for beam in live]
        with engine.submit(requests) as batch:
            outputs = batch.collect(lambda _: None)
        candidates: list[_Beam] = []
        for beam, output in zip(live, outputs, strict=True):
            assert output.outputs[0].logprobs is not None
            for token, entry in output.outputs[0].logprobs[0].items():
                grown = _Beam([*beam.tokens, token], beam.logprob + entry.logprob)
                if token in stop_ids:
                    grown.finish = "stop"
                candidates.append(grown)
        candidates.sort(key=lambda beam: beam.logprob, reverse=True)
        best = candidates[: 2 * params.beam_width]
        done.extend(beam for beam in best[: params.beam_width] if beam.finish)
        live = [beam for beam in best if not beam.finish][: params.beam_width]
        done = heapq.nlargest(params.beam_width, done, key=score)
        if not live or (len(done) == params.beam_width and score(done[-1]) >= score(live[0])):
            break
    else:
        for beam in live:
            beam.finish = "length"
        done.extend(live)
    ranked = heapq.nlargest(params.beam_width, done or live, key=score)
    shown = params.include_stop_str_in_output
    return BeamSearchOutput([_sequence(engine, beam, len(prompt_ids), score(beam), shown) for beam in ranked])


def _sequence(
    engine: LLMEngine, beam: _Beam, prompt_length: int, score: float, include_stop: bool
) -> BeamSearchSequence:
    end = None if include_stop or beam.finish != "stop" else -1
    generated = beam.tokens[prompt_length:end]
    text = engine.tokenizer.decode(generated, True) if engine.tokenizer is not None else ""
    return BeamSearchSequence(beam.tokens, text, beam.logprob, score, beam.finish)
