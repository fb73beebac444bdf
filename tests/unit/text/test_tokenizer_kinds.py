"""Every kind of tokenizer.json against Hugging Face's `tokenizers`: ids, texts, and texts token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from varied import SNIPPETS, strings

from octavo._core import Gguf, Tokenizer

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [*SNIPPETS, *strings(1500, seed=1)]
TEXTS = strings(1200, seed=2)

Make = Callable[[], tokenizers.Tokenizer]


def trained(model, trainer, *, pre=None, normalizer=None, decoder=None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<user>", normalized=False)])
    return tokenizer


def byte_level(pre, normalizer=None) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, pre=pre, normalizer=normalizer, decoder=decoders.ByteLevel())


def steps(*pres) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*pres, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def metaspace_unigram() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=4000, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return trained(models.Unigram(), trainer, pre=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace())


def llama2_bpe() -> tokenizers.Tokenizer:
    """BPE with byte fallback and the long decoder of Llama 2 files."""
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False, limit_alphabet=300)
    plain = trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainer,
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    # Byte tokens are no special tokens, so they must not be found in texts.
    vocab, merges = plain.get_vocab(), []
    for left, right in _merges(plain):
        merges.append((left, right))
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer, tokenizer.decoder = plain.normalizer, plain.decoder
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


def _merges(tokenizer: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def wordpiece(cleanup: bool, pre) -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=["[UNK]"], show_progress=False)
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre=pre,
        normalizer=normalizers.BertNormalizer(lowercase=cleanup),
        decoder=decoders.WordPiece(cleanup=cleanup),
    )


def word_level() -> tokenizers.Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=500, special_tokens=["[UNK]"], show_progress=False)
    return trained(models.WordLevel(unk_token="[UNK]"), trainer, pre=pre_tokenizers.Whitespace())


KINDS: dict[str, Make] = {
    "ByteLevel": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "ByteLevel with a prefix space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "Digits one by one": lambda: byte_level(steps(pre_tokenizers.Digits(individual_digits=True))),
    "Digits together, NFC": lambda: byte_level(steps(pre_tokenizers.Digits()), normalizers.NFC()),
    "Split as in Llama 3": lambda: byte_level(steps(split(LLAMA3))),
    "Split with possessive repetition": lambda: byte_level(steps(split(r"\p{L}++|\p{N}|\s+(?!\S)|[^\s]"))),
    "Split removed and inverted": lambda: byte_level(steps(split(r"\S+", "removed", True))),
    "Split merged": lambda: byte_level(steps(split(r"[,.]", "merged_with_previous"), split("a", "merged_with_next"))),
    "Punctuation": lambda: byte_level(steps(pre_tokenizers.Punctuation())),
    "Whitespace": lambda: byte_level(steps(pre_tokenizers.Whitespace())),
    "WhitespaceSplit": lambda: byte_level(steps(pre_tokenizers.WhitespaceSplit())),
    "CharDelimiterSplit": lambda: byte_level(steps(pre_tokenizers.CharDelimiterSplit("e"))),
    "UnicodeScripts": lambda: byte_level(steps(pre_tokenizers.UnicodeScripts())),
    "NFKC and Strip": lambda: byte_level(steps(), normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])),
    "Metaspace, Unigram": metaspace_unigram,
    "ByteFallback, Fuse, Strip": llama2_bpe,
    "WordPiece with BertPreTokenizer": lambda: wordpiece(False, pre_tokenizers.BertPreTokenizer()),
    "WordPiece with clean-up": lambda: wordpiece(True, pre_tokenizers.BertPreTokenizer()),
    "no decoder": word_level,
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    oracle = KINDS[request.param]()
    path = tmp_path_factory.mktemp("kind") / "tokenizer.json"
    oracle.save(str(path))
    return oracle, Tokenizer.from_file(path)


def test_ids_are_those_of_the_reference(pair) -> None:
    oracle, tokenizer = pair
    texts = [*TEXTS, *(f"{text[:9]}<|end|><user> {text[9:]}" for text in TEXTS[:200])]
    expected = [encoding.ids for encoding in oracle.encode_batch(texts, add_special_tokens=False)]
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, False, True) == ids, text
    assert tokenizer.encode_batch(texts, False, True) == expected


def test_texts_are_those_of_the_reference(pair) -> None:
    oracle, tokenizer = pair
    for text in TEXTS:
        ids = oracle.encode(text, add_special_tokens=False).ids
        # At the start of a text the reference drops every space that a token spells, and keeps a piece's prefix.
        if not text[:1].isspace() and not (ids and (oracle.id_to_token(ids[0]) or "").startswith(("##", "▁▁"))):
            assert tokenizer.decode(ids) == oracle.decode(ids), text


def test_the_bytes_of_tokens_join_to_the_text(pair) -> None:
    _, tokenizer = pair
    for text in TEXTS[:300]:
        ids = tokenizer.encode(text, False, True)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        assert tokenizer.decode(ids, False) in (joined, joined.removeprefix(" "))


def test_decoders_that_change_a_text_afterwards_are_refused_by_name(tmp_path) -> None:
    for decoder in (decoders.CTC(), decoders.BPEDecoder()):
        oracle = byte_level(pre_tokenizers.ByteLevel())
        oracle.decoder = decoder
        oracle.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=f"decoder of tokenizer.json is not supported.*{type(decoder).__name__}"):
            Tokenizer.from_file(tmp_path / "tokenizer.json")


# -- real vocabularies ------------------------------------------------------------------------------------------------


def smollm2_oracle(path: Path) -> tokenizers.Tokenizer:
    """The vocabulary of the file, with the splitting rules of the model's own `tokenizer.json`."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


def test_ten_thousand_varied_strings_have_the_ids_that_the_reference_gives_them(smollm2_path) -> None:
    oracle = smollm2_oracle(smollm2_path)
    oracle.encode_special_tokens = True
    tokenizer = Tokenizer.from_gguf(Gguf(smollm2_path))
    texts = strings(10_000)
    expected = [encoding.ids for encoding in oracle.encode_batch(texts, add_special_tokens=False)]
    found = tokenizer.encode_batch(texts)
    for text, ids, wanted in zip(texts, found, expected, strict=True):
        assert ids == wanted, text
        # The vocabulary lacks a few bytes, so a text of rare characters does not always come back.
        assert tokenizer.decode(ids) == oracle.decode(ids)
        assert tokenizer.encode(text) == ids


def test_lone_surrogates_are_refused_before_they_reach_the_tokenizer(smollm2_path) -> None:
    tokenizer = Tokenizer.from_gguf(Gguf(smollm2_path))
    for text in ("\ud83d", "a\udc00b"):
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode(text)
