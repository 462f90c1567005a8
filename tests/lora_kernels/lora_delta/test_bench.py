"""The benchmark: every form computes the op, refusals are told, results are written."""

import json
import sys
import types

import numpy as np
import pytest

from delta_cases import TOLERANCE, expected, small
from lora_kernels.lora_delta import bench, bench_report, cost, torch_forms
from lora_kernels.lora_delta.specs import arrays_of, suites

PEAKS = cost.Peaks(bytes_per_s=1e10, flops_per_s=1e11)


def test_the_least_cost_counts_active_slots_to_their_ranks_and_adapted_rows():
    spec = small(
        tokens=4, slots=3, ranks=(2, 0, 5, 1), part_widths=(10, 6), d_in=8, max_rank=9
    )
    arrays = arrays_of(spec)._replace(slot=np.array([-1, 1, 1, -1], np.int32))
    # Slot 1 holds ranks 5 and 1: (8 + 10) * 5 + (8 + 6) * 1 numbers, used by two rows.
    weights = 18 * 5 + 14
    rows = 2 * (8 + 2 * 16)
    assert cost.needed(spec, arrays) == (4.0 * (weights + rows), 2.0 * 2 * weights)
    base = cost.base_cost(spec, arrays)
    assert base == (4.0 * (8 * 16 + 4 * (8 + 16)), 2.0 * 4 * 8 * 16)


def test_the_roofline_is_the_slower_of_moving_and_computing():
    assert cost.roofline_seconds(cost.Cost(2e10, 1e9), PEAKS) == 2.0
    assert cost.roofline_seconds(cost.Cost(1.0, 3e11), PEAKS) == 3.0


def test_measured_peaks_are_positive(monkeypatch):
    monkeypatch.setattr(cost, "STREAM_BYTES", 4096)
    monkeypatch.setattr(cost, "PRODUCT_SIZE", 16)
    assert min(cost.measured_peaks("float32")) > 0


def test_a_pool_shares_its_routing_and_nothing_else():
    pool = bench.pool_of(small())
    assert len(pool) == bench.MOST_SETS
    np.testing.assert_array_equal(pool[0].slot, pool[1].slot)
    assert (pool[0].a != pool[1].a).any()
    assert len(bench.pool_of(small(slots=64, d_in=4096, ranks=(32,)))) == 2


def test_points_have_times_and_ratios_or_a_reason():
    spec = small(name="tiny/t23")
    points = bench.measure(spec, ["xla", "reference"], rounds=3, peaks=PEAKS)
    assert [p.implementation for p in points] == [bench.BASE, "xla", "reference"]
    for point in points:
        assert 0 < point.p10_us <= point.median_us <= point.p90_us
        assert point.roofline > 0
        assert point.refusal is None
    assert points[0].base_ratio == 1.0
    assert points[1].flops == cost.needed(spec, arrays_of(spec)).flops


def test_a_refusal_is_a_point_without_times(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (point, _) = bench.measure(small(), ["torch_gather"], rounds=1, peaks=PEAKS)
    assert point.median_us is None
    assert "torch" in point.refusal
    assert point.refusal in bench_report.rows([point])


@pytest.mark.torch
@pytest.mark.parametrize("form", torch_forms.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forms_of_torch_compute_the_same_op(form, dtype, monkeypatch):
    import torch

    spec = small(dtype=dtype)
    arrays = arrays_of(spec)
    kept = []
    real = getattr(torch_forms, f"_{form.removeprefix('torch_')}")

    def keep(x, y, *rest):
        real(x, y, *rest)
        kept.append(y)

    monkeypatch.setattr(torch_forms, real.__name__, keep)
    torch_forms.prepare(form, spec, [arrays])()
    want = expected(arrays, spec.part_widths)
    tolerance = TOLERANCE[dtype]
    if dtype == "bfloat16":  # torch rounds the intermediate and the update
        tolerance = {"atol": 6e-2, "rtol": 2e-2}
    np.testing.assert_allclose(kept[0].to(torch.float64), want, **tolerance)


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "suites", lambda: {"tokens": (small(name="tiny/t23"),)})
    monkeypatch.setattr(cost, "measured_peaks", lambda dtype: PEAKS)
    path = tmp_path / "new" / "result.json"
    arguments = ["--suites", "tokens", "--implementations", "xla", "--rounds", "2"]
    assert bench.main([*arguments, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["spec", "implementation"]
    assert [line.split()[1] for line in lines[1:]] == [bench.BASE, "xla"]
    result = json.loads(path.read_text())
    assert result["environment"]["platform"] == "cpu"
    assert "jax" in result["environment"]["versions"]
    assert result["peaks"] == {"float32": PEAKS._asdict()}
    assert [p["implementation"] for p in result["points"]] == [bench.BASE, "xla"]


def test_an_empty_choice_of_specs_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--suites", "ranks", "--only", "nothing"])
    assert stopped.value.code == 2
    assert "no spec of ['ranks'] contains 'nothing'" in capsys.readouterr().err


def test_the_plot_has_a_line_for_each_implementation(tmp_path, monkeypatch):
    drawn = {}

    class Axes:
        def loglog(self, tokens, medians, *, label, **_):
            drawn[label] = list(zip(tokens, medians, strict=True))

        def __getattr__(self, _):
            return lambda *_, **__: None

    figure = types.SimpleNamespace(savefig=lambda path, **_: path.write_bytes(b"png"))
    pyplot = types.SimpleNamespace(
        subplots=lambda **_: (figure, Axes()), close=lambda _: None
    )
    matplotlib = types.SimpleNamespace(use=lambda _: None, pyplot=pyplot)
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    points = [
        bench.Point("square/t8", "xla", 8, median_us=4.0),
        bench.Point("square/t1", "xla", 1, median_us=2.0),
        bench.Point("square/t1", "gone", 1, refusal="no"),
    ]
    bench_report.write_png(tmp_path / "plot.png", points)
    assert drawn == {"square xla": [(1, 2.0), (8, 4.0)]}
    assert (tmp_path / "plot.png").read_bytes() == b"png"


def test_every_suite_has_distinct_names():
    for specs in suites().values():
        assert len({spec.name for spec in specs}) == len(specs) > 0
