"""The random numbers of docs/engine.md in plain Python integers, written from their description alone.

`python tests/unit/sampling/plain_rng.py` writes `tests/vectors/rng.json`, which the Rust and the torch implementation
must meet.
"""

import json
import math
import random
from pathlib import Path

VECTORS = Path(__file__).parents[2] / "vectors" / "rng.json"
WORD = 1 << 32

# Known answers of Philox4x32-10 published with Random123: counter, key, output.
PHILOX_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD - 1] * 4, [WORD - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox(counter, key):
    left, right = [counter[0], counter[2]], [counter[1], counter[3]]
    for turn in range(10):
        keys = [(key[0] + turn * 0x9E3779B9) % WORD, (key[1] + turn * 0xBB67AE85) % WORD]
        products = [left[0] * 0xD2511F53, left[1] * 0xCD9E8D57]
        high = [product // WORD for product in products]
        low = [product % WORD for product in products]
        left = [high[1] ^ right[0] ^ keys[0], high[0] ^ right[1] ^ keys[1]]
        right = [low[1], low[0]]
    return [left[0], right[0], left[1], right[1]]


def mix(key, word):
    x = (word + key[0]) % WORD
    x = ((x ^ (x >> 17)) * 0xED5AD4BB % WORD) ^ key[1]
    x = ((x ^ (x >> 11)) * 0xAC4C1B51 + key[2]) % WORD
    x = ((x ^ (x >> 15)) * 0x31848BAB % WORD) ^ key[3]
    return x ^ (x >> 14)


def row_key(seed, choice, domain, position):
    seed %= 1 << 64
    slot = philox([choice, domain, 0, 0], [seed % WORD, seed // WORD])
    return [mix(slot, 4 * position + lane) for lane in range(4)]


def bits(seed, choice, domain, position, token):
    return mix(row_key(seed, choice, domain, position), token)


def exponential(x):
    return -math.log1p(-(x + 0.5) / WORD)


def vectors():
    draw = random.Random(8)
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, *(draw.getrandbits(64) for _ in range(20))]
    cases = [
        (seed, choice, domain, position, token)
        for seed in seeds[:5]
        for choice in (0, 1)
        for domain in range(4)
        for position in (0, 1, 2**30 - 1)
        for token in (0, 1, 262_143)
    ]
    cases += [
        (draw.choice(seeds), draw.randrange(128), draw.randrange(4), draw.randrange(2**20), draw.randrange(2**18))
        for _ in range(1_000)
    ]
    rows = []
    for case in cases:
        x = bits(*case)
        rows.append([str(case[0]), *case[1:], x, exponential(x)])
    return {
        "columns": ["seed", "choice", "domain", "position", "token", "bits", "exponential"],
        "philox": PHILOX_ANSWERS,
        "rows": rows,
    }


if __name__ == "__main__":
    assert all(philox(counter, key) == answer for counter, key, answer in PHILOX_ANSWERS)
    content = vectors()
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    head = json.dumps({k: v for k, v in content.items() if k != "rows"})
    VECTORS.parent.mkdir(exist_ok=True)
    VECTORS.write_text(f'{head[:-1]},\n"rows": [\n{rows}\n]}}\n')
