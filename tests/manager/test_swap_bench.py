"""An activation costs the same however many adapters are registered."""

import pytest

from lora_jax.cli import main
from lora_jax.manager.swap_bench import measure_swaps


def test_activation_time_is_flat_from_1_to_10000_registered_adapters() -> None:
    results = measure_swaps(
        [1, 100, 10_000], layers=4, width=32, rank=4, slots=8, repeats=30
    )
    assert [result.registered for result in results] == [1, 100, 10_000]
    assert results[0].slot_bytes == 4 * (2 * 4 * 32 * 4 + 8)
    fastest = [result.fastest for result in results]
    assert max(fastest) < 3 * min(fastest)
    assert all(result.ratio > 0 for result in results)


def test_the_command_prints_a_line_for_each_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--registered 1 5 --layers 2 --width 8 --rank 2 --slots 2 --repeats 2"
    assert main(["bench", "swap", *options.split()]) == 0
    shown = capsys.readouterr().out
    assert "one activation of 0.0 MiB, 2 slots" in shown
    assert shown.count(" ms") >= 5
