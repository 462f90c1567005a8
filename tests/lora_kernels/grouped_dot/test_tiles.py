"""tiles: what is chosen fits the arguments, and is what is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grouped_gpu_cases
from lora_kernels.grouped_dot import tiles

lengths = st.integers(1, 20000)
number_bytes = st.sampled_from([2, 4])

PRODUCTS = {
    product
    for case in grouped_gpu_cases.CASES
    for product in grouped_gpu_cases.products(case)
}
GRADIENTS = {
    tiles.gradient_tiles(
        d_in=case.d_in, d_out=case.d_out, number_bytes=case.number_bytes
    )
    for case in grouped_gpu_cases.CASES
}


@given(
    pairs=st.integers(1, 200_000),
    groups=st.integers(1, 256),
    summed=lengths,
    width=lengths,
    number_bytes=number_bytes,
)
def test_every_product_is_one_that_is_compiled(
    pairs, groups, summed, width, number_bytes
):
    chosen = tiles.product_tiles(
        pairs=pairs,
        groups=groups,
        summed=summed,
        width=width,
        number_bytes=number_bytes,
    )
    aligned = summed % tiles.ALIGNED == 0 and width % tiles.ALIGNED == 0
    assert (chosen, aligned, number_bytes) in PRODUCTS
    if chosen.even:
        assert summed % chosen.block_k == 0
        assert width % chosen.block_n == 0


@given(d_in=lengths, d_out=lengths, number_bytes=number_bytes)
def test_every_gradient_is_one_that_is_compiled(d_in, d_out, number_bytes):
    chosen = tiles.gradient_tiles(d_in=d_in, d_out=d_out, number_bytes=number_bytes)
    assert chosen in GRADIENTS


@pytest.mark.parametrize(
    ("pairs", "groups", "rows"),
    [(8, 64, 16), (2047, 64, 16), (2048, 64, 64), (16383, 64, 64), (16384, 64, 128)],
)
def test_row_tiles_grow_with_the_share_of_a_group(pairs, groups, rows):
    chosen = tiles.product_tiles(
        pairs=pairs, groups=groups, summed=2048, width=1024, number_bytes=2
    )
    assert chosen.block_rows == rows
