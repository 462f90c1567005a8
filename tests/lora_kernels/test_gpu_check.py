"""The script for a real card, as far as a machine without one can run it."""

import dataclasses
import json
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import gpu_check
import gpu_numbers
from lora_kernels.lora_delta import backward, bench, bench_calls, bench_pool, cost
from lora_kernels.lora_delta.specs import arrays_of

PEAKS = cost.Peaks(bytes_per_s=1e10, flops_per_s=1e11)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two ops a call, known peaks, and the two implementations that run anywhere."""
    tiny = bench_pool.Sizes(read_bytes=1, bank_bytes=2**30, sets=2, ops=2)
    monkeypatch.setattr(bench_pool, "CPU_SIZES", tiny)
    monkeypatch.setattr(cost, "measured_peaks", lambda dtype: PEAKS)
    monkeypatch.setattr(gpu_check, "TIMED", ("xla:gather", "triton"))


def run(tmp_path, *options):
    """Runs the script on the tiny plan; returns its exit code and what it wrote."""
    path = tmp_path / "new" / "out.json"
    code = gpu_check.main([str(path), "--tiny", "--rounds", "2", *options])
    return code, json.loads(path.read_text())


@pytest.mark.slow
def test_every_stage_runs_and_is_in_the_file(tmp_path, capsys):
    code, result = run(tmp_path)
    assert code == 0
    assert result["faults"] == []
    assert [entry["stage"] for entry in result["stages"]] == ["a", "b", "c", "d"]
    checks = result["checks"]
    assert len(checks) == 2 * len(gpu_numbers.RUNS)
    assert {entry["op"] for entry in checks} == {
        "delta", "gradients", "experts", "grouped"
    }  # fmt: skip
    passed = {(e["op"], e["implementation"]) for e in checks if e.get("passed")}
    assert {("delta", "xla"), ("gradients", "xla"), ("experts", "xla")} <= passed
    points = [(p["spec"], p["implementation"]) for p in result["points"]]
    headline = [("tiny", name) for name in (*bench.BESIDE, "triton")]
    assert points[:4] == headline
    assert ("tiny", "xla:gather") in points[4:]
    assert result["swap"][0]["write_s"] > 0
    assert "tiny" in capsys.readouterr().out


def test_an_implementation_that_raises_fails_the_run_and_the_rest_goes_on(
    tmp_path, monkeypatch, capsys
):
    def prepare(name, spec, pool):
        if name == "triton":
            raise RuntimeError("illegal address")
        return real(name, spec, pool)

    real = bench_calls.prepare
    monkeypatch.setattr(bench_calls, "prepare", prepare)
    code, result = run(tmp_path, "--stages", "d")
    assert code == 1
    fault = "tiny triton: RuntimeError: illegal address"
    assert result["faults"] == [fault]
    assert fault in capsys.readouterr().out
    timed = [p["implementation"] for p in result["points"] if p["median_us"]]
    assert timed == [*bench.BESIDE, "xla:gather"]


def test_a_check_that_raises_is_a_fault(tmp_path, monkeypatch):
    def broken(spec, arrays, implementation):
        raise RuntimeError("no such instruction")

    def right(spec, arrays, implementation):
        return {"values": np.zeros((spec.tokens, 1), np.float32)}

    monkeypatch.setattr(gpu_numbers, "RUNS", ((broken, "triton"), (right, "xla")))
    code, result = run(tmp_path, "--stages", "a")
    assert code == 1
    assert [entry["passed"] for entry in result["checks"]] == [False, True]
    assert "broken check/float32" in result["faults"][0]
    assert "RuntimeError: no such instruction" in result["faults"][0]


def test_a_stage_that_raises_is_a_fault(tmp_path, monkeypatch):
    def fail(dtype):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cost, "measured_peaks", fail)
    code, result = run(tmp_path, "--stages", "d")
    assert code == 1
    assert result["faults"] == ["stages: RuntimeError: out of memory"]


@pytest.mark.parametrize(
    ("key", "row"), [("values", 0), ("values", 1), ("x", 0), ("weight", 1)]
)
def test_wrong_numbers_and_touched_base_rows_do_not_pass(key, row):
    (spec,) = gpu_numbers.tiny_specs()
    slot = arrays_of(spec).slot
    rows = np.flatnonzero(slot < 0)[:1], np.flatnonzero(slot >= 0)[:1]
    small = 1e-6 if row == 0 else 1e-2  # base rows must be exact

    def run(spec, arrays, implementation):
        shape = (spec.tokens,) if key == "weight" else (spec.tokens, 3)
        out = np.ones(shape, np.float32)
        if implementation != "reference":
            out[rows[row]] += small
        return {key: out}

    assert gpu_numbers.check(spec, "xla", run)["passed"] is False
    right = gpu_numbers.check(spec, "reference", run)
    assert right["passed"] is True


@pytest.mark.slow
def test_gradients_equal_those_that_jax_derives():
    (spec,) = gpu_numbers.tiny_specs()
    arrays = arrays_of(spec)
    found = gpu_numbers.gradients(spec, arrays, "xla")
    assert {name: array.shape for name, array in found.items()} == {
        name: getattr(arrays, name).shape for name in gpu_numbers.GRADIENTS
    }
    assert gpu_numbers.check(spec, "xla", gpu_numbers.gradients)["passed"] is True


def test_gradients_of_the_reference_need_no_backward_pass_of_ours(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("called")

    monkeypatch.setattr(backward, "lora_delta_backward", refuse)
    (spec,) = gpu_numbers.tiny_specs()
    found = gpu_numbers.gradients(spec, arrays_of(spec), "reference")
    assert tuple(found) == gpu_numbers.GRADIENTS
    assert all(np.abs(array).max() > 0.01 for array in found.values())


def test_on_a_gpu_that_refuses_every_triton_kernel_the_run_fails(tmp_path):
    record = gpu_check.Record(tmp_path / "out.json")
    entry = {"implementation": "triton", "spec": "s", "refusal": "no jax_triton"}
    record.add("checks", [entry, {"implementation": "xla", "passed": True}])
    assert record.faults() == []
    record.content["environment"]["platform"] = "gpu"
    fault = "every Triton kernel was refused: no jax_triton"
    assert record.faults() == [fault]
    record.add("points", [{"implementation": "triton_invariant", "median_us": 1.0}])
    assert record.faults() == []


def test_a_stage_ends_with_its_own_time_and_with_that_of_all():
    now = time.monotonic()
    assert list(gpu_check.Clock(60.0, now + 60).within([1, 2])) == [1, 2]
    assert list(gpu_check.Clock(0.0, now + 60).within([1, 2])) == []
    assert list(gpu_check.Clock(60.0, now).within([1, 2])) == []
    assert sum(gpu_check.SECONDS[stage] for stage in "ab") <= 270


def test_headlines_come_before_the_grid_and_begin_with_those_of_the_targets():
    plan = gpu_check.full_plan()
    names = [spec.name for spec in plan.headlines]
    assert len(names) == 4 * len(gpu_check.HEADLINES) == 48
    assert names[0] == "llama-3-8b/qkv/one-row"
    assert plan.grid[:48] == plan.headlines
    assert {spec.dtype for spec in plan.long} == set(gpu_numbers.TOLERANCE)
    ranks = {rank for spec in (*plan.quick, *plan.long) for rank in spec.ranks}
    assert ranks == {0, 7, 8, 16, 33, 64}


def test_a_wheel_is_imported_without_being_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheel = tmp_path / "carried-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried_in_a_wheel.py", "answer = 42")
    code, _ = run(tmp_path, "--stages", "", "--wheel", str(wheel))
    assert code == 0
    import carried_in_a_wheel

    assert carried_in_a_wheel.answer == 42
    assert carried_in_a_wheel.__file__.startswith(str(wheel))


@pytest.mark.parametrize("name", ["gone-1-py3-none-any.whl", "x-1-cp311-linux.whl"])
def test_what_is_no_pure_wheel_is_refused(name, tmp_path):
    if "gone" not in name:
        Path(tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected the file of a pure Python wheel"):
        gpu_check.use_wheel(tmp_path / name)


def test_points_can_be_read_back_from_the_file():
    point = bench.Point("s", "xla", 1, "float32", median_us=1.0)
    assert bench.Point(**json.loads(json.dumps(dataclasses.asdict(point)))) == point
