"""tiles: what is chosen fits the arguments and the GPU, and is what is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_cases
from lora_kernels.gpu_targets import NAMES, Gpu, described_gpu
from lora_kernels.lora_delta import tiles

sizes = st.integers(1, 20000)
rank_axes = st.integers(1, 512)
number_bytes = st.sampled_from([2, 4])
widths = st.lists(sizes, min_size=1, max_size=4).map(tuple)
# Built in the tests, where the run-time type check may draw random numbers.
gpus = st.fixed_dictionaries(
    {
        "compute_capability": st.sampled_from([80, 86, 89, 90, 100]),
        "num_sms": st.integers(1, 200),
    }
)
problems = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, tiles.DECODE_TOKENS),
        "slots": st.integers(1, 256),
        "max_rank": rank_axes,
        "d_in": sizes,
        "part_widths": widths,
        "x_bytes": number_bytes,
        "weight_bytes": number_bytes,
    }
)
H100 = described_gpu("h100")
COMPILED = {
    gpu_cases.essence(tiles.decode_tiles(case.problem, H100))
    for case in gpu_cases.DECODE
}


@given(problem=problems, gpu=gpus)
def test_every_decode_choice_is_one_that_is_compiled(problem, gpu):
    chosen = tiles.decode_tiles(tiles.Problem(**problem), Gpu(**gpu))
    assert gpu_cases.essence(chosen) in COMPILED


@given(problem=problems, gpu=gpus)
def test_decode_tiles_fit(problem, gpu):
    problem, gpu = tiles.Problem(**problem), Gpu(**gpu)
    chosen = tiles.decode_tiles(problem, gpu)
    assert 1 <= chosen.spread
    assert chosen.programs == 2 * gpu.num_sms
    if chosen.even:
        assert problem.d_in % (chosen.warps * chosen.block_k) == 0
        assert problem.d_in % chosen.vector_k == 0
        assert all(width % chosen.block_n == 0 for width in problem.part_widths)


@given(
    tokens=st.integers(1, 20000),
    widths=widths,
    ranks=rank_axes,
    number_bytes=number_bytes,
    gpu=gpus,
)
def test_every_split_of_the_widest_part_has_columns(
    tokens, widths, ranks, number_bytes, gpu
):
    chosen = tiles.shrink_tiles(
        tokens=tokens,
        widths=widths,
        ranks=ranks,
        number_bytes=number_bytes,
        gpu=Gpu(**gpu),
    )
    assert 1 <= chosen.splits <= tiles.MOST_SPLITS
    assert chosen.k_split % chosen.block_k == 0
    assert (chosen.splits - 1) * chosen.k_split < max(widths)
    assert max(widths) <= chosen.splits * chosen.k_split


@given(
    tokens=st.integers(1, 20000),
    widths=widths,
    ranks=rank_axes,
    number_bytes=number_bytes,
)
def test_every_segment_choice_is_one_that_is_compiled(
    tokens, widths, ranks, number_bytes
):
    def kinds(tokens, widths, ranks, number_bytes):
        shrink = tiles.shrink_tiles(
            tokens=tokens,
            widths=widths,
            ranks=ranks,
            number_bytes=number_bytes,
            gpu=H100,
        )
        expand = tiles.expand_tiles(widths=widths, number_bytes=number_bytes)
        grouped = tiles.grouped_tiles(max_rank=ranks, number_bytes=number_bytes)
        return (
            (shrink.block_rank, shrink.block_k, shrink.even_k),
            (expand.block_rank, expand.block_n, expand.even_n),
            grouped,
        )

    compiled = [
        kinds(case.tokens, case.part_widths, case.max_rank, case.problem.x_bytes)
        for case in gpu_cases.PREFILL
    ]
    for kind, known in zip(
        kinds(tokens, widths, ranks, number_bytes),
        zip(*compiled, strict=True),
        strict=True,
    ):
        assert kind in known


def test_few_rows_of_a_long_prefill_are_not_split():
    chosen = tiles.shrink_tiles(
        tokens=32768, widths=(4096,), ranks=16, number_bytes=2, gpu=H100
    )
    assert chosen.splits == 1


@pytest.mark.parametrize(("d_in", "spread"), [(4096, 256), (14336, 73)])
def test_a_long_shrink_is_repeated_by_fewer_programs(d_in, spread):
    case = gpu_cases.Case("", 32, 16, d_in, (4096,), "bfloat16")
    assert tiles.decode_tiles(case.problem, H100).spread == spread


@pytest.mark.parametrize("name", NAMES)
def test_described_gpus_are_the_known_ones(name):
    gpu = described_gpu(name)
    assert (gpu.compute_capability, gpu.num_sms) == {
        "a100": (80, 108),
        "h100": (90, 132),
        "h200": (90, 132),
    }[name]


# rows, slots -> one launch, or two
@pytest.mark.parametrize(
    ("tokens", "slots", "fused"),
    [(256, 8, True), (257, 8, False), (512, 4096, True), (4097, 4096, False)],
)
def test_few_rows_or_many_slots_are_one_launch(tokens, slots, fused):
    assert tiles.is_fused(tokens=tokens, slots=slots) == fused
