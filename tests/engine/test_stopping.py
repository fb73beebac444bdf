"""Where an answer ends: stop strings, stop ids, end-of-sequence ids, lengths."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError

PROMPT = "hello there, this is a story about"


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


def text_params(**kwargs: object) -> SamplingParams:
    """Draws printable bytes only, so that texts have characters to search for."""
    printable = {"seed": 5, "temperature": 1.0, "max_tokens": 60, "ignore_eos": True, **kwargs}
    return SamplingParams(**printable)  # type: ignore[arg-type]


def joined(llm: LLM, params: SamplingParams) -> tuple[list[str], object]:
    """The deltas of a stream and its last output."""
    deltas, shown, last = [], "", None
    for output in llm.stream(PROMPT, params):
        text = output.outputs[0].text
        assert text.startswith(shown), "text once shown never changes"
        deltas.append(text[len(shown) :])
        shown, last = text, output.outputs[0]
    return deltas, last


def test_a_stop_string_over_several_tokens_is_cut_exactly_and_never_shown(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(), use_tqdm=False)[0].outputs[0].text
    for at in (3, 10, 17):
        stop = whole[at : at + 9]
        deltas, last = joined(llm, text_params(stop=stop))
        expected = whole[: whole.index(stop)]
        assert "".join(deltas) == expected
        assert last.finish_reason == "stop"
        assert last.stop_reason == stop


def test_a_stop_string_that_does_not_complete_loses_nothing(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(), use_tqdm=False)[0].outputs[0].text
    never = whole[20:25] + "\x00never"
    deltas, last = joined(llm, text_params(stop=[never]))
    assert "".join(deltas) == whole
    assert last.finish_reason == "length"


def test_the_earliest_match_wins_whatever_the_order_of_the_list(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(), use_tqdm=False)[0].outputs[0].text
    late, early = whole[30:33], whole[12:15]
    for stops in ([late, early], [early, late]):
        output = llm.generate(PROMPT, text_params(stop=stops), use_tqdm=False)[0].outputs[0]
        first = min(whole.index(late), whole.index(early))
        assert output.text == whole[:first]


def test_the_stop_string_stays_if_asked_for(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(), use_tqdm=False)[0].outputs[0].text
    stop = whole[12:16]
    output = llm.generate(PROMPT, text_params(stop=stop, include_stop_str_in_output=True), use_tqdm=False)[0].outputs[0]
    assert output.text == whole[: whole.index(stop) + len(stop)]


def test_token_ids_and_logprobs_end_with_the_token_that_completes_the_stop(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(logprobs=0), use_tqdm=False)[0].outputs[0]
    stop = whole.text[12:16]
    output = llm.generate(PROMPT, text_params(stop=stop, logprobs=0), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == len(output.text_offsets)
    end = whole.text.index(stop) + len(stop)
    assert output.text_offsets[-1] < end
    assert len(output.token_ids) == len(whole.token_ids) or whole.text_offsets[len(output.token_ids)] >= end


@pytest.mark.parametrize("stop", ["", [""], ["ok", ""]])
def test_an_empty_stop_string_is_refused_by_name(stop: object) -> None:
    with pytest.raises(ParameterError, match="stop"):
        SamplingParams(stop=stop)  # type: ignore[arg-type]


def test_without_a_tokenizer_stop_strings_are_refused_and_stop_ids_work(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(skip_tokenizer_init=True)
    with pytest.raises(ParameterError, match="stop"):
        llm.generate([[5, 6, 7]], SamplingParams(stop="x"), use_tqdm=False)
    free = llm.generate([[5, 6, 7]], text_params(), use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[10]
    output = llm.generate([[5, 6, 7]], text_params(stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", stop, "")


@pytest.fixture
def two_eos(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with a second end-of-sequence id in its generation_config."""
    folder = tmp_path / "two_eos"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 70]}))
    return folder


def test_every_end_of_sequence_id_ends_a_request(make_llm: Callable[..., LLM], two_eos: Path) -> None:
    llm = make_llm(two_eos)
    output = llm.generate(PROMPT, SamplingParams(logit_bias={70: 100}, temperature=0), use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason, output.text) == ([70], "stop", None, "")


def test_min_tokens_counts_outputs_only_and_bans_every_end_of_sequence_id(
    make_llm: Callable[..., LLM], two_eos: Path
) -> None:
    llm = make_llm(two_eos)
    prompt = [10 + i for i in range(40)]
    params = SamplingParams(logit_bias={70: 90, 1: 80}, min_tokens=8, max_tokens=20, temperature=0)
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 9
    assert not {1, 70} & set(output.token_ids[:8])
    assert output.token_ids[8] == 70


def test_ignore_eos_runs_to_max_tokens_through_every_end_of_sequence_id(
    make_llm: Callable[..., LLM], two_eos: Path
) -> None:
    llm = make_llm(two_eos)
    params = SamplingParams(logit_bias={70: 100}, ignore_eos=True, max_tokens=12, temperature=0)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == ([70] * 12, "length")


def test_stop_ids_of_the_user_count_even_under_ignore_eos(make_llm: Callable[..., LLM], two_eos: Path) -> None:
    llm = make_llm(two_eos)
    params = SamplingParams(logit_bias={70: 100}, ignore_eos=True, stop_token_ids=[70], max_tokens=12, temperature=0)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([70], "stop", 70)


def test_a_stop_in_the_last_token_of_the_budget_wins_over_the_length(llm: LLM) -> None:
    free = llm.generate(PROMPT, text_params(max_tokens=10), use_tqdm=False)[0].outputs[0]
    last = free.token_ids[-1]
    budget = free.token_ids.index(last) + 1
    output = llm.generate(PROMPT, text_params(max_tokens=budget, stop_token_ids=[last]), use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("stop", budget)
    if budget > 1:
        shorter = text_params(max_tokens=budget - 1, stop_token_ids=[last])
        assert llm.generate(PROMPT, shorter, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_stop_string_is_not_looked_for_before_min_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(logprobs=0), use_tqdm=False)[0].outputs[0]
    stop = whole.text[4:6]
    output = llm.generate(PROMPT, text_params(stop=stop, min_tokens=30), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) >= 30


def test_chat_without_max_tokens_uses_the_rest_of_the_context_and_says_length(make_llm: Callable[..., LLM]) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    llm = make_llm(max_model_len=96, chat_template=template)
    output = llm.chat(
        [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False
    )[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 96
    assert output.outputs[0].finish_reason == "length"


def test_random_stops_equal_a_search_of_the_whole_text(llm: LLM) -> None:
    whole = llm.generate(PROMPT, text_params(max_tokens=100), use_tqdm=False)[0].outputs[0].text
    numbers = random.Random(3)
    for _ in range(25):
        stops = []
        for _ in range(numbers.randint(1, 4)):
            at, size = numbers.randrange(len(whole) - 6), numbers.randint(1, 6)
            stops.append(whole[at : at + size] + numbers.choice(["", "", "\x00"]))
        found = [whole.index(s) for s in stops if s in whole]
        output = llm.generate(PROMPT, text_params(max_tokens=100, stop=stops), use_tqdm=False)[0].outputs[0]
        if found:
            ends = [whole.index(s) + len(s) for s in stops if s in whole]
            # The match that completes first ends the text; of those, the one that begins first.
            first_end = min(ends)
            start = min(whole.index(s) for s in stops if s in whole and whole.index(s) + len(s) == first_end)
            assert output.text == whole[:start]
            assert output.finish_reason == "stop"
        else:
            assert output.text == whole
