"""From a model's files to a decoder: reads the configuration, picks the family, checks and converts the weights.

Tensors are converted one by one from a memory map whose pages are dropped at once, so that loading needs the converted
model and one tensor, never two models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.models.catalog import ModelSource
from octavo.models.decoder import Decoder
from octavo.models.families import family_of_config, family_of_gguf
from octavo.models.families.base import GGUF_NAMES
from octavo.models.fields import Config, token_ids
from octavo.models.gguf_config import ROPE_TENSORS, config_from_gguf
from octavo.models.spec import ModelSpec
from octavo.models.weights.base import NamedWeights, PermutedTensor, WeightError
from octavo.models.weights.dummy import DummyWeights
from octavo.models.weights.gguf import GgufFile
from octavo.models.weights.safetensors import SafetensorsFolder
from octavo.ops.base import OpSet, StoredTensor

_IGNORED = ("rotary_emb.inv_freq", *ROPE_TENSORS)
"""Tensors that hold what the configuration says already."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder ready to run, and what the report of its speed needs."""

    spec: ModelSpec
    decoder: Decoder
    stored_bytes: int
    """Bytes of the used weights as stored in the file; a tied head is counted once."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose configuration was read and whose weights are still on disk."""

    source: ModelSource
    spec: ModelSpec
    weights: NamedWeights | DummyWeights
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors that are no part of the decoder."""

    def load(self, ops: OpSet, max_positions: int | None = None) -> LoadedModel:
        """Convert the weights for `ops`.

        Args:
            ops: the op set that will run the model.
            max_positions: the longest sequence that will be used; None: the model's.

        Raises:
            WeightError: a tensor is missing, has another shape, or is one that the model would not use.
        """
        decoder = Decoder(self.spec, ops, self.weights, max_positions)
        unused = [name for name in self.weights.unused(_IGNORED) if not name.startswith(self.ignored)]
        if self.spec.tied_embeddings:
            unused = [name for name in unused if name != self.weights.file_name("head.weight")]
        if unused:
            raise WeightError(
                f"{self.source.path}: {len(unused)} tensors have no place in the model, e.g. {unused[0]}: "
                f"the configuration does not describe this checkpoint"
            )
        return LoadedModel(self.spec, decoder, self.weights.used_bytes())


def open_model(source: ModelSource, *, dummy: bool = False) -> OpenedModel:
    """Read the configuration of a model and find its tensors.

    Args:
        source: the model.
        dummy: take random weights; of a folder, only the configuration is read.

    Raises:
        ModelError: an architecture or a field of the configuration is not supported, or lacks.
        WeightError: a file is missing or damaged.
    """
    if source.path.suffix != ".gguf":
        return _open_folder(source, dummy)
    opened = _open_gguf(source)
    return replace(opened, weights=DummyWeights(source.path)) if dummy else opened


def load_model(source: ModelSource, ops: OpSet, max_positions: int | None = None) -> LoadedModel:
    """`open_model(source).load(ops, max_positions)`."""
    return open_model(source).load(ops, max_positions)


def _open_folder(source: ModelSource, dummy: bool) -> OpenedModel:
    config = _read_json(source.path / "config.json")
    with _blaming(source.path):
        family = family_of_config(config)
    quantization = config.get("quantization_config")
    if quantization and not dummy:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(f"{source.path}: quantization_config.quant_method={method!r} is not supported")
    # Multimodal checkpoints keep the decoder's fields in an object of their own.
    inner = config.get("text_config")
    spec = _spec(
        source, family.from_config, {**family.defaults, **config, **(inner if isinstance(inner, dict) else {})}
    )
    generation = source.path / "generation_config.json"
    if generation.is_file():
        with _blaming(generation):
            ids = token_ids(_read_json(generation).get("eos_token_id"))
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + ids)))
    if dummy:
        return OpenedModel(source, spec, DummyWeights(source.path))
    weights = NamedWeights(SafetensorsFolder(source.path), family.names, prefixes=family.prefixes)
    return OpenedModel(source, _with_tying(spec, weights), weights, family.ignored)


def _open_gguf(source: ModelSource) -> OpenedModel:
    file = GgufFile(source.path)
    with _blaming(source.path):
        family = family_of_gguf(file.metadata)
        layout = family.gguf
        assert layout is not None, "families without a layout are not found by a GGUF file"
        config = {**family.defaults, **layout.defaults, **config_from_gguf(file.metadata, file.tensors)}
    spec = _spec(source, lambda fields: family.from_config({**fields, **layout.derive(fields)}), config)
    # Files of families that add 1 to norm weights hold the sum.
    spec = replace(spec, norm_offset=0.0)
    adapt = _undo_pair_order(spec) if layout.pair_order else None
    weights = NamedWeights(file, {**GGUF_NAMES, **layout.names}, adapt)
    return OpenedModel(source, _with_tying(spec, weights), weights)


def _undo_pair_order(spec: ModelSpec) -> Callable[[str, StoredTensor], StoredTensor]:
    """Query and key rows that are stored pair by pair, `(0, d/2, 1, d/2 + 1, …)`, back to halves."""

    def adapt(name: str, tensor: StoredTensor) -> StoredTensor:
        if not name.endswith((".attn_q.weight", ".attn_k.weight", ".attn_q.bias", ".attn_k.bias")):
            return tensor
        head_dim = spec.layers[0].attention.head_dim
        order = np.arange(tensor.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return PermutedTensor(tensor, order)

    return adapt


def _spec(source: ModelSource, make: Callable[[Config], ModelSpec], config: Config) -> ModelSpec:
    with _blaming(source.path):
        spec = make(config)
    if spec.max_positions < 2:
        raise ModelError(f"{source.path}: a context of {spec.max_positions} tokens leaves no room for an output")
    for layer in set(spec.layers):
        if layer.attention.num_heads % layer.attention.num_kv_heads:
            heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
            raise ModelError(f"{source.path}: {heads} heads cannot share {kv_heads} key and value heads")
    return spec


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Errors name the file; what the reader of a field did not foresee is the file's fault as well."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelError(f"{path}: a field of the configuration has a wrong kind of value: {error}") from error


def _with_tying(spec: ModelSpec, weights: NamedWeights) -> ModelSpec:
    """The head is the embedding if the file has no head of its own, whatever the configuration says."""
    if not weights.has("head.weight"):
        return replace(spec, tied_embeddings=True)
    if not spec.tied_embeddings:
        return spec
    return replace(spec, tied_embeddings=weights.equal("head.weight", "embedding.weight"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
