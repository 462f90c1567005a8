"""An activation costs the same however many adapters are registered."""

import sys
from dataclasses import replace

import pytest

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.cli import main
from lora_jax.manager.swap_bench import Layers, measure_swaps


def test_one_result_for_each_number() -> None:
    results = measure_swaps([1, 12], layers=4, width=32, rank=4, slots=8, repeats=3)
    assert [result.registered for result in results] == [1, 12]
    assert results[0].slot_bytes == 4 * (2 * 4 * 32 * 4 + 8)
    for result in results:
        assert 0 < result.fastest <= result.median
        assert result.ratio > 0


def test_an_activation_does_as_much_with_10_as_with_10000_registered() -> None:
    """Counted in calls: times would be those of whatever else the machine does."""
    few, many = (_calls_of_an_activation(count) for count in (10, 10_000))
    assert few > 100
    assert abs(many - few) < 0.05 * few


def _calls_of_an_activation(registered: int) -> int:
    config = LoRAConfig(max_loras=2, max_cpu_loras=registered, max_lora_rank=4)
    manager = LRUCacheLoRAModelManager(Layers(2, 8), config)
    dummy = manager.prepare(manager.create_dummy_lora(1, 4))
    for id in range(1, registered + 1):
        manager.add_prepared(replace(dummy, adapter=replace(dummy.adapter, id=id)))
    for id in (1, 2, 3, 4):  # Compiles, and fills the slots: the last ones evict.
        manager.activate_adapter(id)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        manager.activate_adapter(5)
    finally:
        sys.setprofile(None)
    return calls


def test_the_command_prints_a_line_for_each_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--registered 1 5 --layers 2 --width 8 --rank 2 --slots 2 --repeats 2"
    assert main(["bench", "swap", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert "one activation of 0.0 MiB, 2 slots" in shown
    assert shown.count(" ms") >= 5
