"""The batched sampler against one row at a time in float64; and what users may rely on."""

import dataclasses

import naive
import numpy as np
import pytest
import torch
from naive import Row
from test_rng import chi_square_z

from octavo.sampling import Sampler


def sample(rows, vocab_size=None, slots=None, **settings):
    vocab_size = vocab_size or rows[0].logits.shape[1]
    logits, sample_rows, params = naive.batch(rows, vocab_size, slots)
    return Sampler(vocab_size, **settings)(logits, sample_rows, params)


def drawn(rows, **settings):
    """The first token of each row, `None` for a row that failed."""
    out = sample(rows, **settings)
    return [t if c > 0 else None for t, c in zip(out.token_ids[:, 0].tolist(), out.num_sampled.tolist(), strict=True)]


def random_row(draw, vocab_size, drafts=0):
    """Any mixture of parameters; logits with many ties, as bf16 heads have them."""

    def maybe(value, otherwise, chance=0.35):
        return value if draw.random() < chance else otherwise

    def some(most, least=1):
        return draw.integers(0, vocab_size, draw.integers(least, most + 1)).tolist()

    tokens = some(40, 2)
    outputs = tokens[(prompt_len := int(draw.integers(1, len(tokens) + 1))) :]
    words = [some(3) for _ in range(3)]
    if outputs:
        words.append([*outputs[-int(draw.integers(1, 4)) :], int(draw.integers(vocab_size))])
    logits = draw.normal(0, draw.choice([0.3, 3, 10]), (1 + drafts, vocab_size))
    return Row(
        logits=np.round(logits, 1) if draw.random() < 0.5 else logits,
        tokens=tokens,
        prompt_len=prompt_len,
        seed=int(draw.integers(2**63)),
        choice=int(draw.integers(4)),
        temperature=float(draw.choice([0, 1e-8, 0.2, 0.7, 1, 2])),
        top_k=maybe(int(draw.choice([1, 2, 5, 50, 2_000, 10**6])), 0),
        top_p=maybe(float(np.float32(draw.choice([1e-6, 0.3, 0.9, 0.999]))), 1.0),
        min_p=maybe(float(np.float32(draw.choice([0.001, 0.1, 1]))), 0.0),
        presence=maybe(float(draw.uniform(-2, 2)), 0.0),
        frequency=maybe(float(draw.uniform(-2, 2)), 0.0),
        repetition=maybe(float(draw.uniform(0.5, 2)), 1.0),
        min_tokens=maybe(int(draw.integers(40)), 0),
        stop_ids=some(4),
        bias=maybe({token: float(draw.choice([-100, -3, 2, 100])) for token in some(8)}, {}),
        bad_words=maybe(words, []),
        allowed=maybe(some(vocab_size // 2), [], 0.2),
        grammar=maybe(some(vocab_size), None, 0.2),
        drafts=[int(token) for token in draw.integers(0, vocab_size, draw.integers(drafts + 1))],
        num_logprobs=maybe(int(draw.integers(6)), -1),
    )


def assert_token_is_naive(row, index, token):
    """`token` has the best naive score, but for float32 rounding, or the naive sampler has none at all."""
    scores = naive.scores(row, index)
    assert scores[token] > -np.inf
    assert scores[token] >= scores.max() - 2e-4 * max(1, abs(scores.max()))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("vocab_size", [40, 300, 2_500])
def test_each_row_of_a_random_batch_gets_what_the_naive_sampler_gives(seed, vocab_size):
    draw = np.random.default_rng([seed, vocab_size])
    rows = [random_row(draw, vocab_size) for _ in range(8)]
    for row, token in zip(rows, drawn(rows), strict=True):
        if naive.processed(row) is None:
            assert token is None
        else:
            assert_token_is_naive(row, 0, token)


@pytest.mark.parametrize("seed", range(25))
def test_each_position_with_drafts_gets_what_the_naive_sampler_gives(seed):
    draw = np.random.default_rng([seed, 1])
    rows = [random_row(draw, 60, drafts=3) for _ in range(8)]
    for row in rows[::2]:  # drafts that are right: what the target will draw
        for j in range(len(row.drafts)):
            if (scores := naive.scores(row, j)) is not None:
                row.drafts[j] = int(scores.argmax())
    out = sample(rows)
    for row, tokens, count in zip(rows, out.token_ids.tolist(), out.num_sampled.tolist(), strict=True):
        if count == -1:
            assert naive.processed(row) is None
            continue
        for j in range(count):
            assert_token_is_naive(row, j, tokens[j])
        assert tokens[: count - 1] == row.drafts[: count - 1]
        if count <= len(row.drafts) and naive.processed(row, count - 1) is not None:
            following = naive.processed(row, count)
            assert tokens[count - 1] != row.drafts[count - 1] or following is None


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("vocab_size", [40, 2_500])
def test_a_row_s_result_depends_on_nothing_else_in_the_batch(mode, vocab_size):
    draw = np.random.default_rng(vocab_size)
    rows = [random_row(draw, vocab_size) for _ in range(40)]
    for row in rows:
        row.num_logprobs = 3
    slots = draw.permutation(100)[: len(rows)].tolist()
    together = sample(rows, slots=slots, logprobs_mode=mode)
    for i, row in enumerate(rows):
        alone = sample([row], logprobs_mode=mode)
        assert alone.num_sampled[0] == together.num_sampled[i]
        assert torch.equal(alone.token_ids[0], together.token_ids[i])
        assert torch.equal(alone.logprobs.token_ids[0], together.logprobs.token_ids[i])
        assert torch.equal(alone.logprobs.ranks[0], together.logprobs.ranks[i])
        assert torch.equal(alone.logprobs.logprobs[0].nan_to_num(7), together.logprobs.logprobs[i].nan_to_num(7))


def fake_model(tokens, vocab_size=500):
    """Logits that depend on the last two tokens only."""
    return np.random.default_rng(tokens[-2:]).normal(0, 2, vocab_size)


def generate(rows, count):
    """Lets all rows run together for `count` tokens; returns the outputs of the first."""
    rows = [dataclasses.replace(row, tokens=list(row.tokens)) for row in rows]
    for _ in range(count):
        rows = [dataclasses.replace(row, logits=fake_model(row.tokens)) for row in rows]
        for row, token in zip(rows, drawn(rows), strict=True):
            row.tokens.append(token)
    return rows[0].tokens[rows[0].prompt_len :]


def test_a_seeded_request_gives_the_same_tokens_alone_and_among_seeded_or_unseeded_ones():
    row = Row(logits=[0] * 500, tokens=[1, 2], prompt_len=2, seed=42, temperature=0.8)
    others = [dataclasses.replace(row, seed=seed, tokens=[seed, 3]) for seed in range(8)]
    greedy = [dataclasses.replace(other, temperature=0, top_k=3) for other in others]
    alone = generate([row], 16)
    assert generate([row, *others], 16) == alone
    assert generate([row, *greedy, *others], 16) == alone
    assert generate([dataclasses.replace(row, seed=43)], 16) != alone
    assert generate([dataclasses.replace(row, choice=1)], 16) != alone


def test_verifying_right_and_wrong_drafts_gives_the_tokens_of_sampling_one_by_one():
    row = Row(logits=[0] * 500, tokens=[1, 2], prompt_len=2, seed=5, temperature=0.9, top_p=0.9, presence=0.5)
    wanted = generate([row], 12)
    for right in range(4):
        drafts = [*wanted[:right], *((token + 1) % 500 for token in wanted[right:3])]
        known = row.tokens + drafts
        logits = np.stack([fake_model(known[: 2 + j]) for j in range(4)])
        out = sample([dataclasses.replace(row, logits=logits, drafts=drafts)])
        assert out.num_sampled.tolist() == [right + 1]
        assert out.token_ids[0, : right + 1].tolist() == wanted[: right + 1]


DISTRIBUTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.95},
    "min-p": {"min_p": 0.02},
    "all filters": {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence": 1.0, "frequency": 0.5, "repetition": 1.5},
    "bias": {"bias": {3: 2.0, 5: -100.0}},
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_over_seeds_and_choices_follow_the_processed_distribution(name):
    logits = np.random.default_rng(3).normal(0, 1.5, 12)
    base = Row(logits=logits, tokens=[3, 4, 4, 2], prompt_len=2, **DISTRIBUTIONS[name])
    rows = [dataclasses.replace(base, seed=seed) for seed in range(2_000)]
    logits, sample_rows, params = naive.batch(rows, 12)
    counts = np.zeros(12)
    for choice in range(4):
        for slot, row in enumerate(rows):
            params.set(naive.Entry(dataclasses.replace(row, choice=choice), slot))
        out = Sampler(12)(logits.clone(), sample_rows, params)
        counts += np.bincount(out.token_ids[:, 0], minlength=12)
    wanted = np.exp(naive.log_softmax(naive.processed(base))) * counts.sum()
    assert counts[wanted == 0].sum() == 0
    assert abs(chi_square_z(counts[wanted > 0], wanted[wanted > 0])) < 4.5


def kept(row):
    """The set of tokens that can be drawn."""
    out = sample([dataclasses.replace(row, num_logprobs=row.logits.shape[1])], logprobs_mode="processed")
    ids, values = out.logprobs.token_ids[0, 1:], out.logprobs.logprobs[0, 1:]
    return set(ids[values > -torch.inf].tolist())


def test_bias_comes_before_penalties():
    # The bias makes the first logit 4, which the penalty divides to 0.5; the other order would give -3.
    row = Row(logits=[-1.0, 0.4], tokens=[0], bias={0: 5.0}, repetition=8.0, temperature=0)
    assert drawn([row]) == [0]
    assert drawn([dataclasses.replace(row, logits=[-1.0, 0.6])]) == [1]


def test_bans_come_after_bias_and_penalties():
    row = Row(logits=[0.0, 1.0, 2.0], bias={2: 100.0}, bad_words=[[2]], presence=-2.0, temperature=0)
    assert drawn([row]) == [1]


def test_temperature_comes_before_top_p():
    logits = np.log([0.6, 0.3, 0.1])
    assert kept(Row(logits=logits, top_p=0.59)) == {0}
    assert kept(Row(logits=logits, top_p=0.59, temperature=5.0)) == {0, 1}


def test_top_k_comes_before_top_p_which_sees_renormalised_probabilities():
    logits = np.log([0.4, 0.2, 0.2 - 1e-4, 0.1, 0.1 + 1e-4])
    assert kept(Row(logits=logits, top_p=0.62)) == {0, 1, 2}
    assert kept(Row(logits=logits, top_p=0.62, top_k=2)) == {0}
    assert kept(Row(logits=logits, top_p=0.7, top_k=2)) == {0, 1}


def test_min_p_comes_after_temperature():
    logits = np.log([0.8, 0.15, 0.05])
    assert kept(Row(logits=logits, min_p=0.3)) == {0}
    assert kept(Row(logits=logits, min_p=0.3, temperature=3.0)) == {0, 1, 2}


def test_tokens_of_equal_logits_stay_or_go_together():
    logits = [3.0, 1.0, 1.0, 1.0, 0.0]
    assert kept(Row(logits=logits, top_k=2)) == {0, 1, 2, 3}
    assert kept(Row(logits=logits, top_p=0.8)) == {0, 1, 2, 3}


@pytest.mark.parametrize("ties", [1_500, 3_000])
def test_filters_look_beyond_the_leading_values_of_a_large_vocabulary(ties):
    logits = np.full(4_000, -5.0)
    logits[:ties] = 1.0
    assert kept(Row(logits=logits, top_k=3)) == set(range(ties))
    assert kept(Row(logits=logits, top_p=0.5)) == set(range(ties))
    assert kept(Row(logits=logits, min_p=0.5)) == set(range(ties))
    ramp = np.linspace(0, -1, 4_000)
    assert len(kept(Row(logits=ramp, top_k=2_345))) == 2_345


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6])
def test_temperatures_below_the_epsilon_are_greedy(temperature):
    draw = np.random.default_rng(0)
    for _ in range(20):
        logits = draw.normal(0, 1, 100)
        assert drawn([Row(logits=logits, temperature=temperature, top_p=0.9)]) == [logits.argmax()]


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 1e-5},
        {"temperature": 1e-4},
        {"temperature": 1e6},
        {"top_p": 1e-6},
        {"top_k": 10**6},
        {"top_k": 1},
        {"min_p": 1.0},
        {"repetition": 1e-9},
        {"repetition": 1e9},
        {"temperature": 1e6, "repetition": 1e9, "top_p": 1e-6, "top_k": 1, "min_p": 1.0},
    ],
)
def test_edge_values_have_their_exact_meaning(edge):
    logits = np.random.default_rng(4).normal(0, 5, 200)
    for seed in range(10):
        row = Row(logits=logits, tokens=[1, 2, 3], prompt_len=2, seed=seed, **edge)
        token = drawn([row])[0]
        assert token is not None
        assert_token_is_naive(row, 0, token)


def test_greedy_takes_the_lower_id_of_equals():
    assert drawn([Row(logits=[0, 2, 1, 2], temperature=0)]) == [1]


def test_presence_and_frequency_count_outputs_and_repetition_counts_the_prompt_too():
    logits = np.array([1.0, 2.0, 3.0])
    prompt_only = Row(logits=logits, tokens=[2, 2], prompt_len=2, temperature=0, num_logprobs=3)

    def values(**change):
        out = sample([dataclasses.replace(prompt_only, **change)], logprobs_mode="processed").logprobs
        return dict(zip(out.token_ids[0].tolist(), out.logprobs[0].tolist(), strict=True))

    neutral = values()
    assert values(presence=2.0) == neutral
    assert values(frequency=2.0) == neutral
    # (Presence is subtracted once, frequency each time.)
    for change, wanted in [
        ({"repetition": 2.0}, [1.0, 2.0, 1.5]),
        ({"presence": 2.0, "prompt_len": 1}, [1.0, 2.0, 1.0]),
        ({"presence": 2.0, "tokens": [0, 2, 2, 2], "prompt_len": 1}, [1.0, 2.0, 1.0]),
        ({"frequency": 0.5, "tokens": [0, 2, 2, 2], "prompt_len": 1}, [1.0, 2.0, 1.5]),
        ({"presence": -1.0, "frequency": 0.5, "tokens": [0, 2, 2, 1], "prompt_len": 1}, [1.0, 2.5, 3.0]),
    ]:
        got = values(**change)
        assert [got[token] for token in range(3)] == pytest.approx(naive.log_softmax(wanted), abs=1e-6)


def test_a_bias_of_minus_100_never_emits_and_of_plus_100_always_does():
    logits = np.random.default_rng(1).normal(0, 5, 50)
    best = int(logits.argmax())
    rows = [Row(logits=logits, seed=seed, temperature=2.0, bias={best: -100.0}) for seed in range(500)]
    assert best not in drawn(rows)
    rows = [Row(logits=logits, seed=seed, temperature=2.0, bias={7: 100.0}) for seed in range(500)]
    assert set(drawn(rows)) == {7}


def test_a_row_without_a_token_fails_alone():
    fine = Row(logits=[1.0, 2.0, 0.0], temperature=0)
    for broken in (
        dataclasses.replace(fine, logits=[1.0, np.nan, 0.0]),
        dataclasses.replace(fine, logits=[np.nan] * 3, temperature=1.0, top_k=2, top_p=0.5),
        dataclasses.replace(fine, logits=[1.0, np.inf, 0.0], temperature=1.0),
        dataclasses.replace(fine, logits=[-np.inf] * 3, temperature=1.0),
        dataclasses.replace(fine, allowed=[1], bad_words=[[1]], temperature=1.0, top_p=0.9),
        dataclasses.replace(fine, grammar=[], temperature=1.0),
        dataclasses.replace(fine, allowed=[2], stop_ids=[2], min_tokens=1),
    ):
        assert drawn([fine, broken, fine]) == [1, None, 1]


def test_min_tokens_bans_every_stop_id_and_counts_outputs_only():
    row = Row(logits=[9.0, 8.0, 0.0], stop_ids=[0, 1], min_tokens=8, tokens=[2] * 40, prompt_len=40, temperature=0)
    for outputs in range(10):
        now = dataclasses.replace(row, tokens=[2] * (40 + outputs))
        assert drawn([now]) == [2 if outputs < 8 else 0]


def test_a_bias_towards_a_banned_stop_id_does_not_lift_min_tokens():
    row = Row(logits=[0.0, 1.0], stop_ids=[0], min_tokens=2, bias={0: 100.0}, temperature=0)
    assert drawn([row]) == [1]


def test_bad_words_are_banned_only_when_outputs_complete_them():
    row = Row(logits=[0.0, 1.0, 2.0, 3.0], temperature=0, bad_words=[[1, 2, 3]])
    for tokens, prompt_len, wanted in [
        ([0, 1, 2], 1, 2),
        ([0, 2], 1, 3),
        ([0, 2, 1], 1, 3),
        ([1, 2], 1, 3),  # the first token of the word is the prompt's
        ([0, 1, 2, 3, 1, 2], 1, 2),
    ]:
        assert drawn([dataclasses.replace(row, tokens=tokens, prompt_len=prompt_len)]) == [wanted]
    assert drawn([dataclasses.replace(row, bad_words=[[3], [0, 2]])]) == [2]


def test_only_allowed_tokens_are_drawn():
    rows = [Row(logits=np.zeros(30), allowed=[3, 29], seed=seed) for seed in range(200)]
    free = [Row(logits=np.zeros(30), seed=seed) for seed in range(200)]
    tokens = drawn(rows + free)
    assert set(tokens[:200]) == {3, 29}
    assert len(set(tokens[200:])) > 20


def test_grammar_masks_hold_for_their_rows_only():
    one = Row(logits=np.arange(70.0), grammar=[0, 31, 32, 63], temperature=0)
    two = Row(logits=np.arange(70.0), temperature=0)
    assert drawn([one, two, dataclasses.replace(one, grammar=[69])]) == [63, 69, 69]


def test_a_slot_that_is_taken_again_or_cleared_keeps_nothing():
    row = Row(
        logits=np.arange(5.0), temperature=0, bias={4: -100.0}, bad_words=[[3]], allowed=[0, 3, 4], num_logprobs=2
    )
    logits, rows, params = naive.batch([row], 5)
    assert Sampler(5)(logits.clone(), rows, params).token_ids.tolist() == [[0]]
    plain = Row(logits=row.logits, temperature=0, allowed=[2])
    params.set(naive.Entry(plain, 0))
    assert Sampler(5)(logits.clone(), rows, params).token_ids.tolist() == [[2]]
    params.clear(0)
    params.set(naive.Entry(Row(logits=row.logits, temperature=0), 0))
    assert Sampler(5)(logits.clone(), rows, params).token_ids.tolist() == [[4]]


def test_columns_beyond_the_vocabulary_are_padding():
    logits, rows, params = naive.batch([Row(logits=[1.0, 0.0, 9.0, 9.0], temperature=0)], 4)
    assert Sampler(2)(logits, rows, params).token_ids.tolist() == [[0]]
