"""Configurations as they lie on the hub, of any age: the same rotations, windows and constants as transformers reads from them."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from transformers import AutoConfig

from octavo.models.catalog import ModelSource
from octavo.models.families import FAMILIES, family_of_config
from octavo.models.loader import open_model

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
}
LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
LONG = {"type": "longrope", "short_factor": [1.0 + i for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
HUB = {
    "llama31": ("LlamaForCausalLM", "llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA31}),
    "dynamic": ("LlamaForCausalLM", "llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "linear": ("LlamaForCausalLM", "llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": None}),
    "qwen25_yarn": (
        "Qwen2ForCausalLM",
        "qwen2",
        {
            "rope_theta": 1e6,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 1024, "type": "yarn"},
            "sliding_window": 32,
            "use_sliding_window": False,
            "max_window_layers": 2,
        },
    ),
    "qwen2_windows": (
        "Qwen2ForCausalLM",
        "qwen2",
        {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "phi4_mini": (
        "Phi3ForCausalLM",
        "phi3",
        {
            "rope_scaling": LONG,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 1024,
            "sliding_window": 2047,
        },
    ),
    "gemma3_4b": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 32,
            "sliding_window_pattern": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000,
        },
    ),
    "gemma3_no_window": ("Gemma3ForCausalLM", "gemma3_text", {"sliding_window": None}),
    "glm4": ("Glm4ForCausalLM", "glm4", {"head_dim": 16}),
}


def write(folder, architecture, model_type, fields):
    config = {**SMALL, "architectures": [architecture], "model_type": model_type, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


def rotation_of(config, layer_type=None, length=None):
    """Frequencies and magnitude as the rotary module of the architecture makes them."""
    module = importlib.import_module(f"transformers.models.{config.model_type.removesuffix('_text')}")
    module = importlib.import_module(f"{module.__name__}.modeling_{module.__name__.rsplit('.', 1)[1]}")
    rotary = next(getattr(module, name) for name in dir(module) if name.endswith("RotaryEmbedding"))(config)
    prefix = "" if layer_type is None else f"{layer_type}_"
    if length is not None:
        rotary(torch.zeros(1, length, 8), torch.arange(length)[None])
    return getattr(rotary, f"{prefix}inv_freq").tolist(), float(getattr(rotary, f"{prefix}attention_scaling"))


@pytest.fixture(params=HUB)
def read(request, tmp_path, monkeypatch):
    """The spec, and transformers' configuration; no weights are there."""
    theirs = write(tmp_path, *HUB[request.param])
    monkeypatch.setattr("octavo.models.loader.SafetensorsFolder", _NoTensors)
    return open_model(ModelSource("test", tmp_path)).spec, theirs


class _NoTensors:
    tensors: dict = {}  # noqa: RUF012

    def __init__(self, path):
        self.path = path


def test_rotations_and_windows_of_files_of_any_age_are_those_transformers_reads(read):
    spec, theirs = read
    for index, layer in enumerate(spec.layers):
        types = getattr(theirs, "layer_types", None)
        nested = isinstance(theirs.rope_parameters.get("full_attention"), dict)
        freqs, magnitude = rotation_of(theirs, types[index] if nested else None)
        assert layer.attention.rope.inv_freq == pytest.approx(freqs)
        assert layer.attention.rope.magnitude == pytest.approx(magnitude)
        windowed = types is None or types[index] == "sliding_attention"
        assert layer.attention.window == (getattr(theirs, "sliding_window", None) if windowed else None)


def test_long_frequencies_are_those_of_a_sequence_beyond_the_original_length(tmp_path, monkeypatch):
    theirs = write(tmp_path, *HUB["phi4_mini"])
    monkeypatch.setattr("octavo.models.loader.SafetensorsFolder", _NoTensors)
    rope = open_model(ModelSource("test", tmp_path)).spec.layers[0].attention.rope
    freqs, magnitude = rotation_of(theirs, length=1025)
    assert rope.long_inv_freq == pytest.approx(freqs)
    assert rope.magnitude == pytest.approx(magnitude)
    assert rope.long_above == 1024


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_constants_that_a_file_leaves_out_are_transformers(name, tmp_path):
    family = next(family for family in FAMILIES if family.name == name)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in name else {}
    experts |= {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "mixtral" else {}
    model_type = "gemma3_text" if name == "gemma3" else name
    theirs = write(tmp_path, family.architectures[-1 if name == "glm4" else 0], model_type, experts)
    ours = json.loads((tmp_path / "config.json").read_text())
    activation = {"hidden_act": "silu"} if not name.startswith("gemma") else {}
    spec = family_of_config(ours).from_config({**family.defaults, **activation, **ours})
    assert spec.norm_eps == theirs.rms_norm_eps
    parameters = theirs.rope_parameters.get("full_attention") or theirs.rope_parameters
    rotates = next(layer.attention.rope for layer in reversed(spec.layers) if layer.attention.rope.inv_freq[0])
    dim = 2 * len(rotates.inv_freq)
    assert rotates.inv_freq[1] == pytest.approx(parameters["rope_theta"] ** (-2 / dim))
