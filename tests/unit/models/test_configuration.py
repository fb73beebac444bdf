"""What a configuration may say, and which field an error names."""

from __future__ import annotations

import json
import sys

import pytest

from octavo.models.catalog import ModelNotFoundError, ModelSource, resolve_model
from octavo.models.loader import open_model


@pytest.fixture
def edit(make_llama):
    def change(remove: str | None = None, **fields):
        folder, _ = make_llama()
        config = json.loads((folder / "config.json").read_text()) | fields
        config.pop(remove, None)
        (folder / "config.json").write_text(json.dumps(config))
        return ModelSource("test", folder)

    return change


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, r"architectures=\['NoSuchForCausalLM'\] is not supported"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope_type 'magic' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear': .* lacks 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor=-2.0 must be a finite number above 0"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta=nan must be a finite number above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor=0 must be a finite number above 0"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters has an object 'full_attention'",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn.* contradicts rope_parameters"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method='gptq'"),
        ({"remove": "num_attention_heads"}, "lacks 'num_attention_heads'"),
    ],
)
def test_what_is_not_supported_is_named(edit, fields, message):
    source = edit(**fields)
    with pytest.raises(ValueError, match=message) as caught:
        open_model(source)
    assert str(source.path) in str(caught.value)


def test_end_tokens_of_both_configuration_files_count(edit):
    source = edit(eos_token_id=7)
    (source.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_model(source).spec.eos_token_ids == (7, 9)


def test_the_built_in_model_is_described_by_its_file(smollm2):
    spec = open_model(smollm2).spec
    attention = spec.layers[0].attention
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_positions) == (30, 576, 49152, 8192)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert spec.layers[0].mlp.intermediate_size == 1536
    assert spec.tied_embeddings
    assert attention.rope.inv_freq[1] == pytest.approx(100_000 ** (-2 / 64))


def test_folders_and_gguf_files_are_found_by_path(make_llama, smollm2):
    folder, _ = make_llama()
    assert resolve_model(str(folder)).path == folder
    assert resolve_model(str(smollm2.path)).path == smollm2.path


@pytest.mark.parametrize("name", ["no-such-model", "./nothing", "/nowhere/at/all", "missing.gguf", "a/b/c", ""])
def test_a_name_that_is_nothing_lists_the_built_in_models(name):
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        resolve_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"must be a \.gguf file"):
        resolve_model(str(file))


def test_the_decoder_runs_without_torch():
    """In a fresh interpreter whose import of torch fails."""
    import subprocess

    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import octavo.models.decoder, octavo.models.loader, octavo.models.catalog
from octavo.models.decoder import Decoder
from octavo.models.spec import *
class Anything:
    shape = (1,)
    def __getitem__(self, index):
        return self
    def __getattr__(self, name):
        return lambda *args, **kwargs: (self, self) if name in ("add_rms_norm", "embedding_weight") else self
calls = Anything()
rope = RopeSpec((1.0, 0.1))
layer = LayerSpec(AttentionSpec(2, 1, 4, rope, 0.5), MlpSpec(16))
decoder = Decoder(ModelSpec("llama", 32, 8, (layer, layer), 64, 1e-6, True), calls, calls)
batch = Anything()
assert decoder.forward(batch, decoder.allocate_kv_cache(4, 16)) is calls
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
