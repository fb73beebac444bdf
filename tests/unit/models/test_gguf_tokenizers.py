"""Tokenizers of GGUF files against SentencePiece itself and transformers, and GGUF headers that are broken on purpose."""

from __future__ import annotations

import io
import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.text.varied import strings
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from octavo._core import ChatTemplate, Gguf, Tokenizer
from octavo.models.catalog import ModelNotFoundError, models_folder, resolve_model

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
Piece = tuple[str, float, int]

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!  Two  spaces,\ttabs\t\tand\n\n\nnewlines \r\n x ",
    "def f(x):\n    return {'a': x ** 2}  # ok\n\n\n\tif x:\n\t\tpass\n",
    '<div class="x"><p>1</p></div> <0x0A> <s> <unk>',
    "漢字かな交じり文、テスト。 中文 한국어 Привет Ελληνικά العربية עברית हिन्दी ไทย",
    "😀👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 é e\u0301 ﬁ ǅ ſ \u0301\u0302",
    "zero\u200bwidth\u00a0nbsp\u3000wide\u0085nel\u2028ls \ufffd \x00\x01\x7f",
    f"{SPACE}{SPACE} {SPACE}a{SPACE} b",
    "aaaa" * 700,
    "thequickbrownfox" * 300,
    "\n" * 40 + " " * 40 + "\t" * 40,
]

MESSY = st.text(
    st.one_of(st.sampled_from(f" \n\t{SPACE}abth<>/"), st.characters(exclude_categories=["Cs"])), max_size=80
)


def field(number: int, data: bytes) -> bytes:
    """A length-delimited protocol-buffer field."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field_number: int, value: int) -> bytes:
    return varint(field_number << 3) + varint(value)


def sentencepiece_of(pieces: list[Piece], unk: int) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece's own BPE over the pieces, by way of a `ModelProto`."""
    fields = []
    for at, (token, score, kind) in enumerate(pieces):
        spelled = token.replace(" ", SPACE) if kind == USER_DEFINED else token
        scored = varint(2 << 3 | 5) + struct.pack("<f", score)
        fields.append(field(1, field(1, spelled.encode()) + scored + number(3, UNKNOWN if at == unk else kind)))
    has_bytes = any(kind == BYTE for _, _, kind in pieces)
    fields.append(field(2, number(3, 2) + number(35, int(has_bytes)) + number(40, unk)))
    fields.append(field(3, field(1, b"identity") + number(3, 0) + number(4, 0) + number(5, 1)))
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(b"".join(fields))
    return processor


def write_vocabulary(path: Path, pieces: list[Piece], prefix: bool) -> Gguf:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_add_space_prefix(prefix)
    writer.add_unk_token_id(next(i for i, piece in enumerate(pieces) if piece[2] == UNKNOWN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Gguf(path)


def train(byte_fallback: bool, **options) -> sentencepiece.SentencePieceProcessor:
    """A small BPE model of this repository's documentation and the texts above."""
    documents = (Path(__file__).parents[3] / "docs").glob("*.md")
    lines = [line for path in sorted(documents) for line in path.read_text().splitlines() if line.strip()]
    lines += [text[:2000] for text in TEXTS if text.strip() and "\x00" not in text] * 3
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def pieces_of(processor: sentencepiece.SentencePieceProcessor, user_defined: list[str]) -> list[Piece]:
    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return UNKNOWN
        if processor.is_control(i):
            return CONTROL
        if processor.is_byte(i):
            return BYTE
        return USER_DEFINED if processor.id_to_piece(i) in user_defined else NORMAL

    return [(processor.id_to_piece(i), processor.get_score(i), kind(i)) for i in range(processor.get_piece_size())]


@pytest.fixture(scope="module", params=["bytes", "unknown", "no prefix", "user-defined"])
def trained(request, tmp_path_factory):
    """A SentencePiece model and the tokenizer of a GGUF file with the same vocabulary."""
    whole = (
        ["<b>", "</b>", f"{SPACE}{SPACE}", f"{SPACE}{SPACE}{SPACE}", "\n\n"] if request.param == "user-defined" else []
    )
    prefix = request.param in ("bytes", "unknown")
    oracle = train(request.param != "unknown", add_dummy_prefix=prefix, user_defined_symbols=whole)
    path = tmp_path_factory.mktemp("trained") / "vocabulary.gguf"
    return oracle, Tokenizer.from_gguf(write_vocabulary(path, pieces_of(oracle, whole), prefix))


def check(oracle, tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text), text
    if oracle.unk_id() not in ids:
        assert tokenizer.decode(ids) == oracle.decode(ids), text


def test_ids_and_texts_equal_those_of_a_trained_sentencepiece_model(trained):
    for text in TEXTS:
        check(*trained, text)


@settings(max_examples=150, deadline=None)
@given(text=MESSY)
def test_ids_of_any_text_equal_those_of_a_trained_sentencepiece_model(trained, text):
    check(*trained, text)


@settings(max_examples=150, deadline=None)
@given(
    words=st.sets(st.text("abc" + SPACE, min_size=2, max_size=5), max_size=30),
    scores=st.lists(st.integers(-5, -1), min_size=30, max_size=30),
    kinds=st.lists(st.sampled_from([NORMAL, NORMAL, UNUSED, USER_DEFINED]), min_size=30, max_size=30),
    texts=st.lists(st.text("abc é", max_size=40), min_size=1, max_size=8),
)
def test_ids_equal_sentencepiece_for_any_vocabulary_of_normal_unused_and_user_defined_pieces(
    tmp_path_factory, words, scores, kinds, texts
):
    pieces: list[Piece] = [("<unk>", 0.0, UNKNOWN)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(character, -9.0, NORMAL) for character in "abc" + SPACE]
    pieces += [(word, float(score), kind) for word, score, kind in zip(sorted(words), scores, kinds, strict=False)]
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    tokenizer = Tokenizer.from_gguf(write_vocabulary(path, pieces, prefix=False))
    oracle = sentencepiece_of(pieces, unk=0)
    for text in texts:
        assert tokenizer.encode(text) == oracle.encode(text), text


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    """The real file of Gemma 3 270M: 262,144 pieces, user-defined runs of spaces, tabs and newlines, tags of HTML."""
    try:
        return resolve_model("gemma3-270m").path
    except ModelNotFoundError:
        path = models_folder() / "gemma-3-270m-q4_k_m.gguf"
        if not path.is_file():
            pytest.skip("the file of Gemma 3 270M is not there")
        return path


@pytest.fixture(scope="module")
def gemma(gemma_path) -> Tokenizer:
    return Tokenizer.from_gguf(Gguf(gemma_path))


@pytest.fixture(scope="module")
def gemma_oracle(gemma_path):
    metadata = read_metadata(gemma_path)
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    return sentencepiece_of(list(zip(*columns, strict=True)), metadata["tokenizer.ggml.unknown_token_id"])


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file; the gguf package takes a minute for so many strings."""
    with path.open("rb") as file:

        def scalar(code: str) -> Any:
            return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]

        def value(kind: int) -> Any:
            if kind == 8:
                return file.read(scalar("Q")).decode()
            if kind == 9:
                kind, count = scalar("I"), scalar("Q")
                return [value(kind) for _ in range(count)]
            return scalar({0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}[kind])

        _, _, _, entries = struct.unpack("<4sIQQ", file.read(24))
        return {value(8): value(scalar("I")) for _ in range(entries)}


def scripts(rng: random.Random, length: int) -> str:
    """Characters of many scripts and runs of white space."""
    ranges = [
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x400, 0x500),
        (0x600, 0x700),
        (0x900, 0xA00),
        (0xE00, 0xE80),
    ]
    ranges += [
        (0x3040, 0x3100),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A4),
        (0x1F300, 0x1F700),
        (0x200C, 0x200E),
        (0x20000, 0x2A6D0),
    ]
    parts = []
    while len(parts) < length:
        if rng.random() < 0.4:
            parts.append(rng.choice(" \n\t") * rng.randint(1, 40))
        parts += [chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randint(1, 6))]
    return "".join(parts)


def corpus() -> list[str]:
    rng = random.Random(0)
    code = [path.read_text() for path in sorted(Path(__file__).parents[3].glob("rust/text/src/**/*.rs"))[:8]]
    return TEXTS + code + [scripts(rng, 40) for _ in range(300)]


def test_gemmas_ids_equal_those_of_sentencepiece_and_decode_to_the_text(gemma, gemma_oracle):
    for text in corpus():
        ids = gemma.encode(text)
        assert ids == gemma_oracle.encode(text), text[:80]
        assert gemma.decode(ids, skip_special=False) == text.replace(SPACE, " ")


def test_ten_thousand_varied_strings_have_the_ids_that_sentencepiece_gives_them(gemma, gemma_oracle):
    texts = strings(10_000)
    expected = gemma_oracle.encode(texts, num_threads=2)
    for text, ids, wanted in zip(texts, gemma.encode_batch(texts), expected, strict=True):
        assert ids == wanted, text
        assert gemma.decode(ids, skip_special=False) == text.replace(SPACE, " ")


@settings(max_examples=200, deadline=None)
@given(text=MESSY)
def test_gemmas_ids_of_any_text_equal_those_of_sentencepiece(gemma, gemma_oracle, text):
    assert gemma.encode(text) == gemma_oracle.encode(text)


@pytest.mark.slow
def test_gemmas_special_tokens_are_those_that_transformers_reads_from_the_file(gemma, gemma_path):
    oracle = AutoTokenizer.from_pretrained(gemma_path.parent, gguf_file=gemma_path.name)
    texts = [
        "<bos>hi<end_of_turn>\n",
        "<start_of_turn>user\nHi  there,\n\n<b>you</b><end_of_turn>\n<start_of_turn>model\n",
        "<unused5>x <unk> <pad><start_of_image>",
        "plain",
    ]
    # Runs of more than 31 spaces are left out: transformers merges those two by two, SentencePiece takes the longest token.
    texts += [text for text in corpus() if " " * 32 not in text.replace(SPACE, " ")]
    for text in texts:
        assert gemma.encode(text, add_special=True, parse_special=True) == oracle(text)["input_ids"], text[:80]
    assert (gemma.bos_token_id, gemma.eos_token_ids) == (oracle.bos_token_id, [oracle.eos_token_id])
    assert set(gemma.eog_token_ids) == {oracle.eos_token_id, oracle.convert_tokens_to_ids("<end_of_turn>")}


CHATS = [
    [("user", "Hi")],
    [("system", "Be brief."), ("user", " 2+2? \n")],
    [("user", "Größe 漢字 😀"), ("assistant", "ok"), ("user", "<b>x</b>")],
    [("system", ""), ("user", "")],
    [("user", "a\n\n\n  b\t\tc  "), ("assistant", " \n"), ("user", "…")],
    [("user", "x" * 500)],
    [("user", "def f():\n    return 1\n"), ("assistant", "```python\npass\n```"), ("user", "ok?")],
    [("user", "12345 67 8.9"), ("assistant", "I'm, you're, we'LL"), ("user", "\u00a0nbsp\u200bzw")],
    [("system", "Système: réponds en français."), ("user", "Ça va ?"), ("assistant", "Oui."), ("user", "Bien.")],
    [("user", "{{ jinja }} {% raw %} <|im"), ("assistant", "_end|>"), ("user", "|im_end|")],
]


def test_twenty_chats_of_a_gguf_files_template_have_the_ids_that_transformers_gives_them(smollm2_path):
    tokenizer = Tokenizer.from_gguf(Gguf(smollm2_path))
    oracle = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    # The model's tokenizer.json isolates digits; what transformers makes of the file's `smollm` does not.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    assert oracle.chat_template == tokenizer.chat_template
    template = ChatTemplate(tokenizer.chat_template, tokenizer)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        for generate in (False, True):
            text, ids = template.render(tokenizer, json.dumps(messages), None, generate, False, "{}")
            assert text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            assert ids == oracle.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)


READ_ALL = """
import resource, sys
from octavo._core import Gguf, Tokenizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        Tokenizer.from_gguf(Gguf(path))
        print("accepted", path)
    except ValueError as error:
        print("refused", error)
print("grown", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_mutated_headers_end_in_an_error_or_a_tokenizer_and_cost_little_memory(tmp_path):
    pieces: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    write_vocabulary(tmp_path / "good.gguf", [*pieces, ("a", -1.0, NORMAL), ("aa", -2.0, NORMAL)], prefix=True)
    good = (tmp_path / "good.gguf").read_bytes()
    rng = random.Random(1)
    paths = []
    for at in range(300):
        changed = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(good) - 8)
            if rng.random() < 0.5:
                changed[place] = rng.randrange(256)
            else:
                changed[place : place + 8] = rng.choice([2**60, 2**63, 2**64 - 1, 2**32, 0]).to_bytes(8, "little")
        if rng.random() < 0.2:
            del changed[rng.randrange(len(changed)) :]
        paths.append(tmp_path / f"{at}.gguf")
        paths[-1].write_bytes(changed)
    command = [sys.executable, "-c", READ_ALL, *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = run.stdout.splitlines()
    outcomes = [line.split()[0] for line in lines[:-1]]
    assert len(outcomes) == len(paths)
    assert set(outcomes) == {"accepted", "refused"}
    assert int(lines[-1].split()[1]) * 1024 < 64 * 2**20, lines[-1]
    assert "panicked" not in run.stderr


def test_the_size_of_every_storage_type_is_that_of_the_gguf_package(tmp_path):
    for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # Never in a file; the package counts its two scales as fp32, ggml as fp16.
            continue
        info = field_of_tensor("t", [elements * 2, 3], kind.value)
        header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
        header += bytes(-len(header) % 32)
        path = tmp_path / "one.gguf"
        path.write_bytes(header + bytes(6 * size))
        assert Gguf(path).tensors() == [("t", [elements * 2, 3], kind.name, len(header), 6 * size)]


def field_of_tensor(name: str, dims: list[int], kind: int) -> bytes:
    text = struct.pack("<Q", len(name)) + name.encode()
    return text + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)
