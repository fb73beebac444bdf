"""Random numbers: the same in every implementation, and random."""

import json
import math

import numpy as np
import plain_rng
import pytest
import torch

from octavo.sampling import rng

VECTORS = json.loads(plain_rng.VECTORS.read_text())


def torch_bits(seed, choice, domain, positions, tokens):
    """uint32 `[positions, tokens]`."""
    keys = torch.from_numpy(rng.slot_keys(seed, choice)[[domain]]).expand(len(positions), 4)
    return rng.mix(rng.row_keys(keys, positions), tokens.int()).numpy().view(np.uint32)


def chi_square_z(counts, expected):
    """Chi-square as a standard normal number (Wilson and Hilferty 1931): independent of the number of bins."""
    counts, expected = np.asarray(counts, float).ravel(), np.broadcast_to(expected, np.shape(counts)).ravel()
    free = counts.size - 1
    assert free > 0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


def test_the_vector_file_is_what_the_plain_implementation_writes():
    assert json.loads(json.dumps(plain_rng.vectors())) == VECTORS


@pytest.mark.parametrize(("counter", "key", "answer"), VECTORS["philox"])
def test_philox_gives_the_published_answers(counter, key, answer):
    assert list(rng.philox4x32(tuple(counter), tuple(key))) == answer


def test_bits_equal_the_vectors():
    for seed, choice, domain, position, token, bits, _ in VECTORS["rows"]:
        got = torch_bits(int(seed), choice, domain, torch.tensor([position]), torch.tensor([token]))
        assert got[0, 0] == bits


def test_exponentials_equal_the_vectors_to_float32_accuracy():
    words = np.array([row[5] for row in VECTORS["rows"]], dtype=np.uint32)
    wanted = np.array([row[6] for row in VECTORS["rows"]])
    got = rng.exponential(torch.from_numpy(words.view(np.int32))).double().numpy()
    # Near uniform = 1 float32 has no more digits; there the exponential is large and loses.
    assert np.allclose(got[wanted < 5], wanted[wanted < 5], rtol=3e-5)


def test_extreme_words_give_finite_positive_exponentials():
    words = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    got = rng.exponential(words)
    assert torch.isfinite(got).all()
    assert (got > 0).all()
    assert got[0].item() == pytest.approx(2.0**-33, rel=1e-6)


def test_negative_seeds_are_their_two_s_complement():
    assert (rng.slot_keys(-1, 0) == rng.slot_keys(2**64 - 1, 0)).all()
    assert (rng.slot_keys(-1, 0) != rng.slot_keys(1, 0)).any()


@pytest.mark.parametrize("shape", [(1, 7), (3, 49_152), (64, 1_000)])
def test_numbers_do_not_depend_on_the_shape_they_are_made_in(shape):
    rows, columns = shape
    keys = torch.from_numpy(rng.slot_keys(3, 0)[[0]]).expand(rows, 4)
    keys = rng.row_keys(keys, torch.arange(rows))
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    whole = rng.race(logits, keys, torch.arange(columns, dtype=torch.int32))
    for row in {0, rows - 1}:
        alone = rng.race(logits[[row]], keys[[row]], torch.arange(columns, dtype=torch.int32))
        assert torch.equal(alone[0], whole[row])
        few = torch.arange(row % 3, columns, 5)
        picked = rng.race(logits[[row]][:, few], keys[[row]], few.int())
        assert torch.equal(picked[0], whole[row, few])


def bits_of_requests(requests, domain=0):
    """uint32 `[requests]`: one number of each (seed, choice)."""
    keys = torch.from_numpy(np.stack([rng.slot_keys(seed, choice)[domain] for seed, choice in requests]))
    positions = torch.full((len(requests),), 3)
    return rng.mix(rng.row_keys(keys, positions), torch.tensor([17], dtype=torch.int32)).numpy().view(np.uint32)[:, 0]


MANY, SOME = 1 << 19, 1 << 13
AXES = {
    "tokens": lambda: torch_bits(1, 0, 0, torch.tensor([5]), torch.arange(MANY))[0],
    "tokens 64 apart": lambda: torch_bits(1, 0, 0, torch.tensor([5]), 64 * torch.arange(MANY))[0],
    "positions": lambda: torch_bits(1, 0, 0, torch.arange(MANY), torch.tensor([17]))[:, 0],
    "positions and tokens": lambda: torch_bits(7, 1, 2, torch.arange(MANY // 256), torch.arange(256)).ravel(),
    "choices": lambda: bits_of_requests([(9, choice) for choice in range(SOME)]),
    "seeds": lambda: bits_of_requests([(seed, 0) for seed in range(SOME)]),
    "high seeds": lambda: bits_of_requests([(seed << 32, 0) for seed in range(SOME)], domain=1),
}


@pytest.fixture(scope="module", params=AXES)
def words(request):
    return AXES[request.param]()


def test_numbers_along_each_axis_are_uniform(words):
    for shift in (0, 8, 16, 24):
        counts = np.bincount((words >> np.uint32(shift)) & 0xFF, minlength=256)
        assert abs(chi_square_z(counts, len(words) / 256)) < 4.5


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_along_each_axis_are_independent(words, lag):
    for shift in (0, 14, 28):
        nibble = (words >> np.uint32(shift)) & 0xF
        pairs = np.bincount(nibble[:-lag] * 16 + nibble[lag:], minlength=256)
        assert abs(chi_square_z(pairs, (len(words) - lag) / 256)) < 4.5
    # Each bit of the XOR of neighbours is a fair coin.
    flips = words[:-lag] ^ words[lag:]
    ones = np.array([((flips >> np.uint32(bit)) & 1).mean() for bit in range(32)])
    assert (np.abs(ones - 0.5) * 2 * math.sqrt(len(flips)) < 5).all()


def test_changing_any_one_bit_of_any_input_flips_half_of_the_bits():
    draw = np.random.default_rng(1)
    base = [
        (int(draw.integers(2**63)), int(draw.integers(8)), int(draw.integers(4)), int(draw.integers(2**20)))
        for _ in range(300)
    ]
    for name, widths in {"seed": 64, "choice": 7, "domain": 2, "position": 20, "token": 18}.items():
        for bit in range(0, widths, 3):
            flipped = 0
            for seed, choice, domain, position in base:
                one = [seed, choice, domain, position, position % 49_152]
                other = list(one)
                other[["seed", "choice", "domain", "position", "token"].index(name)] ^= 1 << bit
                flipped += bin(plain_rng.bits(*one) ^ plain_rng.bits(*other)).count("1")
            assert abs(flipped / (300 * 32) - 0.5) < 5 * 0.5 / math.sqrt(300 * 32), (name, bit)


@pytest.mark.parametrize(
    ("one", "other"),
    [((4, 0, 0), (4, 0, 1)), ((4, 0, 2), (4, 0, 3)), ((4, 0, 0), (4, 1, 0)), ((4, 0, 0), (5, 0, 0))],
    ids=["target and draft", "accept and residual", "two choices", "two seeds"],
)
def test_streams_of_the_same_place_are_uncorrelated(one, other):
    positions, tokens = torch.arange(64), torch.arange(4_096)
    a, b = (torch_bits(*stream, positions, tokens).astype(float).ravel() for stream in (one, other))
    assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)) < 4.5


def test_races_of_one_row_draw_from_the_softmax():
    logits = torch.tensor([[0.0, -1.0, -2.5, 1.5, -torch.inf, 0.3]])
    rows = 200_000
    keys = torch.from_numpy(rng.slot_keys(11, 0)[[0]]).expand(rows, 4)
    scores = rng.race(
        logits.expand(rows, -1), rng.row_keys(keys, torch.arange(rows)), torch.arange(6, dtype=torch.int32)
    )
    counts = np.bincount(scores.argmax(-1), minlength=6)
    assert counts[4] == 0
    wanted = rows * logits.double().softmax(-1)[0].numpy()
    keep = [0, 1, 2, 3, 5]
    assert abs(chi_square_z(counts[keep], wanted[keep])) < 4.5
