"""Patterns match as `re` does, and no pattern takes long."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_jax.adapters.patterns import (
    Budget,
    compile_suffix,
    compile_whole,
    first_match,
)

NAMES = [
    f"model.layers.{layer}.self_attn.{name}"
    for layer in (0, 1, 11)
    for name in ("q_proj", "xq_proj", "k_proj")
] + ["mlp_gate", "model.mlp.gate", "q_proj", "", "layers"]

KEYS = [
    "q_proj",
    "1.self_attn.q_proj",
    r"layers\.1\.self_attn\.q_proj",
    r"^model\.layers\.1\.self_attn\.q_proj",
    "mlp.gate",
    r".*\.gate",
    r"layers\.[0-3]\.self_attn\.(q|k)_proj",
    "q_proj|k_proj",
    r"layers\.\d+\.self_attn\.q_proj",
    r"(?!x)q_proj",
    r"(?=q).*",
    r"(?:.*?(?:layers|blocks).*?(?:self_attn|attn).*?(?:q_proj|k_proj).*?)",
    r"[^.]+",
    r"q_proj$",
    r"a{0,3}.q_proj",
    r"\w+_proj",
    r"[\W\d]+",
    r"\S*\s*\D",
    "^q_proj$",
    "(q|k|)+_?proj",
    "(?P<name>q)_proj",
    "",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_matches_what_peft_matches(key):
    matches = compile_suffix(key, Budget())
    expected = [re.match(rf"(.*\.)?({key})$", name) is not None for name in NAMES]
    assert [matches(name) for name in NAMES] == expected


@given(
    st.text("ab.(|)*?+{12,}[-]^$\\d", max_size=12),
    st.lists(st.text("ab.1", max_size=6), min_size=1, max_size=4),
)
def test_any_pattern_matches_as_in_re_or_is_refused(pattern, names):
    try:
        matches = compile_whole(pattern, Budget())
    except ValueError:
        return
    for name in names:
        assert matches(name) == (re.fullmatch(pattern, name) is not None), name


@pytest.mark.parametrize("pattern", ["(a|a)*b", "(((.*)*)*)*x", "(a|a)" * 40 + "b"])
def test_a_pattern_that_hangs_re_takes_no_time(pattern):
    start = time.perf_counter()
    assert not compile_suffix(pattern, Budget())("a" * 300)
    assert time.perf_counter() - start < 2.0


def test_a_pattern_of_too_many_steps_is_refused():
    nested = "(?=.*" * 8 + "x" + ")" * 8
    with pytest.raises(ValueError, match="takes more than 500000 steps"):
        compile_whole(nested, Budget(10_000))("a" * 300)


REFUSED = [
    ("(", "not a regular expression"),
    ("a)|(b", "not a regular expression"),
    (r"(a)+\1", "not supported"),
    (r"\bq(_proj)?", "word boundaries"),
    (r"(?<=a)b", "look-behind"),
    (r"(?i:a)", "inline flags"),
    ("a{5000}", "exceeds 1000"),
    ("a{2,5000}", "exceeds 1000"),
    ("a" * 10_001, "10001 characters"),
    ("(" * 5000 + ")" * 5000, "not a regular expression"),
]


@pytest.mark.parametrize(("pattern", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_bounded_is_refused(pattern, text):
    with pytest.raises(ValueError, match=text):
        compile_suffix(pattern, Budget())


def test_the_first_key_that_matches_counts():
    keys = {key: compile_suffix(key, Budget()) for key in ("q_proj", "layers.0.q_proj")}
    assert first_match(keys, "layers.0.q_proj") == "q_proj"
    assert first_match(keys, "layers.0.k_proj") is None
