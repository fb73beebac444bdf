"""Text of random tokens, and prompts at the edges of what fits: streamed and whole, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError

MakeLLM = Callable[..., LLM]
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
# Parts of characters of one to four bytes, and bytes that begin none; of the few, random text has whole characters.
MANY = "😀漢ďกa ".encode() + b"\xff\xc0\x80"
FEW = "ďa".encode()


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(max_model_len=100)


def ids_of_bytes(llm: LLM, data: bytes) -> list[int]:
    tokenizer = llm.get_tokenizer()
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return sorted({by_bytes[bytes([byte])] for byte in data})


def streamed(llm: LLM, params: SamplingParams) -> list[str]:
    """The deltas of a stream."""
    deltas, shown = [], ""
    for output in llm.stream("hello", params):
        text = output.outputs[0].text
        assert text.startswith(shown), "text once shown never changes"
        deltas.append(text[len(shown) :])
        shown = text
    return deltas


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pieces", [MANY, FEW])
def test_deltas_of_any_bytes_join_to_the_decoded_whole_and_hold_no_half_character(
    llm: LLM, seed: int, pieces: bytes
) -> None:
    params = SamplingParams(
        max_tokens=64, seed=seed, ignore_eos=True, temperature=5.0, allowed_token_ids=ids_of_bytes(llm, pieces)
    )
    whole = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert "".join(streamed(llm, params)) == whole.text == llm.get_tokenizer().decode(whole.token_ids)
    raw = b"".join(llm.get_tokenizer().token_bytes(token) for token in whole.token_ids)
    # A replacement stands for bytes that are no character, never for one that came in parts.
    assert whole.text == raw.decode("utf-8", "replace")
    assert pieces == MANY or "ď" in whole.text


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_or_left_out_alike_streamed_and_whole(llm: LLM, skip: bool) -> None:
    letter = ids_of_bytes(llm, b"a")[0]
    params = SamplingParams(
        max_tokens=30, seed=2, ignore_eos=True, skip_special_tokens=skip, temperature=5.0, allowed_token_ids=[2, letter]
    )
    whole = llm.generate("hello", params, use_tqdm=False)[0].outputs[0]
    assert {2, letter} == set(whole.token_ids)
    assert "".join(streamed(llm, params)) == whole.text
    assert whole.text == "".join({2: "" if skip else "<pad>", letter: "a"}[token] for token in whole.token_ids)


@pytest.mark.parametrize("prompt", [[], [[]], ["fine", []], None, {}, {"prompt": None}, {"prompt_token_ids": []}])
def test_an_empty_prompt_that_is_no_text_is_refused_and_the_next_request_works(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ParameterError):
        llm.generate(prompt, SHORT, use_tqdm=False)
    assert len(llm.generate("fine", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_an_empty_text_is_the_beginning_of_a_sequence(llm: LLM) -> None:
    for prompt in ("", [""], {"prompt": ""}):
        output = llm.generate(prompt, SHORT, use_tqdm=False)[0]
        assert output.prompt_token_ids == [llm.get_tokenizer().bos_token_id]
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("messages", [[], [[]], None, "hi", [{}], [{"role": 3}]])
def test_an_empty_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError):
        llm.chat(messages, SHORT, use_tqdm=False)


def test_each_of_many_requests_has_the_whole_context_for_itself(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=200, num_gpu_blocks_override=30)
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    prompts = [[5 + i] * 180 for i in range(4)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == 20
        assert output.outputs[0].finish_reason == "length"


def test_a_long_prompt_is_refused_or_whole_never_cut(llm: LLM) -> None:
    for length in (98, 99):
        output = llm.generate([[5] * length], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)[0]
        assert output.prompt_token_ids == [5] * length
        assert len(output.outputs[0].token_ids) == 100 - length
    for length in (100, 101, 1000):
        with pytest.raises(ParameterError, match=f"at most 99 tokens .* got '{length} tokens'"):
            llm.generate([[5] * length], SHORT, use_tqdm=False)
