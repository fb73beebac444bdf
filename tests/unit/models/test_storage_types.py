"""Storage types and GGUF tensors: exact against the gguf package, read by rows, mixed in one file, split over files."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.models.weights.base import WeightError
from octavo.models.weights.gguf import GgufFile
from octavo.models.weights.storage import STORAGE, dequantize

HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
"""Where the fp16 scales of a block are."""

K_QUANTS = [name for name in HALVES if name.endswith("_K")]


def random_blocks(storage: str, count: int, seed: int = 0) -> np.ndarray:
    """`[count, block_bytes]` of random bits, but for the scales, which are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, STORAGE[storage].block_bytes), dtype=np.uint8)
    for at in HALVES[storage]:
        scales = (rng.standard_normal(count) * 0.02).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks


def oracle(blocks: np.ndarray, storage: str) -> np.ndarray:
    return quants.dequantize(blocks, GGMLQuantizationType[storage]).astype(np.float32)


def add_tensor(writer: GGUFWriter, name: str, blocks: np.ndarray, storage: str) -> None:
    """`blocks` is `[..., bytes of a row]`."""
    writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[storage])


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@settings(max_examples=15, deadline=None)
@given(storage=st.sampled_from(list(HALVES)), count=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_every_bit_of_a_dequantized_block_is_that_of_the_gguf_package(storage, count, seed):
    blocks = random_blocks(storage, count, seed)
    expected = oracle(blocks, storage).reshape(-1)
    np.testing.assert_array_equal(dequantize(blocks, storage).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("storage", HALVES)
def test_more_blocks_than_are_decoded_at_a_time_are_all_decoded(storage):
    count = 600_000 // STORAGE[storage].block_elements
    blocks = random_blocks(storage, count)
    np.testing.assert_array_equal(dequantize(blocks, storage), oracle(blocks, storage).reshape(-1))


@pytest.mark.parametrize("storage", ["F16", "BF16"])
def test_plain_half_precision_is_widened_exactly(storage):
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    expected = oracle(bits.view(np.uint8).reshape(-1, 2), storage).reshape(-1)
    found = dequantize(bits.view(np.uint8), storage)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_file_may_mix_every_storage_type(tmp_path):
    path = tmp_path / "mixed.gguf"
    writer = GGUFWriter(path, "llama")
    stored = {}
    for storage, kind in STORAGE.items():
        if storage in HALVES:
            stored[storage] = random_blocks(storage, 3 * 512 // kind.block_elements).reshape(3, -1)
            add_tensor(writer, storage, stored[storage], storage)
    plain = np.random.default_rng(1).standard_normal((3, 512), dtype=np.float32)
    writer.add_tensor("plain", plain)
    write(writer)
    tensors = GgufFile(path).tensors
    for storage, rows in stored.items():
        assert (tensors[storage].shape, tensors[storage].storage) == ((3, 512), storage)
        np.testing.assert_array_equal(tensors[storage].float32(), oracle(rows, storage))
    np.testing.assert_array_equal(tensors["plain"].float32(), plain)


@pytest.mark.parametrize("storage", K_QUANTS)
def test_experts_of_a_stacked_tensor_are_read_one_by_one(tmp_path, storage):
    path = tmp_path / "experts.gguf"
    blocks = random_blocks(storage, 5 * 6 * 2).reshape(5, 6, -1)
    writer = GGUFWriter(path, "llama")
    add_tensor(writer, "experts", blocks, storage)
    write(writer)
    tensor = GgufFile(path).tensors["experts"]
    assert tensor.shape == (5, 6, 512)
    expected = oracle(blocks, storage)
    np.testing.assert_array_equal(tensor.float32(), expected)
    for expert in range(5):
        np.testing.assert_array_equal(tensor.float32(expert, expert + 1), expected[expert : expert + 1])
    np.testing.assert_array_equal(tensor.float32(1, 4), expected[1:4])


def test_a_storage_type_that_cannot_be_read_is_named_with_its_tensor(tmp_path):
    path = tmp_path / "iq.gguf"
    writer = GGUFWriter(path, "llama")
    add_tensor(writer, "blk.0.attn_q.weight", np.zeros((2, 66), dtype=np.uint8), "IQ2_XXS")
    write(writer)
    with pytest.raises(WeightError, match=r"tensor blk\.0\.attn_q\.weight is stored as IQ2_XXS; supported: F32.*Q6_K"):
        GgufFile(path)


def write_parts(folder, count=3, numbers=(0, 1, 2), total=3, names=("a", "b", "c")):
    """A checkpoint of `count` parts with one tensor each; returns the path of the first."""
    for at in range(count):
        writer = GGUFWriter(folder / f"m-{at + 1:05d}-of-{count:05d}.gguf", "llama")
        writer.add_uint16("split.no", numbers[at])
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", total)
        writer.add_tensor(names[at], np.full(4, at, dtype=np.float32))
        write(writer)
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_split_checkpoint_has_the_tensors_of_all_its_parts(tmp_path):
    file = GgufFile(write_parts(tmp_path))
    assert {name: tensor.float32()[0] for name, tensor in file.tensors.items()} == {"a": 0, "b": 1, "c": 2}


def test_a_split_checkpoint_that_is_not_whole_is_refused_by_key_or_file(tmp_path):
    first = write_parts(tmp_path)
    with pytest.raises(WeightError, match=r"split\.no is 1, give the first part, m-00001-of-00003\.gguf"):
        GgufFile(tmp_path / "m-00002-of-00003.gguf")
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(WeightError, match=r"split\.count is 3, so the name must end in -00001-of-00003\.gguf"):
        GgufFile(renamed)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(WeightError, match=r"m-00003-of-00003\.gguf: no such file"):
        GgufFile(first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numbers": (0, 2, 1)}, r"00002-of-00003\.gguf: split\.no is 2 of split\.count 3, expected 1 of 3"),
        ({"names": ("a", "b", "a")}, r"00003-of-00003\.gguf: tensor a is also in another part"),
        ({"total": 4}, r"split\.tensors\.count is 4, the parts hold 3 tensors"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path, settings, message):
    with pytest.raises(WeightError, match=message):
        GgufFile(write_parts(tmp_path, **settings))


def test_a_split_count_that_is_no_integer_is_refused_by_key(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_string("split.count", "two")
    write(writer)
    with pytest.raises(WeightError, match=r"split\.count is 'two', not an integer"):
        GgufFile(tmp_path / "m.gguf")
