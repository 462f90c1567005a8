"""Request values."""

import pytest

from lora_jax.errors import RequestError
from lora_jax.serving.requests import SamplingParams


def test_every_bad_option_is_named_at_once():
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature=-1.0, top_k=-2, top_p=0.0, seed=-1)
    text = str(error.value)
    for word in ("temperature -1.0", "top_k -2", "top_p 0.0", "seed -1"):
        assert word in text


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"seed": 2**32},
    ],
)
def test_a_value_out_of_range_is_refused(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)
