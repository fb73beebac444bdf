"""The texts that models are compared on; they are in the package, so that nothing is fetched."""

from __future__ import annotations

from importlib import resources
from typing import Final

TOKENIZER_TEXTS: Final = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they've said it's what we'd do; you'll see. I'M SURE THEY'VE.",
    "don't can't won't DON'T ain't o'clock 'tis rock'n'roll",
    "0 1 12 123 1234 12345 123456 1234567890 3.14159 1,000,000 1e-9 0xFF 2026-11-30T07:45:00Z",
    "①②③ ½ ¾ ² ³ ٣٤٥ ५६७ 一二三 Ⅷ",
    " leading space",
    "trailing space ",
    "  two  between  words  ",
    "tabs\tand\t\ttwo\t\t\tthree",
    "lines\nlines\n\ntwo\n\n\nthree\r\nwindows\r\n\r\n",
    " \n  \n   mixed \t \n white \n\t\n space \t",
    "a" + " " * 16 + "b" + "\n" * 8 + "c" + "\t" * 8 + "d",
    "no\u00a0break\u2003em\u3000ideographic\u200bzero\u2028line\u0085next",
    "def f(x: int) -> int:\n    if x > 1:\n        return f(x - 1) * x  # recursion\n    return 1\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; } /* done */\n",
    '\tif err != nil {\n\t\treturn nil, fmt.Errorf("open %q: %w", path, err)\n\t}\n',
    "SELECT \"a\", `b` FROM t WHERE x <> 'y' AND z LIKE '%_\\%'; -- end",
    '<div class="note"><p>Text &amp; more</p><!-- hidden --></div>',
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "$E = mc^2$, \\frac{a}{b} \\leq \\sum_{i=0}^{n} x_i",
    "https://example.org/a/b?c=d&e=%20f#g user.name+tag@example.org C:\\temp\\new ~/.ssh/id",
    "!!! ??? ... --- *** ___ ### @@@ $$$ %%% ^^^ &&& ((( ))) [[[ ]]] {{{ }}} ||| \\\\\\ /// ~~~ ```",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case x86_64 IPv6 ΔE α-β",
    "Größe, Übermut, Straße; naïve café, cœur, garçon; niño, mañana, ¿qué?; ação, coração; Łódź, žluťoučký kůň",
    "e\u0301 versus é, n\u0303 versus ñ, ﬁ ﬂ ligatures, ſ long s, İ ı dotless",
    "Привет, мир! Ёлка, объём. Ελληνικά: καλημέρα. עברית שלום. العربية: مرحبا بالعالم. فارسی",
    "हिन्दी नमस्ते, বাংলা, தமிழ், తెలుగు, ไทยภาษาไทยไม่มีช่องว่าง, ភាសាខ្មែរ, አማርኛ, ქართული, հայերեն",
    "中文没有空格，标点也不同。日本語は、ひらがなとカタカナと漢字を混ぜて書く。한국어는 띄어쓰기가 있다. 繁體字",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎𠜱𠝹 \U0001f1e9\U0001f1ea",
    "😀😃 👍🏽 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 ❤️ ☂ ✓ → ∀x∈ℝ ⌘",
    "\u202bright to left\u202c \ufeffbom \ufffd replacement",
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "antidisestablishmentarianism Donaudampfschifffahrtsgesellschaftskapitän pneumonoultramicroscopicsilicovolcanoconiosis",
    "<s> </s> <unk> <pad> <bos> <eos> <|endoftext|> <|im_start|>user\nhi<|im_end|>\n<0x0A> [INST] x [/INST]",
    "▁ ▁▁ Ġ Ċ ## ##ing",
    "",
    " ",
    "\n",
)
"""Scripts, numbers, code, white space, emoji, text that looks like special tokens. No run of spaces is longer than 31: those
transformers merges in pairs where SentencePiece takes the longest token."""


def sample_text() -> str:
    """About two pages: English prose, code in three languages, and twelve other languages."""
    return resources.files("octavo.quality").joinpath("sample.txt").read_text(encoding="utf-8")
