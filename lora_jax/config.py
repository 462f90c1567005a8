"""The options of a LoRA manager: one frozen value, checked as a whole when it is built.

Knows the options alone. What needs a model (does a target match? is it multimodal?)
is checked by `wrap` and by the manager's constructor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_jax.errors import ConfigError, faults
from lora_jax.shapes import DOMAINS

MAX_RANK = 1024
"""Largest rank accepted. A guard against typing errors: no array layout needs it."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Slot dtypes by name; "auto" takes the dtype of each adapted layer's weights."""


@dataclass(frozen=True)
class LoRAConfig:
    """How many adapters are kept where, how wide, and on which modules.

    Differs from vLLM on purpose: any rank from 1 to 1024 is accepted (vLLM: nine
    values), slot arrays may be float32 by name, and a target module that matches
    nothing is an error when the model is wrapped (vLLM: silence).

    Args:
      max_lora_rank: width of the slot arrays; an adapter of larger rank is refused.
      max_loras: slots on the device: the most distinct adapters in one batch, >= 1.
      max_cpu_loras: adapters kept on the host, >= max_loras. None: max_loras, and the
        built value holds that number.
      fully_sharded_loras: where a base kernel is cut over devices along its outputs,
        cut the rank of A too, and where along its inputs, the output of B (S-LoRA).
        `max_lora_rank` must then be a multiple of those devices. Without such kernels
        it changes nothing. Excludes `enable_expert_parallel`.
      enable_expert_parallel: insist that the model's experts are spread over devices
        (`shard_experts`): a model whose are not is then refused. Nothing else depends
        on it, as the model itself says where its experts are. Excludes
        `fully_sharded_loras`.
      lora_dtype: dtype of the slot arrays, one of `DTYPES`.
      target_modules: names of the modules that may be adapted: last name, whole path,
        packed parent or packed child. None: every supported module; (): none.
      module_names: for a model whose modules are not named as in Hugging Face's: prefix
        there -> prefix in this model, `*` for one component, as in
        `{"model.layers.*.self_attn": "layers.*.attn"}`. None: the names agree.
      default_mm_loras: adapter path for each modality; multimodal models only.
      enable_tower_connector_lora: also adapt the vision tower and the connector.
      specialize_active_lora: compile for the number of active adapters, in buckets.
      enable_mixed_moe_lora_format: adapters with fused and with per-expert weights in
        one batch. Taken for vLLM's sake: they always are served together here.
      enable_moe_shared_loras: adapters that share a factor among experts. Taken for
        vLLM's sake: they always are served.
      row_budgets: domain -> the most rows that a mapping may name in it ("tokens",
        "prompts", "tower", "connector"). None, or a domain left out: any number.
      pin_host_memory: keep each adapter on the host also as one buffer in pinned
        memory, which crosses to a GPU faster and is as large as a slot. None: on GPUs.
      max_lora_cls_labels: most labels of a classification adapter, >= 1. None: the
        base head's.

    Raises:
      ConfigError: naming every option that cannot work.

    Example:
      >>> LoRAConfig(max_loras=4, max_lora_rank=12).max_cpu_loras
      4

    Source: vLLM's `LoRAConfig`, https://docs.vllm.ai/en/latest/features/lora.html.
    """

    max_lora_rank: int = 16
    max_loras: int = 1
    max_cpu_loras: int | None = None
    fully_sharded_loras: bool = False
    lora_dtype: str = "auto"
    target_modules: Sequence[str] | None = None
    module_names: Mapping[str, str] | None = None
    default_mm_loras: Mapping[str, str] | None = None
    enable_tower_connector_lora: bool = False
    specialize_active_lora: bool = False
    enable_mixed_moe_lora_format: bool = False
    enable_moe_shared_loras: bool = False
    max_lora_cls_labels: int | None = None
    enable_expert_parallel: bool = False
    row_budgets: Mapping[str, int] | None = None
    pin_host_memory: bool | None = None

    def __post_init__(self) -> None:
        found = [*_number_faults(self), *_choice_faults(self), *_target_faults(self)]
        if found:
            raise ConfigError(faults("LoRAConfig cannot work:", found))
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        if self.target_modules is not None:
            object.__setattr__(self, "target_modules", tuple(self.target_modules))

    @property
    def host_capacity(self) -> int:
        """Adapters kept on the host: `max_cpu_loras`, or `max_loras` when None."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def slot_dtype(self, base: str) -> str:
        """Returns the dtype name of the slot arrays of a layer whose dtype is `base`.

        Example:
          >>> LoRAConfig().slot_dtype("bfloat16")
          'bfloat16'
        """
        return base if self.lora_dtype == "auto" else self.lora_dtype


def _number_faults(config: LoRAConfig) -> list[str]:
    found = []
    if not _is_count(config.max_lora_rank) or config.max_lora_rank > MAX_RANK:
        found.append(
            f"max_lora_rank must be a whole number from 1 to {MAX_RANK}, "
            f"got {config.max_lora_rank!r}."
        )
    if not _is_count(config.max_loras):
        found.append(
            f"max_loras must be a whole number >= 1, got {config.max_loras!r}."
        )
    elif config.max_cpu_loras is not None:
        found.extend(_host_faults(config.max_cpu_loras, config.max_loras))
    labels = config.max_lora_cls_labels
    if labels is not None and not _is_count(labels):
        found.append(
            f"max_lora_cls_labels must be a whole number >= 1 or None, got {labels!r}."
        )
    for domain, rows in (config.row_budgets or {}).items():
        if domain not in DOMAINS or not _is_count(rows):
            found.append(
                f"row_budgets[{domain!r}]={rows!r}: expected a whole number >= 1 for "
                f"one of {', '.join(DOMAINS)}."
            )
    return found


def _host_faults(max_cpu_loras: int, max_loras: int) -> list[str]:
    if max_cpu_loras < max_loras:
        return [
            f"max_cpu_loras ({max_cpu_loras}) must be >= max_loras ({max_loras}). "
            "Raise max_cpu_loras or leave it out."
        ]
    return []


def _choice_faults(config: LoRAConfig) -> list[str]:
    found = []
    if config.lora_dtype not in DTYPES:
        found.append(
            f"lora_dtype must be one of {', '.join(DTYPES)}, got {config.lora_dtype!r}."
        )
    if config.enable_expert_parallel and config.fully_sharded_loras:
        found.append(
            "fully_sharded_loras cannot be combined with enable_expert_parallel; "
            "switch one off."
        )
    return found


def _target_faults(config: LoRAConfig) -> list[str]:
    targets = config.target_modules
    if targets is None:
        return []
    if isinstance(targets, str):
        return [
            f"target_modules must be a list of names, got the text {targets!r}; "
            f"write [{targets!r}]."
        ]
    return [
        f"target_modules must hold non-empty names, got {name!r}."
        for name in targets
        if not isinstance(name, str) or not name
    ]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
