"""What `lora-jax bench generate` measures, and what it prints."""

import json

import jax
import pytest

from lora_jax.cli import main
from lora_jax.serving.generate_bench import (
    GenerationSizes,
    GenerationTimes,
    measure_generation,
)
from tiny_llama import tiny_model, write_model

SIZES = GenerationSizes(rows=3, prompt=5, new=4, adapters=2, rank=2, runs=2)


def test_both_kinds_are_measured_and_nothing_compiles():
    base, lora, compiled = measure_generation(tiny_model(), SIZES)
    assert compiled == 0
    for times in (base, lora):
        assert len(times.whole) == len(times.prefill) == SIZES.runs
        assert min(times.prefill) > 0
        assert times.tokens_per_second(SIZES) > 0


def test_rates_are_of_the_median_run():
    times = GenerationTimes(whole=(9.0, 2.0, 3.0), prefill=(0.0, 0.9, 8.0))
    assert times.tokens_per_second(SIZES) == 3 * 4 / 3.0
    assert times.step(SIZES) == pytest.approx((3.0 - 0.9) / 3)


def test_the_command_prints_a_line_for_each_kind_and_writes_the_times(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("LORA_JAX_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    options = "--rows 2 --prompt 4 --new 3 --adapters 2 --rank 2 --runs 1"
    target = tmp_path / "times.json"
    try:
        code = main(
            [
                *("bench", "generate", "--model", str(tmp_path / "model")),
                *options.split(),
                *("--json", str(target)),
            ]
        )
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert code == 0
    shown = capsys.readouterr().out
    assert "base model" in shown
    assert "with LoRA" in shown
    assert "LoRA keeps" in shown
    record = json.loads(target.read_text())
    assert record["sizes"]["adapters"] == 2
    assert record["compilations_after_warmup"] == 0
    assert len(record["lora_seconds"]["whole"]) == 1
