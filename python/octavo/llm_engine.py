"""One engine in this process: the model, the control plane, and the thread that runs the loop.

What `LLM` and `AsyncLLM` share: it turns prompts and parameters into checked submissions and owns start and stop.
"""

from __future__ import annotations

import hashlib
import numbers
import random
import secrets
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo._core import ChatTemplate, EngineCore, GrammarSource, Mailbox, Tokenizer, first_outside
from octavo.config import EngineConfig
from octavo.defaults import default_sampling_params
from octavo.errors import ContextLengthError, EngineError, InvalidRequestError, ParameterError, check_text
from octavo.inputs import ChatOptions, Prompt
from octavo.message_format import AnswerFormat, ChatFormat
from octavo.pooling import Pooling
from octavo.requests import Batch, RequestAssembler, Submission
from octavo.sampling_params import SamplingParams
from octavo.startup import Started, start
from octavo.text import ChatRenderer, compile_chat_template


class LLMEngine:
    """Made by `from_kwargs`; started when the constructor returns."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._started: Started = start(config)
        self.core: EngineCore = self._started.core
        self.tokenizer: Tokenizer | None = self._started.tokenizer
        self.max_model_len: int = self._started.max_model_len
        self.eos_token_ids: list[int] = self._started.eos_token_ids
        self._template: ChatTemplate | None = self._started.chat_template
        self.chat_format = None if self._template is None else self._format_of(self._template)
        """What the chat template says of the messages that the model writes, if there is one."""
        self._seeds = random.Random(config.seed)
        # Not a bound method: a running thread must not keep a forgotten engine alive.
        self._thread = threading.Thread(target=_run, args=(self._started,), name="octavo-engine", daemon=True)
        self._thread.start()
        # Also at exit: a daemon thread inside torch must not outlive the interpreter.
        self._stop = weakref.finalize(self, _stop, self.core, self._thread)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> LLMEngine:
        """An engine from `EngineConfig`'s fields."""
        return cls(EngineConfig.from_kwargs(**kwargs))

    # -- requests --------------------------------------------------------------------------------------------------

    def tokenize(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts with the ids of those that came as text, made on all cores at once."""
        texts = [prompt.text for prompt in prompts if prompt.token_ids is None and prompt.text is not None]
        if self.tokenizer is None or len(texts) < 2:
            return list(prompts)
        found = iter(self.tokenizer.encode_batch(texts, True, True))
        # What an empty text becomes is decided with the rest of the request.
        return [
            Prompt(p.text, next(found) or None) if p.token_ids is None and p.text is not None else p for p in prompts
        ]

    def submission(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        stream: bool = False,
    ) -> Submission:
        """Checks a request whole and resolves what the model decides: token ids, seed, stop ids, `max_tokens`.

        Raises:
            ParameterError: names the prompt or parameter that is wrong.
            ContextLengthError: the prompt leaves no room for an output token.
        """
        if not isinstance(params, SamplingParams):
            raise ParameterError("sampling_params", params, "SamplingParams")
        params.validate_for(self._started.vocab_size, self.config.max_logprobs)
        given: object = priority
        if isinstance(given, bool) or not isinstance(given, numbers.Integral) or abs(int(given)) >= 1 << 31:
            raise ParameterError("priority", priority, "a 32-bit integer")
        for name, text in (("cache_salt", cache_salt), ("tenant", tenant)):
            if text is not None:
                check_text(name, text)
        token_ids = self._prompt_ids(prompt)
        if params.truncate_prompt_tokens is not None:
            keep = self.max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            token_ids = token_ids[-keep:]
        resolved = self._resolve(params, len(token_ids))
        grammar = self._grammar(params, prompt.answer)
        return Submission(
            prompt.text, token_ids, resolved, int(priority), cache_salt, tenant, stream, prompt.answer, grammar
        )

    def embedding(
        self,
        prompt: Prompt,
        pooling: Pooling | None,
        *,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> Submission:
        """A request for the vector of a prompt: its prompt is computed, and nothing after it. Raises as `submission` does."""
        params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, truncate_prompt_tokens=truncate_prompt_tokens
        )
        submission = self.submission(prompt, params, cache_salt=cache_salt)
        submission.pooling = pooling or self._started.pooling
        return submission

    def submission_of_ids(self, token_ids: list[int], params: SamplingParams, *, stream: bool = False) -> Submission:
        """`submission` for a prompt of token ids."""
        return self.submission(Prompt(None, token_ids), params, stream=stream)

    def submit(self, submissions: Sequence[Submission]) -> Batch:
        """Hands requests to the engine; use the batch as a context manager."""
        batch = Batch(self.core, self.core.mailbox())
        try:
            for submission in submissions:
                request_id = self.add(submission, batch.mailbox)
                batch.assemblers[request_id] = RequestAssembler(request_id, submission, self.tokenizer)
                batch.unfinished.add(request_id)
        except BaseException:
            batch.__exit__(None, None, None)
            raise
        return batch

    def add(self, submission: Submission, mailbox: Mailbox) -> int:
        """Hands one request to the engine and returns its id; updates go to `mailbox`.

        Raises:
            InvalidRequestError: the control plane finds something wrong that only it can see.
            EngineError: the engine has ended.
        """
        try:
            return self._add(submission, mailbox)
        except ValueError as error:
            raise (EngineError if self.core.is_shut_down() else InvalidRequestError)(str(error)) from error

    def _add(self, submission: Submission, mailbox: Mailbox) -> int:
        return self.core.add(
            submission.prompt_token_ids,
            submission.params,
            mailbox,
            eos_token_ids=self.eos_token_ids,
            bad_words=self._bad_word_ids(submission.params),
            priority=submission.priority,
            tenant=_digest(submission.tenant),
            namespace=_digest(submission.cache_salt) ^ self._rope_namespace(submission),
            stream=submission.stream,
            shown_special_ids=submission.shown_special_ids,
            grammar=submission.grammar,
            pooling=submission.pooling,
        )

    def _rope_namespace(self, submission: Submission) -> int:
        """Sequences with the long rotary frequencies share no cached prefix with the others."""
        above = self._started.model.decoder.long_rope_above
        longest = len(submission.prompt_token_ids) + (submission.params.max_tokens or 0)
        return 0 if above is None or longest <= above else _LONG_ROPE

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> Prompt:
        """`render_chats` for one conversation; `options` are fields of `ChatOptions`."""
        return self.render_chats([messages], ChatOptions(**options))[0]

    def render_chats(self, conversations: Sequence[list[dict[str, Any]]], options: ChatOptions) -> list[Prompt]:
        """Conversations as prompts, on all cores; special tokens of the template are tokens, those of users are text.

        Raises:
            ParameterError: the model has no template, or the template refuses a conversation or the options.
        """
        tokenizer = self.require_tokenizer()
        template, chat_format = self._template, self.chat_format
        if options.chat_template is not None:
            template = compile_chat_template(options.chat_template, tokenizer)
            chat_format = self._format_of(template)
        if template is None or chat_format is None:
            raise ParameterError(
                "chat_template",
                None,
                "given: this model has no chat template, so it is probably a base model; use generate(), or pass one",
            )
        renderer = ChatRenderer(tokenizer, template, chat_format, options)
        workers = min(self.config.threads, len(conversations))
        if workers < 2:
            return [renderer.render(conversation) for conversation in conversations]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(renderer.render, conversations))

    def _format_of(self, template: ChatTemplate) -> ChatFormat:
        return ChatFormat(template.source, self.config.tool_call_parser, self.config.reasoning_parser)

    def default_sampling_params(self, chat: bool = False) -> SamplingParams:
        """What a request gets that says nothing; in a chat, `max_tokens` is the rest of the context."""
        params = default_sampling_params(self._started.sampling_defaults)
        if chat and "max_new_tokens" not in self._started.sampling_defaults.values:
            params.max_tokens = None
        return params

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or an error that says why there is none."""
        if self.tokenizer is None:
            raise ParameterError("skip_tokenizer_init", True, "False: text needs the tokenizer")
        return self.tokenizer

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._started.vocab_size

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, and so of an embedding."""
        return self._started.model.spec.hidden_size

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return str(self._started.ops.device.type)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights as stored in their file."""
        return self._started.model.stored_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the KV cache that one token takes, over all layers."""
        return self._started.cache.bytes_per_block / self.config.block_size

    # -- life ------------------------------------------------------------------------------------------------------

    def load_weights(self, model: str) -> None:
        """Replaces the weights between two steps and forgets every cached prefix."""
        self.core.pause()
        try:
            self._started.load_weights(model)
            self.core.reset_prefix_cache()
        finally:
            self.core.resume()

    def shutdown(self) -> None:
        """Ends every request with `abort` and stops the loop; also done when the engine is forgotten, and at exit."""
        self._stop()

    # -- checks ----------------------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            vocab = self._started.vocab_size
            outside = first_outside(prompt.token_ids, vocab)
            if outside is not None:
                raise ParameterError(
                    "prompt_token_ids",
                    prompt.token_ids[outside],
                    f"in the vocabulary, from 0 to {vocab - 1}",
                )
            if not prompt.token_ids:
                raise ParameterError("prompts", prompt.text, "non-empty: the chat template wrote nothing")
            return prompt.token_ids
        tokenizer = self.require_tokenizer()
        token_ids: list[int] = tokenizer.encode(prompt.text or "", True, True)
        if not token_ids and tokenizer.bos_token_id is not None:
            token_ids = [tokenizer.bos_token_id]
        if not token_ids:
            raise ParameterError("prompts", "", "non-empty: this model has no beginning-of-sequence token")
        return token_ids

    def _resolve(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        if self.tokenizer is None and params.stop:
            raise ParameterError("stop", params.stop, "empty: the engine runs without a tokenizer; use stop_token_ids")
        room = self.max_model_len - prompt_length
        if room < 1:
            raise ContextLengthError(prompt_length, self.max_model_len)
        resolved = params.clone()
        resolved.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        resolved.min_tokens = min(params.min_tokens, resolved.max_tokens)
        if resolved.seed is None:
            resolved.seed = self._seeds.getrandbits(63)
        if self.tokenizer is None:
            resolved.detokenize = False
        return resolved

    def _grammar(self, params: SamplingParams, answer: AnswerFormat | None) -> GrammarSource | None:
        """The grammar of a request that must have one; it has been compiled when this returns."""
        given = params.structured_outputs
        forced = answer is not None and answer.tools.must_call
        if given is None and not forced:
            return None
        params.check_ends_with_grammar()
        tokenizer = self.require_tokenizer()
        options = None if given is None else given.options
        source = (
            GrammarSource.make(tokenizer, options=options) if answer is None else answer.grammar(tokenizer, options)
        )
        assert source is not None, "without calls there is always one"
        try:
            self.core.check_grammar(source)
        except ValueError as error:
            param = "tools" if given is None or forced else given.param
            raise ParameterError(param, options, f"such that it can be used ({error})") from error
        return source

    def _bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word as it stands at the beginning of a text and after a space."""
        if not params.bad_words:
            return []
        tokenizer = self.require_tokenizer()
        found = []
        for word in params.bad_words:
            for form in (word, " " + word.lstrip()):
                ids = tokenizer.encode(form, False, False)
                if ids and ids not in found:
                    found.append(ids)
        return found


def _run(started: Started) -> None:
    """The engine's thread. Whatever ends the loop, every request is told."""
    try:
        started.run_loop()
    except BaseException as error:
        traceback.print_exc()
        started.core.fail(f"the engine stopped: {type(error).__name__}: {error}")


def _stop(core: EngineCore, thread: threading.Thread) -> None:
    core.shut_down()
    # A garbage collection may run this on the engine's own thread.
    if thread is not threading.current_thread():
        thread.join(timeout=60)


# Secret and new in every process, so that nobody can choose two salts with one digest.
_DIGEST_KEY = secrets.token_bytes(32)
# Any number: it makes another namespace of each.
_LONG_ROPE = 0x9E37_79B9_7F4A_7C15


def _digest(text: str | None) -> int:
    """A 64-bit name of a salt or tenant; 0 when there is none."""
    if text is None:
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=_DIGEST_KEY).digest(), "little")
