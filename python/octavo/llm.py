"""Offline inference: `LLM` runs the engine in the caller's process, with no socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.beam_search import beam_search
from octavo.config import DEFAULT_MODEL, EngineConfig
from octavo.errors import EngineError, ParameterError
from octavo.inputs import ChatOptions, Message, PromptType, check_messages, parse_prompt, parse_prompts
from octavo.llm_engine import LLMEngine
from octavo.outputs import BeamSearchOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from octavo.pooling import Pooling, check_pooling, finish
from octavo.progress import RequestProgress
from octavo.requests import RequestAssembler, Submission
from octavo.sampling_params import BeamSearchParams, SamplingParams


class LLM:
    """An engine for batches of prompts.

    Args:
        model: built-in name, hub id (`org/name[@revision]`, `org/name:file.gguf`), folder, or `.gguf` file.
        **kwargs: fields of `octavo.config.EngineConfig`, in vLLM's names.

    Raises:
        ParameterError: an argument is unknown or out of range (a `ValueError`; its message names the argument).

    Example:
        >>> llm = LLM("smollm2-135m")
        >>> llm.generate("The capital of France is")[0].outputs[0].text
    """

    def __init__(self, model: str = DEFAULT_MODEL, **kwargs: Any) -> None:
        self.engine = LLMEngine.from_kwargs(model=model, **kwargs)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An engine from a checked configuration."""
        llm = cls.__new__(cls)
        llm.engine = LLMEngine(config)
        return llm

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt.

        Args:
            prompts: one prompt or many; text, token ids, or mappings with `prompt` or `prompt_token_ids`.
            sampling_params: for all prompts, or one for each; the model's defaults if not given.
            use_tqdm: show a progress bar on a terminal.
            priority: one for each prompt; lower runs first.
            cache_salt: prefixes are shared only among requests with the same salt.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ParameterError: any prompt or parameter is wrong; nothing has been generated then.
        """
        parsed = self.engine.tokenize(parse_prompts(prompts))
        params = self._params_for(len(parsed), sampling_params)
        priorities = _each("priority", priority, len(parsed), 0)
        submissions = [
            self.engine.submission(p, s, priority=pr, cache_salt=cache_salt)
            for p, s, pr in zip(parsed, params, priorities, strict=True)
        ]
        return self._run(submissions, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many; without `max_tokens` an answer may use the rest of the context.

        Args:
            messages: one conversation or many.
            sampling_params: for all conversations, or one for each; the model's defaults if not given.
            use_tqdm: show a progress bar on a terminal.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: end the prompt inside the last message, for the model to go on with it.
            tools: functions that the model may call, in OpenAI's form.
            tool_choice: `auto`, `none` (the model is not told of the tools), `required`, a function, or `allowed_tools`.
            parallel_tool_calls: whether a forced answer may have more than one call.
            chat_template: another template than the model's.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Returns:
            One output for each conversation, in their order; `outputs[0].message` has `content`, `reasoning_content` and
            `tool_calls`, and `outputs[0].text` all that the model wrote.

        Raises:
            ParameterError: a conversation is malformed or the template refuses it (with the template's own message).
        """
        conversations = _conversations(messages)
        params = self._params_for(len(conversations), sampling_params, chat=True)
        options = ChatOptions(
            add_generation_prompt,
            continue_final_message,
            tools,
            tool_choice,
            chat_template,
            chat_template_kwargs,
            parallel_tool_calls,
        )
        prompts = self.engine.render_chats(conversations, options)
        return self._run([self.engine.submission(p, s) for p, s in zip(prompts, params, strict=True)], use_tqdm)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        cache_salt: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, of the model's last hidden states.

        Args:
            prompts: one prompt or many.
            pooling: `last` (the last token's state) or `mean` (of all tokens'); what the model's files say, else `last`.
            dimensions: keep so many of the first numbers, for models that are trained for it.
            normalize: scale each vector to length 1.
            truncate_prompt_tokens: keep so many of a prompt's last tokens; −1: as many as fit.
            use_tqdm: show a progress bar on a terminal.
            cache_salt: prefixes are shared only among requests with the same salt.

        Raises:
            ParameterError: any prompt or parameter is wrong; nothing has been computed then.
            EngineError: a prompt failed in the engine.
        """
        kind, most = check_pooling(pooling), self.engine.hidden_size
        if dimensions is not None and not 1 <= dimensions <= most:
            raise ParameterError("dimensions", dimensions, f"from 1 to {most}")
        parsed = self.engine.tokenize(parse_prompts(prompts))
        submissions = [
            self.engine.embedding(p, kind, truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt)
            for p in parsed
        ]
        with self.engine.submit(submissions) as batch, RequestProgress(len(submissions), use_tqdm) as progress:
            batch.collect(progress.advance)
            return [_embedded(assembler, dimensions, normalize) for assembler in batch.assemblers.values()]

    def stream(
        self,
        prompt: PromptType | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Yields the request as it grows, after each step that brought text; closing the iterator aborts it.

        Args:
            prompt: a prompt, or a conversation (a list of messages).
            sampling_params: the model's defaults if not given.
            cache_salt: prefixes are shared only among requests with the same salt.
            **options: of a conversation, as for `chat`: `tools`, `chat_template_kwargs`, …
        """
        chat = _is_conversation(prompt)
        if options and not chat:
            raise ParameterError(next(iter(options)), options, "left out: only conversations have such options")
        params = self._params_for(1, sampling_params, chat=chat)[0]
        parsed = self.engine.render_chat(check_messages(prompt), **options) if chat else parse_prompt(prompt)
        submission = self.engine.submission(parsed, params, cache_salt=cache_salt, stream=True)
        with self.engine.submit([submission]) as batch:
            yield from batch.updates()

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt, best first."""
        return [beam_search(self.engine, prompt, params) for prompt in parse_prompts(prompts)]

    # -- engine ----------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The tokenizer: `encode`, `decode`, `token_bytes`, `vocab_size`."""
        return self.engine.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that says nothing: the model's `generation_config` over the built-in values."""
        return self.engine.default_sampling_params()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests go on."""
        self.engine.core.reset_prefix_cache()

    def load_weights(self, model: str) -> None:
        """Replaces the weights by those of another checkpoint of the same shape, and forgets every cached prefix.

        Waits for running steps; raises `ParameterError` if the shapes differ.
        """
        self.engine.load_weights(model)

    def stats(self) -> dict[str, float]:
        """Counters of the control plane: blocks, hits, tokens, preemptions."""
        return self.engine.core.stats()

    def shutdown(self) -> None:
        """Stops the engine; unfinished requests end with `abort`."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None, chat: bool = False
    ) -> list[SamplingParams]:
        if given is None:
            return [self.engine.default_sampling_params(chat)] * count
        return _each("sampling_params", given, count, given)

    def _run(self, submissions: list[Submission], use_tqdm: bool) -> list[RequestOutput]:
        with self.engine.submit(submissions) as batch, RequestProgress(len(submissions), use_tqdm) as progress:
            return batch.collect(progress.advance)


def _each(name: str, given: Any, count: int, default: Any) -> list[Any]:
    if given is None:
        return [default] * count
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if len(given) != count:
            raise ParameterError(name, len(given), f"one value, or one for each of the {count} prompts")
        return list(given)
    return [given] * count


def _embedded(assembler: RequestAssembler, dimensions: int | None, normalize: bool) -> EmbeddingRequestOutput:
    output, vector = assembler.output, assembler.vector
    if vector is None:
        raise EngineError(f"request {output.request_id}: {output.error or 'it was ended before its vector was there'}")
    embedding = EmbeddingOutput(finish(vector, dimensions, normalize))
    return EmbeddingRequestOutput(
        output.request_id, output.prompt, output.prompt_token_ids, embedding, output.num_cached_tokens
    )


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and isinstance(prompt[0], dict)
        and "role" in prompt[0]
    )


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Sequence):
        return [check_messages(m) for m in messages]
    return [check_messages(messages)]
