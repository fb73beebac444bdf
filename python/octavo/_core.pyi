"""The Rust core: control plane, text, cost model."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from octavo.outputs import FinishReason

__version__: str

class _Plan(TypedDict):
    header: dict[str, int]
    slot_init: dict[str, int]
    row_flags: dict[str, int]

FIELDS_WITHOUT_MEANING: frozenset[str]
"""Fields of request bodies that clients send to a service; they mean nothing to an engine of one's own."""

PLAN: _Plan

class EngineCore:
    """The control plane. Methods that wait or work let go of the GIL."""

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_in_flight: int,
        vocab_size: int,
        enable_prefix_caching: bool,
        host_state: bool,
        group_windows: Sequence[int | None],
        bytes_per_block: int,
        max_logprobs: int,
        tokenizer: Tokenizer | None = None,
        max_draft_tokens: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> None: ...
    @staticmethod
    def blocks_per_request(
        num_tokens: int,
        block_size: int,
        group_windows: Sequence[int | None],
        max_num_batched_tokens: int,
        max_in_flight: int,
    ) -> int: ...
    def plan_offsets(self) -> dict[str, int]: ...
    def mailbox(self) -> Mailbox: ...
    def add(
        self,
        prompt: Sequence[int],
        params: Any,
        mailbox: Mailbox,
        *,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        priority: int = 0,
        tenant: int = 0,
        namespace: int = 0,
        stream: bool = False,
        shown_special_ids: Sequence[int] = (),
        grammar: GrammarSource | None = None,
        pooling: str | None = None,
    ) -> int: ...
    def check_grammar(self, grammar: GrammarSource) -> None:
        """Compiles a grammar and keeps it for the requests that will have it; `ValueError` if it cannot be used."""

    def abort(self, request_id: int) -> None: ...
    def wait(self) -> None: ...
    def schedule(self, buffer: npt.NDArray[np.int32]) -> bool: ...
    def masks(self, step_id: int, num_rows: int) -> npt.NDArray[np.int32]:
        """The masks of a step in flight, `[num_rows, ceil(V / 32)]`; waits for those that are being made."""

    def commit(
        self,
        step_id: int,
        tokens: npt.NDArray[np.int32],
        num_sampled: npt.NDArray[np.int32],
        next_drafts: npt.NDArray[np.int32] | None = None,
        logprob_ids: npt.NDArray[np.int32] | None = None,
        logprobs: npt.NDArray[np.float32] | None = None,
        logprob_ranks: npt.NDArray[np.int32] | None = None,
        prompt_logprobs: Sequence[tuple[int, int, Any, Any, Any]] | None = None,
        pooled: Sequence[tuple[int, npt.NDArray[np.float32]]] | None = None,
    ) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def check_integrity(self) -> None: ...
    def shut_down(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def is_shut_down(self) -> bool: ...

class EngineLink:
    """A connection to the front that started this process; the process ends when the front does."""

    def __init__(self, folder: str | PathLike[str]) -> None: ...
    def serve(self, core: EngineCore, info: str) -> None:
        """Takes requests for `core` from now on; `info` is what the front must know of the model, as JSON."""
    def fail(self, reason: str) -> None:
        """Tells the front why the process is about to end."""

def all_ints(values: list[Any]) -> bool:
    """Whether a list holds nothing but `int`s: no `bool`s, no numbers of other kinds."""

def first_outside(token_ids: list[int], vocab_size: int) -> int | None:
    """Index of the first entry that is not a token id below `vocab_size`."""

def serve(config: str) -> int:
    """Runs the front until a signal ends it and returns the exit code; `config` is JSON. Takes over
    SIGTERM, SIGINT and SIGHUP.

    Raises:
        ValueError: the config is wrong.
        OSError: the address cannot be had, or the engine process cannot be made.
        RuntimeError: the engine ended while it started, or cannot be kept alive.
    """

class Mailbox:
    """Where one caller waits for news of its requests."""

    def receive(self, timeout: float) -> list[Update]: ...

_Position = tuple[list[int], list[float], int]

class Update:
    """What one request gained since the last update."""

    request_id: int
    num_cached_tokens: int
    finished: bool
    error: str | None
    prompt_logprobs: list[_Position | None] | None
    pooled: list[float] | None
    choices: list[ChoiceUpdate]

class ChoiceUpdate:
    """What one choice gained since the last update."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[_Position]
    text_offsets: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None

class TemplateError(ValueError):
    """A chat template cannot be compiled, or refuses a conversation."""

class Tokenizer:
    """Text to token ids and back; immutable and shared between threads."""

    @staticmethod
    def from_file(path: str | PathLike[str]) -> Tokenizer: ...
    @staticmethod
    def from_dir(path: str | PathLike[str]) -> Tokenizer: ...
    @staticmethod
    def from_gguf(gguf: Gguf) -> Tokenizer: ...
    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]: ...
    def encode_batch(
        self, texts: Sequence[str], add_special: bool = False, parse_special: bool = False
    ) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...
    def token_str(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def is_special(self, id: int) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def eog_token_ids(self) -> list[int]: ...
    @property
    def chat_template(self) -> str | None: ...

class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None: ...
    @property
    def source(self) -> str: ...
    def render(
        self,
        tokenizer: Tokenizer,
        messages: str,
        tools: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: str,
    ) -> tuple[str, list[int]]: ...

class ToolSchemas:
    """The types of the parameters of tools, from the JSON of a list of tools."""

    def __init__(self, tools: str) -> None: ...

OutputEvent: TypeAlias = (
    tuple[Literal["content", "reasoning"], str]
    | tuple[Literal["tool_call_start", "tool_call_arguments"], int, str]
    | tuple[Literal["tool_call_end"], int, bool]
)

class FieldError(ValueError):
    """A field cannot be used; the arguments are its name and what it must be."""

def structured_outputs(json: str) -> tuple[str, str]:
    """Checks the fields of `structured_outputs`, given as JSON; returns the one that is given, and the same in its normal form.

    Raises:
        FieldError: a field is wrong.
    """

def structured_outputs_of_body(json: str) -> tuple[str, str] | None:
    """What a body's `response_format`, `structured_outputs` and `guided_*` ask for, as the function above returns it."""

def choose_tools(tools: str, choice: str | None = None) -> tuple[str, bool, str | None]:
    """Resolves `tools` and `tool_choice`, given as JSON: the tools that the model is told of, whether it must call, and which one.

    Raises:
        FieldError: a field is wrong.
    """

class GrammarSource:
    """The grammar of a request's outputs."""

    @staticmethod
    def make(
        tokenizer: Tokenizer,
        *,
        options: str | None = None,
        tools: str | None = None,
        name: str | None = None,
        several: bool = True,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        reasoning_open: bool = False,
    ) -> GrammarSource | None:
        """`options` is the normal form of `structured_outputs` and `tools` those that may be called, as JSON. None if calls of this
        format cannot be forced."""

class OutputParser:
    """Reasoning and tool calls in the growing text of one choice.

    Events are `("content", text)`, `("reasoning", text)`, `("tool_call_start", index, name)`,
    `("tool_call_arguments", index, delta)` and `("tool_call_end", index, valid)`. Raises `ValueError` for unknown names.
    """

    def __init__(
        self,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        reasoning_open: bool = False,
        schemas: ToolSchemas | None = None,
    ) -> None: ...
    @staticmethod
    def tool_parsers() -> list[str]: ...
    @staticmethod
    def reasoning_parsers() -> list[str]: ...
    @staticmethod
    def detect(chat_template: str) -> tuple[str | None, str | None]:
        """The tool parser and the reasoning parser that a chat template calls for."""

    @staticmethod
    def prompt_opens_reasoning(prompt: str) -> bool:
        """Whether a rendered prompt ends inside the reasoning: what to pass as `reasoning_open`."""

    @property
    def markers(self) -> list[str]: ...
    def special_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Special tokens that must stay in the text: what to pass as `shown_special_ids`."""

    def push(self, delta: str) -> list[OutputEvent]: ...
    def finish(self) -> list[OutputEvent]: ...

class Gguf:
    """Metadata and tensor infos of a GGUF file."""

    def __init__(self, path: str | PathLike[str]) -> None: ...
    def metadata(self) -> dict[str, Any]: ...
    def tensors(self) -> list[tuple[str, list[int], str, int, int]]: ...

class PackedMatrix:
    """A quantized matrix `[out, in]` with the file's codes and scales, 16 output rows interleaved.

    Args:
        parts: of each part the storage, `Q4_0`, `Q4_1` or `Q8_0`, and its rows as stored; stacked along `out`.
        packed: called with a part's index and how many of its rows will not be read again, every few megabytes.

    Raises:
        ValueError: another storage, rows that are not whole blocks, or of different lengths; names the part.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, npt.NDArray[np.uint8]]],
        packed: Callable[[int, int], None] | None = None,
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def num_bytes(self) -> int: ...
    def linear(self, x: npt.NDArray[np.float32], out: npt.NDArray[np.float32], threads: int) -> None:
        """Write `x @ self.T` to `out`, `[M, in]` and `[M, out]`; `x` is rounded to 8 bits in groups of 32.

        A row of the result depends bitwise neither on the other rows nor on `threads`. Works without the GIL.

        Raises:
            ValueError: a shape or layout does not fit; names the argument.
        """
    def read_rows(self, ids: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Dequantize the rows `ids` to `out`, `[len(ids), in]`.

        Raises:
            ValueError: a shape or layout does not fit, or an id is not a row; names the argument.
        """

_Float32 = npt.NDArray[np.float32]

def rms_norm(x: _Float32, weight: _Float32, eps: float, out: _Float32) -> None:
    """Write `x / sqrt(mean(x²) + eps) * weight` to `out`; `[M, D]`, contiguous.

    Raises:
        ValueError: a shape or layout does not fit; names the argument.
    """

def add_rms_norm(residual: _Float32, x: _Float32, scale: float, weight: _Float32, eps: float, out: _Float32) -> None:
    """Add `scale * x` to `residual` in place and write the norm of the sum to `out`; all `[M, D]`, contiguous.

    Raises:
        ValueError: a shape or layout does not fit; names the argument.
    """
