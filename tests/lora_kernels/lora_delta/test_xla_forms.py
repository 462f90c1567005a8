"""What XLA makes of the gather form on a GPU that need not be there."""

import re

import jax
import pytest

from gpu_cases import Case
from lora_kernels import lora_delta, make_routing

WIDTHS = ((4096,), (4096, 1024, 1024), (14336, 14336))
TOKENS = (1, 16, 64)

LAUNCHES = {
    8: {1: (2, 2, 2), 3: (2, 2, 2), 2: (2, 2, 2)},
    16: {1: (2, 2, 2), 3: (2, 2, 3), 2: (2, 3, 2)},
    64: {1: (4, 2, 2), 3: (3, 3, 2), 2: (4, 2, 2)},
}
"""Rank -> parts -> launches for each number of `TOKENS`."""


@pytest.mark.gpu_compile
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("max_rank", LAUNCHES)
@pytest.mark.parametrize("part_widths", WIDTHS, ids=str)
def test_a_decode_site_is_few_launches_without_temporaries(
    dtype, max_rank, part_widths
):
    """Two launches at least: the shrink and the expand, gathers and addition included.

    They cannot be one. Each output column needs all of the rank-sized intermediate h,
    which is a sum over the whole of x; XLA has no fusion that makes such a sum once and
    reads it many times. h is thus the one temporary, and where XLA factors or masks it
    in launches of their own (up to two), so are the masks, a byte each.
    """
    from lora_kernels.gpu_targets.compile_only import compile_for

    def site(arguments, routing):
        call = dict(routing=routing, part_widths=part_widths, implementation="xla")
        return lora_delta(**arguments, **call)

    launches = []
    for tokens in TOKENS:
        case = Case("", tokens, max_rank, 4096, part_widths, dtype)
        arguments = case.arguments
        routing = jax.eval_shape(
            lambda slot: make_routing(slot, 8), arguments.pop("slot")
        )
        compiled = compile_for("h200", site, arguments, routing)
        entry = compiled.as_text().split("ENTRY")[1]
        found = re.findall(r"= \S+ ([\w-]+)\(", entry)
        no_launch = {"parameter", "constant", "bitcast", "get-tuple-element"}
        assert set(found) <= no_launch | {"fusion"}
        launches.append(found.count("fusion"))
        h = 4 * tokens * len(part_widths) * max_rank
        temp = compiled.memory_analysis().temp_size_in_bytes
        assert h <= temp <= h + h // 4 + 64
    assert tuple(launches) == LAUNCHES[max_rank][len(part_widths)]
