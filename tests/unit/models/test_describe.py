"""What a model is and needs, against counts made another way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.models import describe
from octavo.models.catalog import ModelSource
from octavo.models.describe import Machine, describe_model, longest_request, window_pattern
from octavo.models.loader import open_model
from octavo.models.weights.base import MappedTensor
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps


def machine(ops, free=1 << 30, budget=lambda weights: 1 << 20):
    return Machine("test", 2 << 30, free, "bfloat16", ops, budget)


def described(folder, *machines):
    return describe_model(open_model(ModelSource("test", folder)), machines)


def with_windows(spec, windows):
    layer = spec.layers[0]
    return replace(
        spec, layers=tuple(replace(layer, attention=replace(layer.attention, window=window)) for window in windows)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_transformers_counts(make_llama, tied):
    folder, oracle = make_llama(tie_word_embeddings=tied, attention_bias=True)
    found = described(folder)
    parameters = sum(p.numel() for p in oracle.parameters())  # shared ones once
    assert found.parameters == found.active_parameters == parameters
    assert found.stored_bytes == 4 * parameters
    assert [(share.storage, share.bytes) for share in found.storage] == [("F32", 4 * parameters)]
    assert found.tied_embeddings == tied


def test_the_architecture_is_told(make_llama):
    found = described(make_llama()[0])
    assert (found.family, found.num_layers, found.hidden_size, found.intermediate_size) == ("llama", 3, 64, 96)
    assert (found.context_length, found.vocab_size, found.num_experts) == (512, 384, 0)
    (shape,) = found.attention
    assert (shape.layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.window) == (3, 4, 2, 16, None)


def test_of_a_mixture_only_the_chosen_experts_are_active(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    oracle = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=5, num_experts_per_tok=2))
    oracle.save_pretrained(tmp_path)
    count = {name: parameter.numel() for name, parameter in oracle.named_parameters()}
    experts = sum(size for name, size in count.items() if ".experts." in name)
    found = described(tmp_path, machine(ReferenceOps()))
    assert experts == 2 * 5 * 3 * 32 * 48
    assert found.parameters == sum(count.values())
    assert found.active_parameters == found.parameters - experts + experts // 5 * 2
    assert (found.num_experts, found.num_experts_per_token, found.intermediate_size) == (5, 2, 48)
    assert found.fits[0].weight_bytes == 4 * found.parameters


@pytest.mark.parametrize("ops", [ReferenceOps(), CpuOps(torch.float32)])
@pytest.mark.parametrize("tied", [True, False])
def test_dense_weights_take_four_bytes_each_and_a_tied_head_none(make_llama, ops, tied):
    found = described(make_llama(tie_word_embeddings=tied)[0], machine(ops))
    assert found.fits[0].weight_bytes == 4 * found.parameters


def test_packed_weights_take_what_the_loaded_model_holds(smollm2):
    ops = CpuOps()
    ops._dense_too = False  # as on a processor without tiles
    found = describe_model(open_model(smollm2), [machine(ops)])
    decoder = open_model(smollm2).load(ops, 64).decoder
    held = decoder._embedding.packed.num_bytes
    for layer in decoder._layers:
        weights = (layer.attention._qkv, layer.attention._output, layer.mlp._gate_up, layer.mlp._down)
        held += sum(weight.packed.num_bytes for weight in weights)
        held += layer.attention_norm.nbytes + layer.mlp_norm.nbytes
    held += decoder._norm.nbytes
    assert found.fits[0].weight_bytes == held
    assert {share.storage: share.tensors for share in found.storage} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert found.parameters == 134_515_008  # as its model card and transformers count


def test_only_headers_are_read(make_llama, monkeypatch):
    def refuse(self, *_):
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(MappedTensor, "rows", refuse)
    assert described(make_llama()[0], machine(CpuOps())).fits[0].weights_fit


def test_a_checkpoint_that_lacks_a_tensor_cannot_be_described(make_llama):
    folder, _ = make_llama()
    opened = open_model(ModelSource("test", folder))
    with pytest.raises(ValueError, match="missing"):
        describe_model(replace(opened, spec=replace(opened.spec, layers=opened.spec.layers * 2)), [])


# -- the KV cache ----------------------------------------------------------------------------------------------------


def test_the_cache_costs_what_the_decoder_says(make_llama):
    opened = open_model(ModelSource("test", make_llama()[0]))
    found = describe_model(opened, [])
    for dtype, cost in zip((torch.bfloat16, torch.float32), found.cache, strict=True):
        per_block = opened.load(CpuOps(dtype)).decoder.kv_cache_bytes(16)
        assert cost.bytes_per_token == cost.bytes_per_token_beyond_windows == per_block / 16
        assert cost.bytes_at_max_length == per_block / 16 * 512


@pytest.mark.parametrize("windows", [[None] * 4, [8, 8, None, 32], [8, None], [1000, None]])
def test_layers_with_a_window_keep_its_last_positions_only(make_llama, windows):
    spec = with_windows(open_model(ModelSource("test", make_llama()[0])).spec, windows)
    for length in (1, 7, 8, 9, 40, 512):
        positions = np.arange(length)
        kept = sum(int(np.sum(positions > length - 1 - (window or length))) for window in windows)
        # Two tensors of 2 heads of 16 elements of 2 bytes.
        assert describe.cache_bytes(spec, length, "bfloat16") == kept * 2 * 2 * 16 * 2


def test_without_a_layer_that_keeps_everything_windows_save_nothing(make_llama):
    spec = open_model(ModelSource("test", make_llama()[0])).spec
    assert describe.cache_bytes(with_windows(spec, [8, 8, 8]), 100, "float32") == describe.cache_bytes(
        with_windows(spec, [None] * 3), 100, "float32"
    )


@pytest.mark.parametrize("windows", [[None] * 3, [8, 8, None], [8, 8, 8]])
@pytest.mark.parametrize("budget", [0, 383, 384, 5000, 20_000, 10**9])
def test_the_longest_request_is_the_last_that_fits(make_llama, windows, budget):
    spec = with_windows(open_model(ModelSource("test", make_llama()[0])).spec, windows)
    fitting = [n for n in range(spec.max_positions + 1) if describe.cache_bytes(spec, n, "bfloat16") <= budget]
    assert longest_request(spec, budget, "bfloat16") == max(fitting)


def test_what_fits_follows_from_the_memory_that_the_weights_leave(make_llama):
    folder, _ = make_llama()
    weights = 4 * described(folder).parameters
    asked = []
    fit = described(folder, machine(ReferenceOps(), weights, lambda taken: asked.append(taken) or 10_000)).fits[0]
    assert asked == [weights]
    # 3 layers, two tensors of 2 heads of 16 elements of 2 bytes: 384 bytes a token.
    assert (fit.weights_fit, fit.cache_bytes, fit.cache_tokens, fit.longest_request) == (True, 10_000, 26, 26)
    fit = described(folder, machine(ReferenceOps(), weights - 1)).fits[0]
    assert (fit.weights_fit, fit.cache_bytes, fit.cache_tokens, fit.longest_request) == (False, 0, 0, 0)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([None] * 30, "30 × full"),
        ([4096] * 32, "32 × window 4,096"),
        ([512] * 5 + [None] + [512] * 5 + [None], "(5 × window 512, 1 × full) × 2"),
        ([8, None] * 2 + [8], "(1 × window 8, 1 × full) × 2, then its first 1"),
        ([None, 8, 8], "1 × full, 2 × window 8"),
    ],
)
def test_the_pattern_of_windows_is_told_by_its_shortest_unit(windows, expected):
    assert window_pattern(windows) == expected
