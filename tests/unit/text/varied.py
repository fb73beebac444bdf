"""Texts of many kinds, made from a table and a seed: the same in every run."""

from __future__ import annotations

import random

SNIPPETS = [
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock; they'll say we'd've known!",
    "Größe, Straße, Übermut und Äpfel: «Zitat» – „noch eins“.",
    "L'été dernier, nous étions à Nîmes ; où êtes-vous allés ?",
    "¿Dónde está el niño? ¡Mañana llegará a la una!",
    "São Paulo, coração, ação e pão de queijo não faltam.",
    "Perché no? È così che si fa, città per città.",
    "Het ĳs is koud; geïnteresseerd zijn is één ding.",
    "Blåbærsyltetøy på brødskiven, ikke sant?",
    "Räksmörgås och ångbåtar på sjön.",
    "Hyvää päivää, yötyö jää työmäärään.",
    "Þetta er íslenskur texti með ð og æ.",
    "Zażółć gęślą jaźń, chrząszcz brzmi w trzcinie.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Árvíztűrő tükörfúrógép, őzike.",
    "Țara și oameni: ăsta e un test în română.",
    "İstanbul'da ılık bir gün, şöyle böyle çağrı.",
    "Đây là tiếng Việt: nghiêng, thuở, ượt ượt, Hà Nội.",
    "Съешь же ещё этих мягких французских булок.",
    "Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· τι;",
    "Љубазни фењерџија чађавог лица.",
    "Բարեւ աշխարհ, ինչպե՞ս ես։",
    "გამარჯობა მსოფლიო, როგორ ხარ?",
    "שלום עולם, מה שלומך? בְּרֵאשִׁית",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣ السَّلَامُ",
    "سلام دنیا، می‌خواهم ۱۲۳ بنویسم.",
    "ہیلو دنیا، آپ کیسے ہیں؟",
    "नमस्ते दुनिया, क्षत्रिय १२३ है।",
    "হ্যালো বিশ্ব, কেমন আছো? ১২৩",
    "ਸਤ ਸ੍ਰੀ ਅਕਾਲ ਦੁਨੀਆ",
    "வணக்கம் உலகம், எப்படி இருக்கிறாய்?",
    "హలో ప్రపంచం, ఎలా ఉన్నావు?",
    "ನಮಸ್ಕಾರ ಜಗತ್ತು",
    "ഹലോ ലോകം, ക്ഷമിക്കണം",
    "සිංහල ශ්‍රී ලංකාව",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง ๑๒๓",
    "ສະບາຍດີໂລກ",
    "မင်္ဂလာပါ ကမ္ဘာလောက",
    "សួស្តី\u200bពិភពលោក",
    "བོད་སྐད་ ཡིག་",
    "ሰላም ልዑል፣ እንዴት ነህ?",
    "你好,世界。今天天气很好!《红楼梦》第一百二十回",
    "正體中文「引號」與、頓號……龍龜鱉",
    "こんにちは世界。カタカナとひらがな、ヴァイオリン、ﾊﾝｶｸ",
    "안녕하세요 세계! 한국어 띄어쓰기 ㅋㅋㅋ \u1112\u1161\u11ab",
    "Sawubona mhlaba; Ẹ káàbọ̀; Habari dunia; ɓàkin gàrì",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇯🇵 1️⃣ ❤️‍🔥 🧑🏿‍🚀 😀😃😄 ☺️ ☺",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # ok\n\n\nclass A(B):\n\tpass\n",
    'fn main() {\n    let s: &str = "a\\n";\n    println!("{s:?}");\n}\n',
    "for (int i=0;i<n;++i){a[i]^=b[i]<<2;}//end\n#include <x.h>\r\n",
    '{"key": [1, 2.5e-3, null, true], "ünï": "\\u00e9"}',
    '<div class="x">&amp;<!-- c --><p>1</p></div>',
    "SELECT * FROM t WHERE a='b' AND c<>3; -- x",
    "https://example.com/a?b=c&d=%20#frag user@mail.org C:\\dir\\file.txt",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- [x] done\n```py\nx\n```\n",
    "$\\frac{1}{2}\\sum_{i=0}^n x_i^2$ ∀x∈ℝ: ∃y ≤ ∞ ½ ⅷ ² ①",
    "1 12 123 1234 12345 1234567890 3.14 1,000 0x1F 1e-9 ٣٤ 二十",
    "CamelCaseWordsAndHTTPServer2000 snake_case_x kebab-case-y __init__ I'M WE'LL they'D",
    "ﬁ ǅ ſ 'ſ K Å ﷺ ẞ İ ı",
    "e\u0301 a\u0308\u0323 \u0301 \u0302\u0303 \u200d\u200c\u200b\ufeff\u2060",
    "\u0000\u0001\u0002\u0007\u0008\u000b\u000c\u001b[0m\u007f\u0080\u0085\u009f",
    "\u00a0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000",
    "\ufffd\ufffe\uffff\U0010ffff\U000e0041\ue000",
    "   ",
    "\n\n\n",
    "\t\t  \t",
    " \r\n \r\n\r",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "-----=====*****_____.....!!!!!?????",
]


def strings(count: int, seed: int = 0) -> list[str]:
    """`count` strings: pieces of the table, cut anywhere and joined with and without space, random characters and bytes."""
    rng = random.Random(seed)
    found = list(SNIPPETS)
    while len(found) < count:
        parts = []
        for _ in range(rng.randint(1, 4)):
            snippet = rng.choice(SNIPPETS)
            start = rng.randrange(len(snippet))
            parts.append(snippet[start : start + rng.randint(1, 24)])
            if rng.random() < 0.2:
                parts.append(rng.choice(" \n\t") * rng.randint(1, 9))
            if rng.random() < 0.1:
                parts.append(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])))
            if rng.random() < 0.05:
                # A file that is not UTF-8, or is cut in the middle of a character, as it is read.
                encoded = rng.choice([rng.randbytes(rng.randint(1, 9)), snippet.encode()[start + 1 : start + 12]])
                parts.append(encoded.decode("utf-8", "replace"))
        found.append(rng.choice(["", " "]).join(parts))
    return found
