"""tiles: what is chosen fits the arguments and the GPU, and is what is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_cases
from lora_kernels.gpu_targets import NAMES, Gpu, described_gpu, description
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
        "mixed": st.booleans(),
    }
).map(
    lambda facts: (
        facts | {"mixed": facts["mixed"] or facts["x_bytes"] != facts["weight_bytes"]}
    )
)
H100 = described_gpu("h100")


def decode_kind(problem, gpu, vector_rows):
    """What the code of the fused kernel depends on."""
    chosen = tiles.decode_tiles(problem, gpu, vector_rows=vector_rows)
    return problem.x_bytes, problem.weight_bytes, gpu_cases.essence(chosen)


VECTOR_ROWS = [1, 0]
"""Of `triton`, and of `triton_invariant`."""

COMPILED = {
    decode_kind(case.problem, H100, vector_rows)
    for case in gpu_cases.DECODE + gpu_cases.DECODE_MIXED
    for vector_rows in VECTOR_ROWS
}


@pytest.mark.parametrize("vector_rows", VECTOR_ROWS)
@given(problem=problems, gpu=gpus)
def test_every_decode_choice_is_one_that_is_compiled(vector_rows, problem, gpu):
    kind = decode_kind(tiles.Problem(**problem), Gpu(**gpu), vector_rows)
    assert kind in COMPILED


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


def segment_kinds(problem):
    """What the code of each kernel of the segment form depends on, and its backward's.

    Forward, a shrink has the ranks of all parts and an expand those of one; backward it
    is the other way round.
    """
    wider = max(problem.x_bytes, problem.weight_bytes)
    for_all = (problem.d_in,), len(problem.part_widths) * problem.max_rank
    for_each = problem.part_widths, problem.max_rank
    for shared, (widths, ranks) in ((True, for_all), (False, for_each)):
        shrink = tiles.shrink_tiles(
            tokens=problem.tokens,
            widths=widths,
            ranks=ranks,
            number_bytes=wider,
            gpu=H100,
        )
        expand = tiles.expand_tiles(widths=widths, number_bytes=problem.weight_bytes)
        yield "shrink", shared, shrink.block_rank, shrink.block_k, shrink.even_k
        yield "expand", shared, expand.block_rank, expand.block_n, expand.even_n
        yield (
            "grouped",
            shared,
            tiles.grouped_tiles(
                max_rank=problem.max_rank, number_bytes=problem.x_bytes
            ),
        )


@given(problem=problems)
def test_every_segment_choice_is_one_that_is_compiled(problem):
    problem = tiles.Problem(**problem)
    numbers = (problem.x_bytes, problem.weight_bytes)
    compiled = {
        kind
        for case in gpu_cases.PREFILL + gpu_cases.PREFILL_MIXED
        if (case.problem.x_bytes, case.problem.weight_bytes) == numbers
        for kind in segment_kinds(case.problem)
    }
    assert set(segment_kinds(problem)) <= compiled


def test_an_h100_has_the_tiles_and_limits_of_an_h200():
    def without_memory(name):
        lines = description(name).splitlines()
        other = ("memory_bandwidth", "device_memory_size", "device_description_str")
        return [line for line in lines if not line.strip().startswith(other)]

    assert without_memory("h100") == without_memory("h200")
    h200 = described_gpu("h200")
    assert h200 == H100
    assert h200.shared_memory == H100.shared_memory
    for case in gpu_cases.DECODE + gpu_cases.DECODE_MIXED:
        problem = case.problem
        assert tiles.decode_tiles(problem, h200) == tiles.decode_tiles(problem, H100)


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
