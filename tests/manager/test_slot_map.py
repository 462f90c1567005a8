"""What a notebook and a metrics page show of a manager."""

import re

import pytest

from helpers import Toy, make_adapter
from lora_jax.adapters import Adapter
from lora_jax.config import LoRAConfig
from lora_jax.manager import LRUCacheLoRAModelManager

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def manager() -> LRUCacheLoRAModelManager:
    manager = LRUCacheLoRAModelManager(
        Toy(), LoRAConfig(max_loras=4, max_cpu_loras=5, max_lora_rank=8)
    )
    for id, rank in ((1, 3), (2, 8), (3, 1)):
        manager.add_adapter(make_adapter(id, rank))
    manager.pin_adapter(1)
    manager.hold(1)
    manager.hold(1)
    manager.activate_adapter(2)
    manager.hold(3)
    manager.remove_adapter(3)
    return manager


def test_the_text_is_a_slot_map(manager: LRUCacheLoRAModelManager) -> None:
    lines = repr(manager).splitlines()
    assert lines[0] == (
        "LRUCacheLoRAModelManager: 2 of 4 slots, 2 of 5 adapters, "
        "34.3 KiB on the device"
    )
    shown = [re.sub(r" +", " ", line) for line in lines[1:]]
    assert shown[0] == "slot adapter id rank modules bytes pinned held used"
    assert re.fullmatch(r"0 a1 1 3 10 [\d.]+ KiB yes 2 [\d.]+ s ago", shown[1])
    assert re.fullmatch(r"1 a2 2 8 10 [\d.]+ KiB [\d.]+ s ago", shown[2])
    assert shown[3:] == ["2 (retired) 1", "3 -"]


def test_the_html_escapes_names(manager: LRUCacheLoRAModelManager) -> None:
    adapter = make_adapter(4, 2)
    object.__setattr__(adapter, "name", EVIL)
    assert isinstance(adapter, Adapter)
    manager.add_adapter(adapter)
    manager.activate_adapter(4)
    page = manager._repr_html_()
    assert page.count("<tr>") == 5
    assert EVIL not in page
    assert "&lt;script&gt;" in page


def test_metrics_are_plain_numbers(manager: LRUCacheLoRAModelManager) -> None:
    manager.activate_adapter(2)
    metrics = manager.metrics()
    assert all(isinstance(value, int | float) for value in metrics.values())
    expected = {
        "added": 3,
        "device_misses": 3,
        "device_hits": 3,
        "device_evictions": 0,
        "host_evictions": 0,
        "slots": 4,
        "slots_free": 1,
        "slots_retired": 1,
        "adapters_registered": 2,
        "adapters_active": 2,
        "adapters_pinned": 1,
        "adapters_held": 1,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["device_bytes"] == 4 * metrics["slot_bytes"]


def test_evictions_are_counted() -> None:
    manager = LRUCacheLoRAModelManager(
        Toy(), LoRAConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    )
    for id in (1, 2, 3):
        manager.add_adapter(make_adapter(id, 2))
        manager.activate_adapter(id)
    assert not manager.add_adapter(make_adapter(3, 2))
    assert manager.metrics()["host_hits"] == 1
    assert manager.metrics()["host_evictions"] == 1
    assert manager.metrics()["device_evictions"] == 2


def test_the_bank_shows_its_size_and_not_its_numbers(
    manager: LRUCacheLoRAModelManager,
) -> None:
    assert repr(manager.bank) == "Bank(slots=4, sites=6, 34.3 KiB)"
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", manager.bank._repr_html_())
    assert [row.split("</td><td>") for row in rows] == [
        ["0", "3", "6"],
        ["1", "8", "6"],
        ["2", "1", "6"],
        ["3", "0", "0"],
    ]
