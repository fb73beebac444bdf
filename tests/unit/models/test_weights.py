"""Checkpoints: every storage type against the gguf package, and damaged or contradictory files named in the error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from paged import PagedModel
from safetensors.torch import load_file, save_file

from octavo.models.catalog import ModelSource
from octavo.models.loader import load_model, open_model
from octavo.models.weights.base import MappedFile, MappedTensor, PermutedTensor, WeightError
from octavo.models.weights.storage import STORAGE, dequantize
from octavo.ops.reference import ReferenceOps

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path):
    return load_model(ModelSource("test", folder), ReferenceOps())


@pytest.fixture
def sharded(make_llama):
    """A checkpoint of several shards, its index, and the shard that holds `Q_PROJ`."""
    folder, oracle = make_llama(shard_size="150KB")
    index = json.loads((folder / INDEX).read_text())
    assert len(set(index["weight_map"].values())) >= 3
    return folder, oracle, index, folder / index["weight_map"][Q_PROJ]


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(oracle, tokens):
    with torch.no_grad():
        return oracle(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("storage", STORAGE)
def test_dequantization_equals_the_gguf_package_for_random_bytes(storage):
    kind = STORAGE[storage]
    data = np.random.default_rng(0).integers(0, 256, (50, 4 * kind.block_bytes), dtype=np.uint8)
    expected = quants.dequantize(data, GGMLQuantizationType[storage]) if storage != "F32" else data.view(np.float32)
    result = dequantize(data, storage).reshape(50, -1)
    np.testing.assert_array_equal(result, expected.astype(np.float32))


def test_a_permuted_tensor_has_the_rows_in_the_given_order(tmp_path):
    values = np.random.default_rng(1).standard_normal((8, 64), dtype=np.float32)
    path = tmp_path / "raw"
    path.write_bytes(quants.quantize(values, GGMLQuantizationType.Q4_0).tobytes())
    tensor = MappedTensor(MappedFile(path), "w", (8, 64), "Q4_0", 0)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    np.testing.assert_array_equal(PermutedTensor(tensor, order).float32(2, 6), tensor.float32()[order[2:6]])


def test_a_released_tensor_reads_the_same_values_again(tmp_path):
    path = tmp_path / "raw"
    path.write_bytes(np.arange(100_000, dtype=np.float32).tobytes())
    tensor = MappedTensor(MappedFile(path), "w", (100_000,), "F32", 0)
    before = tensor.float32()
    tensor.release()
    np.testing.assert_array_equal(tensor.float32(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint_gives_the_logits_of_its_rounded_weights(make_llama, dtype):
    folder, oracle = make_llama()
    rewrite(folder / "model.safetensors", lambda t: t.update({k: v.to(dtype) for k, v in t.items()}))
    for parameter in oracle.parameters():
        parameter.data = parameter.data.to(dtype).float()
    model = PagedModel(load(folder).decoder)
    logits = model.step([(model.sequence(), [5, 9, 200, 31])])[0]
    torch.testing.assert_close(logits, logits_of(oracle, [5, 9, 200, 31]), atol=1e-4, rtol=0)


def test_a_sharded_checkpoint_gives_the_logits_of_the_whole(sharded):
    folder, oracle, _, _ = sharded
    model = PagedModel(load(folder).decoder)
    logits = model.step([(model.sequence(), [1, 2, 3])])[0]
    torch.testing.assert_close(logits, logits_of(oracle, [1, 2, 3]), atol=1e-4, rtol=0)


def test_a_missing_shard_is_named_with_one_of_its_tensors(sharded):
    folder, _, index, shard = sharded
    shard.unlink()
    tensor = min(t for t, f in index["weight_map"].items() if f == shard.name)
    with pytest.raises(WeightError, match=rf"{shard.name}.*{tensor}"):
        load(folder)


def test_a_stray_file_and_wrong_copies_in_other_shards_are_not_read(sharded):
    folder, oracle, index, shard = sharded
    other = folder / next(f for f in sorted(set(index["weight_map"].values())) if f != shard.name)
    rewrite(other, lambda t: t.update({Q_PROJ: torch.full((64, 64), 9.0)}))
    save_file({Q_PROJ: torch.full((64, 64), 7.0)}, folder / "zzz.safetensors")
    model = PagedModel(load(folder).decoder)
    logits = model.step([(model.sequence(), [1, 2, 3])])[0]
    torch.testing.assert_close(logits, logits_of(oracle, [1, 2, 3]), atol=1e-4, rtol=0)


def test_a_tensor_that_is_not_in_the_shard_the_index_names_is_named(sharded):
    folder, _, _, shard = sharded
    rewrite(shard, lambda t: t.pop(Q_PROJ))
    with pytest.raises(WeightError, match=rf"{shard.name}: tensor {Q_PROJ} is missing"):
        load(folder)


def test_a_tensor_the_index_forgets_is_named(sharded):
    folder, _, index, _ = sharded
    del index["weight_map"][Q_PROJ]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=f"tensor {Q_PROJ}.*is missing"):
        load(folder)


def test_a_tensor_the_index_assigns_twice_is_named(sharded):
    folder, _, _, shard = sharded
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{Q_PROJ}": "{shard.name}",'))
    with pytest.raises(WeightError, match=rf"{INDEX}.*{Q_PROJ} occurs twice"):
        load(folder)


def test_an_index_that_points_out_of_the_folder_is_refused(sharded):
    folder, _, index, shard = sharded
    index["weight_map"][Q_PROJ] = f"../{folder.name}/{shard.name}"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match="outside the folder"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(sharded):
    folder, _, _, shard = sharded
    rewrite(shard, lambda t: t.update({Q_PROJ: torch.zeros(64, 32)}))
    with pytest.raises(WeightError, match=rf"{shard.name}: tensor {Q_PROJ} has shape \[64, 32\], expected \[64, 64\]"):
        load(folder)


def test_a_truncated_shard_is_named_with_a_tensor(sharded):
    folder, _, _, shard = sharded
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(WeightError, match=rf"{shard.name}: tensor model\..* truncated"):
        load(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", b"\xff" * 40, b"\x04" + bytes(7) + b"[1]x", b"\x02" + bytes(7) + b"{{"]
)
def test_a_file_that_is_no_safetensors_is_named(make_llama, content):
    folder, _ = make_llama()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        load(folder)


def test_a_storage_type_that_is_not_supported_is_named(make_llama):
    folder, _ = make_llama()
    rewrite(folder / "model.safetensors", lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int32)}))
    with pytest.raises(WeightError, match=rf"{Q_PROJ} is stored as I32"):
        load(folder)


def test_tensors_that_the_model_would_not_use_are_an_error(make_llama):
    folder, _ = make_llama(attention_bias=True)
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        WeightError, match=r"12 tensors have no place in the model, e\.g\. model.layers.0.self_attn.k_proj.bias"
    ):
        load(folder)


def test_an_absent_head_is_the_embedding_whatever_the_configuration_says(make_llama):
    folder, oracle = make_llama()
    rewrite(folder / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    assert open_model(ModelSource("test", folder)).spec.tied_embeddings
    oracle.lm_head.weight.data = oracle.model.embed_tokens.weight.data
    model = PagedModel(load(folder).decoder)
    logits = model.step([(model.sequence(), [1, 2, 3])])[0]
    torch.testing.assert_close(logits, logits_of(oracle, [1, 2, 3]), atol=1e-4, rtol=0)


def test_a_head_of_its_own_is_used_although_the_configuration_says_tied(make_llama):
    folder, oracle = make_llama()
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    model = PagedModel(load(folder).decoder)
    logits = model.step([(model.sequence(), [1, 2, 3])])[0]
    torch.testing.assert_close(logits, logits_of(oracle, [1, 2, 3]), atol=1e-4, rtol=0)


def test_a_copy_of_the_embedding_as_head_stays_tied(make_llama):
    folder, _ = make_llama(tie_word_embeddings=True)
    stored_bytes = load(folder).stored_bytes
    rewrite(
        folder / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    found = load(folder)
    assert found.spec.tied_embeddings
    assert found.stored_bytes == stored_bytes
