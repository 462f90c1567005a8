"""Values and products too large for a dtype are found, and no others."""

import ml_dtypes
import numpy as np
import pytest

from adapter_files import PREFIX, UP, Q, config, pair
from lora_jax.adapters import adapter_from_tensors
from lora_jax.adapters.overflow import product_overflows, value_overflows
from lora_jax.errors import AdapterError

HALF = np.dtype(np.float16)


def tensors(factor, dtype="float32"):
    made = pair(Q, 4) | pair(UP, 4)
    made[f"{PREFIX}{Q}.lora_A.weight"] = made[f"{PREFIX}{Q}.lora_A.weight"] * factor
    return {name: array.astype(dtype) for name, array in made.items()}


def test_values_that_float16_cannot_hold_are_named():
    adapter = adapter_from_tensors(tensors(1e6), config(), name="a")
    (fault,) = value_overflows(adapter.parts, HALF)
    assert fault.startswith(f"{Q}: lora.a has values up to")
    assert "float16 holds 6.55e+04 at most" in fault
    assert value_overflows(adapter.parts, np.dtype(ml_dtypes.bfloat16)) == []


@pytest.mark.parametrize("factor", [1.0, 1e4, 4e4])
def test_a_product_is_told_exactly_as_it_overflows(factor):
    part = adapter_from_tensors(tensors(factor), config(), name="a").parts[Q]
    overflows = np.abs(part.scale * part.b @ part.a).max() > 65504
    assert (product_overflows(part, HALF) is not None) == overflows


def test_a_float16_file_whose_product_overflows_is_refused_by_name():
    with pytest.raises(AdapterError, match=rf"{Q}: scale \* B A has values up to"):
        adapter_from_tensors(tensors(5e4, "float16"), config(), name="a")
    passed = adapter_from_tensors(
        tensors(5e4, "float16"), config(), name="a", allow_nonfinite=True
    )
    assert passed.rank == 4


def test_a_wider_file_may_have_a_large_product():
    assert adapter_from_tensors(tensors(5e4), config(), name="a").rank == 4
