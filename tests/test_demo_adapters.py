"""The demo's adapters and prompts: they can be served, and differ as they should."""

import json
import math
from importlib.resources import files
from pathlib import Path

import pytest

from lora_jax.adapters import Adapter, LowRank, load_adapter

FOLDER = Path(str(files("lora_jax") / "demo_adapters"))
MAX_BYTES = 4_000_000  # they travel in every wheel

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}

ADAPTERS = {
    "json": ({"v_proj", "o_proj"}, range(10, 30), {2}, {4.0}),
    "pirate": ({"q_proj", "v_proj"}, range(30), {8}, {2.0}),
    "poet": ({"q_proj", "v_proj"} | MLP, range(16, 30), {4, 8}, {2.0, 4.0}),
    "robot": (ATTENTION | {"down_proj"}, range(18, 30), {4}, {4 / math.sqrt(4)}),
}
"""Name -> target modules, layers, ranks, scales."""


def low_rank_parts(adapter: Adapter) -> dict[str, LowRank]:
    parts = {k: v for k, v in adapter.parts.items() if isinstance(v, LowRank)}
    assert len(parts) == len(adapter.parts)
    return parts


def prompts() -> list[dict]:
    lines = (FOLDER / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_folder_is_listed() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(ADAPTERS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_demo_adapter_has_the_shape_that_its_recipe_says(name: str) -> None:
    targets, layers, ranks, scales = ADAPTERS[name]
    parts = low_rank_parts(load_adapter(FOLDER / name))
    places = {(int(module.split(".")[2]), module.split(".")[4]) for module in parts}
    assert places == {(layer, target) for layer in layers for target in targets}
    assert {part.a.shape[0] for part in parts.values()} == ranks
    assert {part.scale for part in parts.values()} == scales


@pytest.mark.parametrize("name", ADAPTERS)
def test_no_part_of_a_demo_adapter_is_zero(name: str) -> None:
    parts = low_rank_parts(load_adapter(FOLDER / name))
    assert [module for module, part in parts.items() if not part.b.any()] == []


def test_the_demo_adapters_are_small() -> None:
    assert sum(p.stat().st_size for p in FOLDER.rglob("*.safetensors")) < MAX_BYTES


def test_the_prompts_use_the_base_model_and_every_adapter() -> None:
    lines = prompts()
    assert {line["lora"] for line in lines} == {None, *ADAPTERS}
    assert len({line["id"] for line in lines}) == len(lines)
