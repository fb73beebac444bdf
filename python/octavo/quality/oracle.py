"""transformers' side: a tokenizer and a model made of the same files, in fp32 on the CPU.

transformers is an optional dependency; whatever it cannot make is `NoOracle` with the reason, never a wrong oracle.
"""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from octavo._core import Gguf
from octavo.errors import OctavoError
from octavo.quality.traces import Floats, Ids, Trace

_TILE_ROWS: Final = 64


class NoOracle(OctavoError):  # noqa: N818  not an error of the user's or the model's
    """transformers cannot say what would be right; the message says why."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What transformers says at the positions of a trace."""

    own: Floats
    """`[T]` log-probabilities of the tokens themselves."""
    logprobs: Floats
    """`[T, K]` of the trace's `ids`."""
    best: Ids
    """`[T]` its own likeliest token."""


def transformers_version(*, gguf: bool) -> str:
    """The version that is installed.

    Raises:
        NoOracle: it is not, or (for a GGUF file) the package that reads those is not.
    """
    try:
        if gguf:
            import_module("gguf")
        return str(import_module("transformers").__version__)
    except ImportError as error:
        raise NoOracle(
            f"{error.name} is not installed; octavo verify needs it: pip install 'octavo[verify]'"
        ) from error


# -- tokenizer -----------------------------------------------------------------------------------------------------

# Of the splitting rules that `tokenizer.ggml.pre` names, those that are GPT-2's, and those that cut digits apart before.
_GPT2_RULES: Final = frozenset(
    {"gpt-2", "phi-2", "roberta-bpe", "mpt", "olmo", "jais", "jina-es", "jina-de", "jina-v2-es"}
)
_DIGIT_RULES: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
# Their tokenizer.json says that a piece that is a token is not merged; a GGUF file cannot say so.
_WHOLE_TOKENS_FIRST: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})


class TokenizerOracle:
    """The Hugging Face tokenizer of a folder or a `.gguf` file.

    Raises:
        NoOracle: transformers makes none, or one that is known to split texts by other rules than the file's.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415

        self.adds_special = True
        """Whether the files say what is added around a text; else only the text itself is compared."""
        folder, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        with _quiet(), _reading(f"make a tokenizer of {path.name}"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), **extra)
        self.name = type(self._tokenizer).__name__
        if path.suffix == ".gguf":
            metadata = Gguf(path).metadata()
            self.adds_special = "tokenizer.ggml.add_bos_token" in metadata
            if metadata.get("tokenizer.ggml.model") == "gpt2":
                self._set_rules(str(metadata.get("tokenizer.ggml.pre", "default")))

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are recognised."""
        return list(self._tokenizer(text, add_special_tokens=self.adds_special)["input_ids"])

    def special_text(self) -> str:
        """A text with the tokenizer's own special tokens between words."""
        tokens = list(dict.fromkeys(map(str, self._tokenizer.all_special_tokens)))[:12]
        return "".join(f"{token}word {token}\n" for token in tokens)

    def _set_rules(self, rules: str) -> None:
        """Where transformers falls back on GPT-2's rules, gives the file's to its tokenizer."""
        from tokenizers import pre_tokenizers  # noqa: PLC0415

        backend = self._tokenizer.backend_tokenizer
        if rules in _DIGIT_RULES:
            words = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        elif rules not in _GPT2_RULES and rules not in _known_rules():
            raise NoOracle(f"transformers does not know the splitting rules tokenizer.ggml.pre={rules!r}")
        if rules in _WHOLE_TOKENS_FIRST:
            backend.model.ignore_merges = True


def _known_rules() -> frozenset[str]:
    """The names of rules that this version of transformers follows."""
    try:
        mapping = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    except ImportError:
        return frozenset()
    return frozenset(getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()))


# -- model ---------------------------------------------------------------------------------------------------------


def check_loadable(path: Path) -> None:
    """Finds out cheaply that transformers cannot load a model, or would leave out a part of it.

    Raises:
        NoOracle: so it is. Nothing raised is no promise.
    """
    if path.suffix != ".gguf":
        from transformers import AutoConfig  # noqa: PLC0415

        with _quiet(), _reading(f"read the configuration of {path.name}"):
            AutoConfig.from_pretrained(str(path))
        return
    file = Gguf(path)
    metadata = file.metadata()
    architecture = metadata.get("general.architecture")
    legacy = import_module("transformers.modeling_gguf_pytorch_utils")
    if architecture not in legacy.GGUF_SUPPORTED_ARCHITECTURES:
        raise NoOracle(
            f"transformers does not load GGUF files of architecture {architecture!r}; verify the safetensors"
        )
    if int(metadata.get("split.count", 1)) > 1:
        raise NoOracle(
            "transformers does not load GGUF files that are split; join the parts, or verify the safetensors"
        )
    # transformers drops these, so its rotary frequencies would be others than the model's.
    dropped = [name for name, *_ in file.tensors() if name.startswith("rope_")]
    dropped += [key for key in metadata if key.startswith(f"{architecture}.rope.scaling.")]
    if dropped:
        raise NoOracle(f"transformers ignores {dropped[0]} of GGUF files; verify the safetensors")


class ModelOracle:
    """transformers' model with the same weights, dequantized to fp32.

    Raises:
        NoOracle: transformers cannot load it.
    """

    def __init__(self, path: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        name, extra = path.name, {}
        if path.suffix == ".gguf":
            path, extra = path.parent, {"gguf_file": name, **_dequantized()}
        torch.set_num_threads(threads)
        with _quiet(), _reading(f"load {name}"):
            self._model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, **extra).eval()
        self.name = type(self._model).__name__

    def truths(self, traces: Sequence[Trace], advance: Callable[[int], None]) -> list[Truth]:
        """Scores each trace teacher forced, one whole sequence at a time; sequences that several traces share are run once."""
        found: list[Truth | None] = [None] * len(traces)
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index, trace in enumerate(traces):
            sharing.setdefault(trace.tokens, []).append(index)
        for tokens, indices in sharing.items():
            with torch.inference_mode():
                logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
                for index in indices:
                    found[index] = _truth(logits, traces[index])
            del logits
            advance(len(tokens))
        return [truth for truth in found if truth is not None]

    def release(self) -> None:
        """Gives the weights' memory back."""
        del self._model
        gc.collect()


def _truth(logits: torch.Tensor, trace: Trace) -> Truth:
    """`logits` float32 `[len(tokens), V]`; the row before a token scores it."""
    targets = torch.tensor(trace.tokens[trace.first :])
    ids = torch.from_numpy(trace.ids)
    own, at, best = [], [], []
    for start in range(0, len(targets), _TILE_ROWS):
        stop = min(start + _TILE_ROWS, len(targets))
        rows = logits[trace.first - 1 + start : trace.first - 1 + stop].float().log_softmax(-1)
        own.append(rows.gather(1, targets[start:stop, None])[:, 0])
        at.append(rows.gather(1, ids[start:stop]))
        best.append(rows.argmax(-1))
    return Truth(
        torch.cat(own).double().numpy(), torch.cat(at).double().numpy(), torch.cat(best).numpy().astype(np.int64)
    )


def _dequantized() -> dict[str, Any]:
    """Asks those versions of transformers that can compute with packed weights to unpack them."""
    config = getattr(import_module("transformers"), "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


# -- transformers as a guest ---------------------------------------------------------------------------------------


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Whatever transformers raises means that it is no oracle here; while it reads GGUF files, they are read fast."""
    with _fast_gguf_reader():
        try:
            yield
        except NoOracle:
            raise
        except Exception as error:  # third-party code: any type
            first = str(error).strip().split("\n")[0][:200]
            raise NoOracle(f"transformers cannot {what}: {type(error).__name__}: {first}") from error


@contextmanager
def _fast_gguf_reader() -> Iterator[None]:
    """The `gguf` package slices a `memmap` object for every string; slices of a plain view are ten times as fast."""
    try:
        reader: Any = import_module("gguf").GGUFReader
        original = reader._build_fields
    except (ImportError, AttributeError):
        yield
        return

    def build_fields(self: Any, *args: Any) -> Any:
        self.data = self.data.view(np.ndarray)
        return original(self, *args)

    reader._build_fields = build_fields
    try:
        yield
    finally:
        reader._build_fields = original


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings or bars of transformers between ours."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Its GGUF loader has a bar that it cannot be asked to leave out.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
