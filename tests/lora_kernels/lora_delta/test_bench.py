"""The benchmark: every form computes the op, refusals are told, results are written."""

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import TOLERANCE, expected, small
from lora_kernels.lora_delta import (
    bench,
    bench_calls,
    bench_pool,
    bench_report,
    cost,
    torch_forms,
)
from lora_kernels.lora_delta.specs import Arrays, arrays_of
from lora_kernels.lora_delta.suites import suites

PEAKS = cost.Peaks(bytes_per_s=1e10, flops_per_s=1e11)
TIMES = {"rounds": 2, "seconds": 1.0, "peaks": PEAKS}


@pytest.fixture(autouse=True)
def two_ops(monkeypatch):
    """Two argument sets and two ops a call: enough to be a chain."""
    tiny = bench_pool.Sizes(read_bytes=1, bank_bytes=2**30, sets=2, ops=2)
    monkeypatch.setattr(bench_pool, "CPU_SIZES", tiny)


def arrays_in(pool, bank=0):
    a, b = pool.banks[bank]
    fields = (pool.x, pool.y, a, b, pool.scale, pool.rank, pool.slot)
    return Arrays(*map(np.asarray, fields), weight=np.asarray(pool.routing.weight))


def test_the_least_cost_counts_active_slots_to_their_ranks_and_adapted_rows():
    spec = small(
        tokens=4, slots=3, ranks=(2, 0, 5, 1), part_widths=(10, 6), d_in=8, max_rank=9
    )
    slot = np.array([-1, 1, 1, -1], np.int32)
    # Slot 1 holds ranks 5 and 1: (8 + 10) * 5 + (8 + 6) * 1 numbers, used by two rows.
    weights = 18 * 5 + 14
    rows = 2 * (8 + 2 * 16)
    assert cost.needed(spec, slot) == (4.0 * (weights + rows), 2.0 * 2 * weights)
    assert cost.weight_bytes(spec, slot) == 4.0 * weights
    base = cost.base_cost(spec)
    assert base == (4.0 * (8 * 16 + 4 * (8 + 16)), 2.0 * 4 * 8 * 16)


def test_the_roofline_is_the_slower_of_moving_and_computing():
    assert cost.roofline_seconds(cost.Cost(2e10, 1e9), PEAKS) == 2.0
    assert cost.roofline_seconds(cost.Cost(1.0, 3e11), PEAKS) == 3.0


def test_the_peaks_are_of_many_passes_in_one_call(monkeypatch):
    monkeypatch.setattr(cost, "STREAM_BYTES", 4096)
    monkeypatch.setattr(cost, "STREAM_COLUMNS", 16)
    seen = []

    def fastest(step, carried, other, chained):
        seen.append(chained)
        assert step(carried, other).shape == carried.shape
        return 0.5

    monkeypatch.setattr(cost, "_fastest", fastest)
    monkeypatch.setattr(cost, "CPU_EFFORT", cost.Effort(edge=16, chained=3))
    peaks = cost.measured_peaks("float32")
    assert set(seen) == {3}
    # An update reads and writes, so half its time is that of a read.
    assert peaks == (3 * 4096 / 0.25, 3 * 2 * 16**3 / 0.5)


def test_a_chain_of_steps_is_timed():
    value = jnp.ones((4,))
    assert cost._fastest(lambda a, b: a + b, value, value, 2) > 0


def test_the_best_moment_is_the_peak():
    assert cost.best_of(PEAKS, cost.Peaks(2e10, 1e10)) == cost.Peaks(2e10, 1e11)


def test_points_above_the_roofline_are_told_after_the_last_peaks():
    point = bench.Point("s", "xla", 1, "float32", median_us=1.0, bytes=2e4, flops=1.0)
    (rated,) = bench.rated([point], {"float32": PEAKS})
    assert rated.roofline == pytest.approx(2.0)
    assert "above the roofline: s xla" in bench_report.closing([rated], {})
    best = cost.best_of(PEAKS, cost.Peaks(4e10, 1.0))
    (again,) = bench.rated([rated], {"float32": best})
    assert again.roofline == pytest.approx(0.5)
    assert bench_report.above_roofline([again]) == []


def test_argument_sets_differ_in_a_and_b_alone():
    spec = small(max_rank=16)
    pool = bench_pool.pool_of(spec)
    assert (len(pool.banks), pool.ops) == (2, 2)
    first, second = arrays_in(pool), arrays_in(pool, 1)
    assert [field.shape for field in first] == [f.shape for f in arrays_of(spec)]
    np.testing.assert_array_equal(first.rank, arrays_of(spec).rank)
    assert (first.a != second.a).any()
    assert (first.b != second.b).any()
    assert not first.b[0, 3:, :10].any()  # a rank tail
    assert first.b[0, :3, :10].all()


@pytest.mark.parametrize(
    ("distribution", "slots", "sets"), [("identical", 8, 6), ("distinct", 8, 2)]
)
def test_sets_are_so_many_that_what_is_read_exceeds_a_cache(distribution, slots, sets):
    spec = small(slots=slots, tokens=8, distribution=distribution, ranks=(4,))
    slot = arrays_of(spec).slot
    one = 4 * 4 * (3 * 24 + 21)  # bytes of one slot
    limit = bench_pool.Sizes(read_bytes=6 * one, bank_bytes=2**30, sets=32, ops=32)
    assert cost.weight_bytes(spec, slot) == (
        one if distribution == "identical" else 8 * one
    )
    assert bench_pool._counts(spec, slot, limit) == (sets, 32)
    assert bench_pool._counts(spec, slot, limit._replace(bank_bytes=0)) == (2, 32)
    assert bench_pool._counts(spec, slot, limit._replace(ops=2)) == (sets, sets)


@pytest.mark.parametrize(
    "name",
    [
        "xla:gather",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("reference", "xla:loop", "xla:flat", "xla:batched")
        ),
    ],
)
def test_a_chain_adds_the_update_of_every_set_to_y(name):
    spec = small(ranks=(3, 0, 8))
    pool = bench_pool.pool_of(spec)
    chain = jax.jit(
        lambda y: bench_calls.chain_of_ops(
            y, pool.x, pool.banks, pool.scale, pool.rank, pool.routing, jnp.int32(1),
            op=bench_calls.op_of(name, spec), ops=3,
        )
    )  # fmt: skip
    want = np.asarray(pool.y, np.float64)
    for bank in (0, 1, 0):
        want = expected(arrays_in(pool, bank)._replace(y=want), spec.part_widths)
    np.testing.assert_allclose(chain(pool.y), want, atol=1e-4)


def test_the_base_projection_multiplies_by_every_kernel():
    rng = np.random.default_rng(0)
    x, *kernels = (
        jnp.asarray(rng.standard_normal(s, np.float32))
        for s in [(4, 8), (8, 6), (8, 6)]
    )
    found = bench_calls.base_chain(x, jnp.zeros((4, 6)), kernels, jnp.int32(1), ops=3)
    for product, kernel in zip(found, [*kernels, kernels[0]], strict=True):
        np.testing.assert_allclose(product, x @ kernel, atol=1e-5)


@pytest.mark.gpu_compile
def test_on_a_gpu_a_call_launches_its_ops_and_copies_nothing(monkeypatch):
    from lora_kernels.gpu_targets.compile_only import compile_for

    spec = small(tokens=32, d_in=512, part_widths=(512,), ranks=(16,), dtype="bfloat16")
    pool = bench_pool.pool_of(spec)
    rest = (pool.x, pool.banks, pool.scale, pool.rank, pool.routing, jnp.int32(1))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def launches(function, *arguments, donate=()):
        compiled = compile_for("h100", function, *arguments, donate=donate)
        entry = compiled.as_text().split("ENTRY")[1]
        assert " copy(" not in entry
        return entry.count(" custom-call(") + entry.count(" fusion(")

    def chain(y, *rest):
        op = bench_calls.op_of("triton", spec)
        return bench_calls.chain_of_ops(y, *rest, op=op, ops=8)

    def base(x, y, kernels):
        return bench_calls.base_chain(x, y, kernels, jnp.int32(1), ops=8)

    assert launches(chain, pool.y, *rest, donate=(0,)) == 8
    assert launches(base, pool.x, pool.y, [jnp.ones((512, 512), jnp.bfloat16)] * 2) >= 8


def test_points_have_times_and_ratios_or_a_reason():
    spec = small(name="tiny/t23")
    names = ["reference", "xla:gather"]
    points = bench.measure(spec, names, **TIMES)
    assert [p.implementation for p in points] == [*bench.BESIDE, *names]
    for point in points:
        assert 0 < point.p10_us <= point.median_us <= point.p90_us
        assert (point.roofline is None) == (point.bytes is None)
        assert point.refusal is None
        assert point.failure is None
    assert points[0].base_ratio == 1.0
    assert points[3].ops == points[3].rounds == 2
    assert points[3].flops == cost.needed(spec, arrays_of(spec).slot).flops


def test_a_refusal_is_a_point_without_times(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (*_, point) = bench.measure(small(), ["torch_gather"], **TIMES)
    assert point.median_us is None
    assert "torch" in point.refusal
    assert point.refusal in bench_report.rows([point])


@pytest.mark.parametrize("stage", ["preparing", "running"])
def test_a_failure_is_a_point_and_the_others_go_on(stage, monkeypatch):
    calls = []

    def fail():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def prepare(name, spec, pool):
        if name != "reference":
            return real(name, spec, pool)
        if stage == "preparing":
            raise ValueError("no such tile")
        return bench.Call(fail, 1)

    real = bench_calls.prepare
    monkeypatch.setattr(bench_calls, "prepare", prepare)
    points = bench.measure(small(), ["reference", "xla"], **TIMES)
    failed, other = points[-2:]
    text = {
        "preparing": "ValueError: no such tile",
        "running": "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS",
    }[stage]
    assert (failed.failure, failed.median_us) == (text, None)
    assert f"failed: {text}" in bench_report.rows(points)
    assert other.median_us > 0


def test_without_memory_for_the_arguments_every_point_has_failed(monkeypatch):
    def fail(spec):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(bench, "pool_of", fail)
    points = bench.measure(small(), ["xla"], **TIMES)
    assert {p.failure for p in points} == {"RuntimeError: RESOURCE_EXHAUSTED"}


def test_slow_implementations_end_with_their_share_of_the_time():
    spec = small()
    points = bench.measure(spec, ["xla"], rounds=9, seconds=0.0, peaks=PEAKS)
    assert {point.rounds for point in points} == {bench.FEWEST_ROUNDS}


@pytest.mark.torch
@pytest.mark.parametrize("form", torch_forms.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forms_of_torch_compute_the_same_op(form, dtype, monkeypatch):
    import torch

    spec = small(dtype=dtype)
    pool = bench_pool.pool_of(spec)._replace(ops=1)
    kept = []
    real = torch.Tensor.clone

    def keep(tensor):
        kept.append(real(tensor))
        return kept[-1]

    monkeypatch.setattr(torch.Tensor, "clone", keep)
    torch_forms.prepare(form, spec, pool)()
    want = expected(arrays_in(pool), spec.part_widths)
    tolerance = TOLERANCE[dtype]
    if dtype == "bfloat16":  # torch rounds the intermediate and the update
        tolerance = {"atol": 6e-2, "rtol": 2e-2}
    np.testing.assert_allclose(kept[0].to(torch.float64), want, **tolerance)


@pytest.mark.torch
def test_torch_gathers_no_more_than_memory_holds(monkeypatch):
    monkeypatch.setattr(torch_forms, "MOST_GATHERED", 100)
    spec = small()
    with pytest.raises(NotImplementedError, match=r"gather \d+ bytes; at most 100"):
        torch_forms.prepare("torch_gather", spec, bench_pool.pool_of(spec))


@pytest.mark.parametrize("installed", [True, False])
def test_on_a_cpu_the_forms_of_torch_run_beside_what_is_asked(installed, monkeypatch):
    monkeypatch.setattr(torch_forms, "is_installed", lambda: installed)
    assert bench.with_torch(["xla"]) == ["xla", *(torch_forms.FORMS * installed)]
    assert sorted(bench.with_torch(["torch_groups"]))[-1] == "torch_groups"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert bench.with_torch(["xla"]) == ["xla"]


def run_command(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "suites", lambda: {"tokens": (small(name="tiny/t23"),)})
    monkeypatch.setattr(cost, "measured_peaks", lambda dtype: PEAKS)
    monkeypatch.setattr(torch_forms, "is_installed", lambda: False)
    path = tmp_path / "new" / "result.json"
    arguments = ["--suites", "tokens", "--implementations", "xla", "--rounds", "2"]
    code = bench.main([*arguments, "--json", str(path)])
    return code, json.loads(path.read_text())


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    code, result = run_command(tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    names = [*bench.BESIDE, "xla"]
    assert code == 0
    assert lines[0].split()[:2] == ["spec", "implementation"]
    assert [line.split()[1] for line in lines[1:5]] == names
    assert result["environment"]["platform"] == "cpu"
    assert "jax" in result["environment"]["versions"]
    assert result["peaks"] == {"float32": PEAKS._asdict()}
    assert result["above_roofline"] == []
    assert [p["implementation"] for p in result["points"]] == names


def test_the_command_fails_if_a_point_failed(tmp_path, monkeypatch):
    def fail(name, spec, pool):
        raise RuntimeError("broken")

    monkeypatch.setattr(bench_calls, "prepare", fail)
    code, result = run_command(tmp_path, monkeypatch)
    assert code == 1
    assert result["points"][-1]["failure"] == "RuntimeError: broken"


def test_an_empty_choice_of_specs_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--suites", "ranks", "--only", "nothing"])
    assert stopped.value.code == 2
    assert "no spec of ['ranks'] contains 'nothing'" in capsys.readouterr().err


POINTS = [
    bench.Point("square/t8", "xla", 8, median_us=4.0),
    bench.Point("square/t1", "xla", 1, median_us=2.0),
    bench.Point("square/t1", "gone", 1, refusal="no"),
]


def test_the_plot_has_a_line_for_each_implementation():
    assert bench_report.lines_of(POINTS) == {"square xla": [(1, 2.0), (8, 4.0)]}


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'lora-jax\[bench\]'"):
        bench_report.write_png(tmp_path / "plot.png", POINTS)


def test_the_plot_is_a_png_where_matplotlib_is_installed(tmp_path):
    path = tmp_path / "new" / "plot.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ImportError, match=r"lora-jax\[bench\]"):
            bench_report.write_png(path, POINTS)
        return
    bench_report.write_png(path, POINTS)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_suite_has_distinct_names():
    for specs in suites().values():
        assert len({spec.name for spec in specs}) == len(specs) > 0
