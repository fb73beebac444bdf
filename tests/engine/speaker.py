"""A model that says one text, whatever it is asked: random weights cannot be made to call a tool.

Its attention and MLP add nothing, so the next token depends on the last one alone; the output matrix leads from the last token of
a prompt through the pieces of the text, each a token of its own, to the end of the sequence.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

EOS = 1
_HIDDEN = 256


def make_speaker(folder: Path, text: str, template: str, specials: Sequence[str] = (), seed: int = 0) -> Path:
    """Writes the model and its tokenizer.

    Args:
        folder: where to.
        text: what it says; cut into tokens at any byte, but for `specials`.
        template: its chat template, whose prompts end with `>`.
        specials: special tokens; each occurs in the text once or not at all.
        seed: of the cuts.
    """
    symbols = _symbols()
    vocab = {"<bos>": 0, "<eos>": EOS} | {symbol: 2 + byte for byte, symbol in enumerate(symbols)}
    chain = [vocab[symbols[ord(">")]]]
    for piece in _pieces(text, specials, random.Random(seed)):
        written = piece if isinstance(piece, str) else "".join(symbols[byte] for byte in piece)
        assert written not in vocab, "a piece is one token, and says what comes next"
        chain.append(len(vocab))
        vocab[written] = len(vocab)
    chain.append(EOS)
    for special in specials:
        vocab.setdefault(special, len(vocab))
    _save_model(folder, len(vocab), chain)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", *specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _symbols() -> list[str]:
    """The character that stands for each byte: itself if it can be printed, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    symbols = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    assert sorted(symbols) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return symbols


def _pieces(text: str, specials: Sequence[str], draw: random.Random) -> list[str | bytes]:
    """The specials of a text, and the bytes between them in different pieces of at least two."""
    found: list[str | bytes] = []
    while text:
        places = [(text.index(special), special) for special in specials if special in text]
        at, special = min(places, default=(len(text), ""))
        data = text[:at].encode()
        while data:
            size = draw.randint(2, 7)
            while data[:size] in found or len(data) - size == 1:
                size += 1
            found.append(data[:size])
            data = data[size:]
        if special:
            found.append(special)
        text = text[at + len(special) :]
    return found


def _save_model(folder: Path, vocab_size: int, chain: list[int]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(vocab_size, _HIDDEN))
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.zero_()
        for last, following in itertools.pairwise(chain):
            model.lm_head.weight[following] = embeddings[last]
    model.save_pretrained(folder)
