"""What is reported: raw or processed log-probabilities, likeliest tokens, ranks, prompt scores."""

import dataclasses

import naive
import numpy as np
import pytest
import torch
from naive import Row
from test_sampler import sample

from octavo.sampling import logprobs


def test_raw_logprobs_are_the_same_whatever_the_parameters():
    logits = np.random.default_rng(2).normal(0, 3, 300)
    wanted = naive.log_softmax(logits)
    plain = Row(logits=logits, tokens=[5, 6, 7], num_logprobs=4)
    changes = [
        {},
        {"temperature": 0.1},
        {"temperature": 2.0},
        {"repetition": 2.0, "presence": 2.0},
        {"bias": {1: 50.0}, "bad_words": [[2]]},
        {"top_k": 1},
        {"grammar": [1, 2]},
    ]
    out = sample([dataclasses.replace(plain, **change) for change in changes])
    assert out.logprob_rows.tolist() == list(range(len(changes)))
    likeliest = np.argsort(-wanted)[:4]
    for i in range(len(changes)):
        token = out.token_ids[i, 0].item()
        assert out.logprobs.token_ids[i].tolist() == [token, *likeliest]
        assert out.logprobs.logprobs[i].numpy() == pytest.approx(wanted[[token, *likeliest]], abs=1e-5)
        assert out.logprobs.ranks[i] == 1 + (wanted > wanted[token]).sum()


def test_processed_logprobs_are_of_the_distribution_that_was_drawn_from():
    logits = np.random.default_rng(2).normal(0, 3, 300)
    for change in ({"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.5, "bias": {3: 4.0}}, {"repetition": 3.0}):
        row = Row(logits=logits, tokens=[5, 6, 7], num_logprobs=300, **change)
        out = sample([row], logprobs_mode="processed").logprobs
        wanted = naive.log_softmax(naive.processed(row))
        assert out.logprobs[0].numpy() == pytest.approx(wanted[out.token_ids[0].numpy()], abs=1e-4)
        assert (np.diff(out.logprobs[0, 1:].numpy()[np.isfinite(out.logprobs[0, 1:].numpy())]) <= 0).all()


def test_only_rows_that_ask_are_reported_and_the_widest_decides_the_width():
    asking = [Row(logits=[1.0, 2.0, 3.0], num_logprobs=count) for count in (0, -1, 2, -1)]
    out = sample(asking)
    assert out.logprob_rows.tolist() == [0, 2]
    assert out.logprobs.token_ids.shape == (2, 3)
    assert sample(asking[1::2]).logprobs is None


def test_equal_logits_are_listed_by_rising_id_and_share_a_rank():
    values = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, -torch.inf, -2.0]])
    assert logprobs.likeliest(values, 8).tolist() == [[1, 2, 5, 0, 3, 4, 7, 6]]
    report = logprobs.gather_logprobs(values, torch.tensor([5]), 1)
    assert report.ranks.tolist() == [1]
    assert logprobs.gather_logprobs(values, torch.tensor([4]), 0).ranks.tolist() == [5]
    assert logprobs.gather_logprobs(values, torch.tensor([4]), 0).token_ids.tolist() == [[4]]


def test_positions_with_drafts_are_reported_each():
    draw = np.random.default_rng(3)
    rows = [Row(logits=draw.normal(0, 1, (3, 20)), drafts=[1, 2], num_logprobs=n, seed=n + 1) for n in (-1, 2)]
    out = sample(rows)
    assert out.logprobs.token_ids.shape == (3, 3)
    assert out.logprobs.token_ids[:, 0].tolist() == out.token_ids[1].tolist()
    for j in range(3):
        wanted = naive.log_softmax(rows[1].logits[j])
        assert out.logprobs.logprobs[j].numpy() == pytest.approx(wanted[out.logprobs.token_ids[j].numpy()], abs=1e-5)


@pytest.mark.parametrize("tile", [1, 7, 64, 10_000])
def test_prompt_logprobs_are_the_same_in_any_tiles_and_see_no_more_rows_than_one(monkeypatch, tile):
    monkeypatch.setattr(logprobs, "_TILE_ELEMENTS", tile * 50)
    logits = torch.randn(100, 53, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(100) % 50
    seen = []

    def part(start, stop):
        seen.append(stop - start)
        return logits[start:stop]

    report = logprobs.prompt_logprobs(part, targets, 3, 50)
    assert max(seen) <= tile
    assert sum(seen) == 100
    for i in range(100):
        wanted = naive.log_softmax(logits[i, :50].numpy())
        ids = [i % 50, *np.argsort(-wanted)[:3]]
        assert report.token_ids[i].tolist() == ids
        assert report.logprobs[i].numpy() == pytest.approx(wanted[ids], abs=1e-5)
        assert report.ranks[i] == 1 + (wanted > wanted[i % 50]).sum()
