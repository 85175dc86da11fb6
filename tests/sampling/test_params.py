from __future__ import annotations

import json
import math

import pytest

from mlxgen.errors import InvalidValueError
from mlxgen.sampling import SamplingParams


def test_defaults_are_greedy_and_valid() -> None:
    params = SamplingParams()
    params.validate(10)
    assert params.greedy


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.1 + 0.2, top_p=1 / 3, top_k=40, min_p=1e-17, seed=2**64 - 1),
        SamplingParams(logit_bias={0: -1 / 3, 99: 5.0}, repetition_penalty=1.1, frequency_penalty=-0.3),
        SamplingParams(xtc_probability=0.5, xtc_threshold=0.07, presence_penalty=0.7, presence_context_size=3),
    ],
)
def test_json_round_trip_is_exact(params: SamplingParams) -> None:
    restored = SamplingParams.from_json(json.loads(json.dumps(params.to_json())))
    assert restored == params
    assert restored.logit_bias is None or all(type(key) is int for key in restored.logit_bias)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 1e30),
        ("temperature", 10**400),
        ("temperature", 1e-40),
        ("temperature", True),
        ("temperature", "0.7"),
        ("top_p", 1.1),
        ("top_p", -1e-9),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 101),
        ("top_k", 4.0),
        ("top_k", 10**4000),
        ("min_p", 1.5),
        ("min_tokens_to_keep", 0),
        ("min_tokens_to_keep", 101),
        ("xtc_probability", 2),
        ("xtc_threshold", 0.6),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e9),
        ("repetition_penalty", math.nan),
        ("repetition_context_size", 0),
        ("repetition_context_size", -5),
        ("repetition_context_size", 1 << 40),
        ("presence_penalty", math.inf),
        ("presence_context_size", 2.5),
        ("frequency_penalty", -1e6),
        ("frequency_context_size", None),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: 1e300}),
        ("logit_bias", {3: None}),
        ("logit_bias", [1, 2]),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_values_outside_their_limits_are_refused_with_the_name_and_a_limit(name: str, value: object) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{name: value}).validate(100)  # type: ignore[arg-type]
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    "data", [None, [], "x", {"temp": 1.0}, {"logit_bias": [1]}, {"logit_bias": {"x": 1.0}}, {"logit_bias": {"²": 1.0}}]
)
def test_foreign_json_is_refused(data: object) -> None:
    with pytest.raises(InvalidValueError):
        SamplingParams.from_json(data)


def test_a_missing_seed_is_drawn_and_a_given_one_kept() -> None:
    drawn = {SamplingParams(temperature=1.0).with_seed().seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(seed is not None and 0 <= seed < 2**64 for seed in drawn)
    assert SamplingParams(seed=5).with_seed().seed == 5


def test_the_bias_is_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
