"""The benchmark: what it compares is the same product, and it says what it measured."""

import dataclasses
import json

import numpy as np
import pytest

from lora_kernels import grouped_dot, make_routing
from lora_kernels.grouped_dot import bench

TINY = bench.Spec(name="tiny", rows=6, per_row=2, experts=4, d_in=8, d_out=5)


@pytest.mark.parametrize("name", bench.BASELINES)
def test_the_baselines_compute_the_same(name):
    x, kernel, group = bench.arguments_of(TINY)
    pairs = make_routing(group, TINY.experts)
    want = grouped_dot(x, kernel, pairs)
    np.testing.assert_allclose(bench.BASELINES[name](x, kernel, pairs), want, atol=1e-5)


def test_a_row_has_no_expert_twice():
    spec = dataclasses.replace(TINY, per_row=4)
    group = np.asarray(bench.arguments_of(spec)[2]).reshape(6, 4)
    assert (np.sort(group, axis=1) == np.arange(4)).all()


def test_points_are_times_or_refusals(capsys, monkeypatch, tmp_path):
    sizes = dataclasses.asdict(TINY)
    tiny = {name: sizes[name] for name in ("experts", "per_row", "d_in", "d_out")}
    monkeypatch.setattr(bench, "MODELS", {"tiny": tiny})
    path = tmp_path / "points.json"
    arguments = ["--models", "tiny", "--rows", "3", "--rounds", "2", "--json"]
    names = ["xla", "triton", "ragged_dot"]
    assert bench.main([*arguments, str(path), "--implementations", *names]) == 0
    points = json.loads(path.read_text())["points"]
    by_name = {point["implementation"]: point for point in points}
    assert by_name.keys() == set(names)
    assert 0 < by_name["xla"]["min_ms"] <= by_name["xla"]["median_ms"]
    assert "triton" in by_name["triton"]["refusal"]
    printed = capsys.readouterr().out
    assert printed.count("tiny/t3") == 3
    assert printed.count("median") == 2
