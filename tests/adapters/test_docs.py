"""The guide's tables name every kind and every format that the code has."""

from pathlib import Path
from typing import get_args

import pytest

from lora_jax.adapters.adapter import ACTIVATED
from lora_jax.adapters.formats import FORMATS
from lora_jax.adapters.parts import AdapterPart

GUIDE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
KINDS = [part.kind for part in get_args(AdapterPart)] + [ACTIVATED]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_row(kind):
    assert f"| `{kind}` |" in GUIDE


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_every_format_has_a_row(name):
    assert f"| {name}" in GUIDE
