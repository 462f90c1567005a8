"""`LoRAConfig`: what is accepted, and that every fault is named at once."""

import pytest

from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError


@pytest.mark.parametrize("rank", [1, 4, 8, 16, 32, 64, 128, 256, 320, 512, 513, 1024])
def test_any_rank_up_to_1024_is_accepted(rank: int) -> None:
    assert LoRAConfig(max_lora_rank=rank).max_lora_rank == rank


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_lora_rank": 0}, "max_lora_rank must be .* 1 to 1024, got 0"),
        ({"max_lora_rank": 1025}, "max_lora_rank must be .* 1 to 1024, got 1025"),
        ({"max_lora_rank": True}, "max_lora_rank .* got True"),
        ({"max_loras": 0}, "max_loras must be a whole number >= 1, got 0"),
        (
            {"max_loras": 4, "max_cpu_loras": 2},
            r"max_cpu_loras \(2\) must be >= max_loras \(4\)",
        ),
        ({"lora_dtype": "int8"}, "lora_dtype must be one of auto, float32.*'int8'"),
        ({"max_lora_cls_labels": 0}, "max_lora_cls_labels .* got 0"),
        ({"target_modules": "all-linear"}, r"write \['all-linear'\]"),
        ({"target_modules": ["q_proj", ""]}, "non-empty names, got ''"),
        (
            {"fully_sharded_loras": True, "enable_expert_parallel": True},
            "cannot be combined with enable_expert_parallel",
        ),
    ],
)
def test_an_option_that_cannot_work_is_named(
    options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        LoRAConfig(**options)  # type: ignore[arg-type]


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)max_lora_rank.*max_loras.*lora_dtype"):
        LoRAConfig(max_lora_rank=0, max_loras=-1, lora_dtype="float8")


def test_the_host_holds_as_many_as_the_device_unless_told() -> None:
    config = LoRAConfig(max_loras=3)
    assert (config.max_cpu_loras, config.host_capacity) == (3, 3)
    assert LoRAConfig(max_loras=3, max_cpu_loras=9).host_capacity == 9


def test_target_modules_become_a_tuple() -> None:
    assert LoRAConfig(target_modules=["q_proj"]).target_modules == ("q_proj",)
    assert LoRAConfig(target_modules=[]).target_modules == ()


@pytest.mark.parametrize(
    ("lora_dtype", "base", "slot"),
    [("auto", "bfloat16", "bfloat16"), ("float16", "bfloat16", "float16")],
)
def test_auto_takes_the_base_layers_dtype(
    lora_dtype: str, base: str, slot: str
) -> None:
    assert LoRAConfig(lora_dtype=lora_dtype).slot_dtype(base) == slot


@pytest.mark.parametrize("budgets", [{"tokens": 0}, {"token": 4}, {"tower": -1}])
def test_row_budgets_name_domains_and_whole_numbers(budgets):
    with pytest.raises(ConfigError, match="expected a whole number >= 1 for one of"):
        LoRAConfig(row_budgets=budgets)
