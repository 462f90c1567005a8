"""What XLA makes of the gather form on a GPU that need not be there."""

import re

import jax
import jax.numpy as jnp
import pytest

from lora_kernels import lora_delta, make_routing

SLOTS, RANK, D_IN = 8, 16, 4096


@pytest.mark.gpu_compile
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("part_widths", [(4096,), (4096, 1024, 1024), (14336, 14336)])
def test_a_decode_site_is_few_launches_without_temporaries(tokens, part_widths):
    from lora_kernels.gpu_targets.compile_only import compile_for

    def site(x, y, a, b, scale, rank, routing):
        return lora_delta(
            x, y, a, b, scale=scale, rank=rank, routing=routing,
            part_widths=part_widths, implementation="xla",
        )  # fmt: skip

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    parts, d_out = len(part_widths), sum(part_widths)
    compiled = compile_for(
        "h100",
        site,
        shape(tokens, D_IN),
        shape(tokens, d_out),
        shape(SLOTS, parts, RANK, D_IN),
        shape(SLOTS, RANK, d_out),
        shape(SLOTS, parts, dtype=jnp.float32),
        shape(SLOTS, parts, dtype=jnp.int32),
        jax.eval_shape(
            lambda slot: make_routing(slot, SLOTS), shape(tokens, dtype=jnp.int32)
        ),
    )
    entry = compiled.as_text().split("ENTRY")[1]
    launches = re.findall(r"= \S+ (fusion|custom-call|copy|dot|while|sort)\(", entry)
    # XLA sometimes scales the rank-sized intermediate in a launch of its own.
    assert launches in (["fusion"] * 2, ["fusion"] * 3)
    intermediate = 4 * tokens * parts * RANK  # float32; the rest is flags of rows
    assert compiled.memory_analysis().temp_size_in_bytes <= intermediate + 4096
