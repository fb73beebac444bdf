"""Writes the fixtures beside this file with Hugging Face's tokenizers (Oniguruma) and Jinja2 as oracles.

python make_fixtures.py SmolLM2-135M-Instruct.Q4_1.gguf golden.json
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import jinja2.sandbox
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent

TEXTS = [
    "",
    " ",
    "a",
    "The capital of France is",
    "  two  spaces   three",
    "tabs\tand\n\nnewlines\r\n \n  x",
    "Year 2018, 12:30, x1234567 and ٣٤ or ⅷ½",
    "I'm can't WE'LL they'D 'S it’s",
    "def f(x):\n    return x ** 2  # ok\n\n\n",
    "漢字かな交じり文、テスト。",
    "Привет, мир! Ελληνικά العربية עברית",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 é e\u0301 ﬁ ǅ ſ 'ſ K",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u0085nel\u2028ls",
    "\u0000\u0001\u0004\u007f control",
    "trailing space ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b <|im_end|> c",
    "<|im_end",
    "<<|im_end|>>",
    "<|endoftext|><|im_start|>",
    "https://example.com/a?b=c&d=%20#frag",
    "x" * 300,
    " " * 300 + "y",
    "\n" * 50,
    "a  \n  b\t\t\n",
    '$\\frac{1}{2}$ <div class="x">',
]

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NO_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
NO_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
PATTERNS = {
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "llama-bpe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "qwen2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "gpt-4o": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}?"
        r"|\p{N}{1,3}" + TAIL
    ],
    "tekken": [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}" + TAIL],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        + SPACES,
    ],
    # Of the letters that have a case the original lists those of Unicode 11; the texts here have no others.
    "deepseek-llm": [
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
        r"\s+$",
        r"[一-龥\x{800}-一가-\x{d7ff}]+",
        r"\p{N}",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥\x{800}-一가-\x{d7ff}]+", r"\p{N}"],
    "qwen35": [
        CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + SPACES,
    ],
    "seed-coder": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES],
    "minicpm5": [
        r"\p{N}{1,3}",
        CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES,
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ],
    "kimi-k2": [
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{NO_HAN_UPPER}*{NO_HAN_LOWER}+{CONTRACTION}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{NO_HAN_UPPER}+{NO_HAN_LOWER}*{CONTRACTION}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
    ],
    "bloom": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
}

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 2+2? \n"}],
    [
        {"role": "user", "content": "Größe 漢字 😀"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "<b>x</b>"},
    ],
]


def random_text(rng: random.Random) -> str:
    """A short text full of borders between classes of characters."""
    alphabet = "ab AB01 \n\t'sé漢😀.,/_-<|>\u00a0ſ½"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40)))


def smollm2(fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer of the GGUF file, with the splitting rules of its original `tokenizer.json`."""
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def split(patterns: list[str], text: str) -> list[str]:
    """The pieces that the patterns cut a text into, one pattern after the other."""
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


def render(template: str, messages: list[dict[str, str]], generate: bool) -> str:
    """The prompt as Jinja2 renders it, set up as in transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=generate)


def main() -> None:
    """Writes `smollm2.json` and `splits.json`."""
    fields = GGUFReader(sys.argv[1]).fields
    golden = json.loads(Path(sys.argv[2]).read_text())
    tokenizer = smollm2(fields)
    rng = random.Random(0)
    texts = TEXTS + [random_text(rng) for _ in range(150)] + [case["prompt"] for case in golden["cases"]]
    parsed = [tokenizer.encode(text).ids for text in texts]
    tokenizer.encode_special_tokens = True
    plain = [tokenizer.encode(text).ids for text in texts]
    tokenizer.encode_special_tokens = False
    sequences = [[rng.randrange(49152) for _ in range(rng.randint(1, 12))] for _ in range(200)]
    sequences += [[rng.randrange(300) for _ in range(rng.randint(1, 12))] for _ in range(200)]
    template = fields["tokenizer.chat_template"].contents()
    renders = [(chat, flag, render(template, chat, flag)) for chat in CHATS for flag in (False, True)]
    smollm2_cases = {
        "golden": [{"prompt": c["prompt"], "ids": c["prompt_ids"]} for c in golden["cases"]],
        "encode": [{"text": t, "parsed": a, "plain": b} for t, a, b in zip(texts, parsed, plain, strict=True)],
        "decode": [
            {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False), "skipped": tokenizer.decode(ids)}
            for ids in sequences
        ],
        "chat": [
            {"messages": chat, "generate": flag, "text": text, "ids": tokenizer.encode(text).ids}
            for chat, flag, text in renders
        ],
    }
    pieces = {name: [split(p, text) for text in texts if text] for name, p in PATTERNS.items()}
    splits = {"texts": [t for t in texts if t], "pieces": pieces}
    for name, content in (("smollm2.json", smollm2_cases), ("splits.json", splits)):
        (HERE / name).write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
