"""SamplingParams: every wrong value is refused by its name, every right one is kept."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ContextLengthError, OctavoError, ParameterError
from octavo.sampling_params import BeamSearchParams, SamplingParams

TABLE = json.loads((Path(__file__).parents[2] / "vectors" / "sampling_params.json").read_text())


def plain(value):
    """The table's notation for long lists and for floats that JSON lacks."""
    if isinstance(value, dict) and "repeat" in value:
        return [value["repeat"][0]] * value["repeat"][1]
    if isinstance(value, dict) and "range" in value:
        return {token: float(value["range"][1]) for token in range(value["range"][0])}
    if isinstance(value, dict):
        return {int(token): float(number) for token, number in value.items()}
    return float(value) if isinstance(value, str) else value


CASES = [case for case in TABLE["cases"] if "bad_word_ids" not in case and "eos_token_ids" not in case]


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case)[:100])
def test_every_edge_value_of_the_shared_table_is_granted_or_refused_by_its_name(case):
    given = {name: plain(value) for name, value in case["params"].items()}

    def validate():
        params = SamplingParams(**given)
        params.validate_for(
            case.get("vocab_size", TABLE["vocab_size"]), case.get("max_logprobs", TABLE["max_logprobs"])
        )

    if case["error"] is None:
        validate()
        return
    with pytest.raises(ParameterError) as caught:
        validate()
    assert caught.value.param == case["error"]
    assert case["error"] in str(caught.value)


INTEGERS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"]
FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
BOOLS = ["include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, False, 1.0, "1", [1], math.nan])
def test_an_integer_must_be_one_and_a_bool_is_none(name, value):
    with pytest.raises(ParameterError, match=f"^{name} must be an integer"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [True, "1", None, [1.0], 1j])
def test_a_number_must_be_real_and_a_bool_is_none(name, value):
    with pytest.raises(ParameterError, match=f"^{name} must be a number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_a_switch_must_be_a_bool(name, value):
    with pytest.raises(ParameterError, match=f"^{name} must be True or False"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens", "temperature", "ignore_eos"])
def test_what_is_not_optional_cannot_be_none(name):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: None})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 1),
        ("stop", ["x"] * 1025),
        ("bad_words", ["a", ""]),
        ("bad_words", "word"),
        ("bad_words", [["a"]]),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", {1: 2}),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: True}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: "x"}),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_wrong_lists_are_refused_by_name(name, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_numpy_numbers_are_numbers():
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]))
    assert (params.n, params.temperature, params.stop_token_ids) == (2, 0.5, [1, 2])
    assert type(params.n) is int


def test_lists_are_normalised_and_not_shared_with_the_caller():
    ids, bias = [1, 2], {1: 2}
    params = SamplingParams(stop="end", stop_token_ids=ids, logit_bias=bias, allowed_token_ids=(3,))
    ids.append(3)
    bias[5] = 1
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.allowed_token_ids) == (
        ["end"],
        [1, 2],
        {1: 2.0},
        [3],
    )
    assert SamplingParams().stop == SamplingParams().stop_token_ids == SamplingParams().bad_words == []


def test_a_clone_is_equal_and_independent():
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, seed=4)
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    copy.logit_bias[2] = 1.0
    assert params.stop == ["a"]
    assert params.logit_bias == {1: 1.0}


def test_from_optional_takes_none_for_not_given():
    params = SamplingParams.from_optional(temperature=None, top_k=None, n=2, max_tokens=None, stop=None)
    assert params == SamplingParams(n=2, max_tokens=None)
    with pytest.raises(ParameterError, match="top_q"):
        SamplingParams.from_optional(top_q=1)


def test_what_is_assigned_later_is_checked_for_the_model():
    params = SamplingParams()
    params.temperature = math.nan
    with pytest.raises(ParameterError, match="temperature"):
        params.validate_for(100)


def test_without_a_limit_of_logprobs_the_vocabulary_is_it():
    SamplingParams(logprobs=100).validate_for(100, max_logprobs=-1)
    with pytest.raises(ParameterError, match="logprobs"):
        SamplingParams(logprobs=101).validate_for(100, max_logprobs=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", True),
        ("beam_width", 1025),
        ("max_tokens", 0),
        ("temperature", -1),
        ("temperature", math.nan),
        ("length_penalty", math.inf),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
    ],
)
def test_beam_search_parameters_are_checked_by_name(name, value):
    BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(ParameterError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})
    assert caught.value.param == name


def test_errors_are_value_errors_short_and_survive_pickling():
    error = ParameterError("stop", ["x" * 1000], "short")
    assert isinstance(error, ValueError)
    assert isinstance(error, OctavoError)
    assert len(str(error)) < 150
    for one in (error, ContextLengthError(9, 8)):
        again = pickle.loads(pickle.dumps(one))
        assert (type(again), str(again), again.param) == (type(one), str(one), one.param)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.lists(st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers(), st.floats(), max_size=3),
)


def made(values):
    try:
        params = SamplingParams(**values)
        params.validate_for(1_000)
    except ParameterError as error:
        return None, error
    return params, None


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), anything, max_size=4))
def test_any_values_are_either_kept_or_refused_by_one_of_their_names(values):
    params, refused = made(values)
    if params is None:
        assert refused.param in values
        assert refused.param in str(refused)
        return
    for name in FLOATS:
        assert math.isfinite(getattr(params, name))
    assert params == params.clone()
    again = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    assert SamplingParams(**again) == params
