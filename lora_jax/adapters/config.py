"""`adapter_config.json` -> what it means for the weights, or every reason to refuse it.

Each field of PEFT's LoRA config has one rule in `RULES`: honoured, harmless, or refused
unless it has its default. The tensors of the file are the truth about modules and
ranks; the config gives the scale, and names the kinds of change.

Source: the `LoraConfig` of PEFT 0.0.1 to 0.21.2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_jax.adapters.patterns import Budget, Matcher, compile_suffix, first_match

Fault = str | None
Rule = Callable[[object], Fault]

BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga", "default")
"""Values of `init_lora_weights` after which the file still fits the plain base."""


@dataclass(frozen=True)
class Meaning:
    """What a config says of the weights.

    Attributes:
      rank: `r`, or None where the config does not say.
      alpha: `lora_alpha`.
      rslora: whether alpha is divided by the root of the rank.
      rank_pattern: pattern -> rank, the first match counts.
      alpha_pattern: pattern -> alpha, the first match counts.
      matchers: pattern -> its compiled rule, for the keys of both.
      base_model: `base_model_name_or_path`, "" where unknown.
    """

    rank: int | None
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    matchers: Mapping[str, Matcher]
    base_model: str

    def rank_of(self, module: str) -> int | None:
        """Returns the rank declared for a module, None where nothing is declared."""
        key = self._key(self.rank_pattern, module)
        return self.rank if key is None else self.rank_pattern[key]

    def alpha_of(self, module: str) -> float:
        """Returns alpha for a module."""
        key = self._key(self.alpha_pattern, module)
        return self.alpha if key is None else self.alpha_pattern[key]

    def scale_of(self, module: str, rank: int) -> tuple[float, str]:
        """Returns the factor on `B A` for a module of this rank, and the rule in words.

        Formula: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        """
        alpha = self.alpha_of(module)
        if self.rslora:
            return alpha / math.sqrt(rank), f"rslora: alpha {alpha:g} / sqrt({rank})"
        return alpha / rank, f"alpha {alpha:g} / rank {rank}"

    def unused_patterns(self, modules: list[str]) -> list[str]:
        """Returns the pattern keys that match none of the modules."""
        return [
            key
            for key, matches in self.matchers.items()
            if not any(matches(module) for module in modules)
        ]

    def _key(self, pattern: Mapping[str, object], module: str) -> str | None:
        return first_match({key: self.matchers[key] for key in pattern}, module)


def read_meaning(config: Mapping[str, object]) -> tuple[Meaning | None, list[str]]:
    """Returns the config's meaning and its faults; None where it has any fault."""
    found = []
    for name, value in config.items():
        fault = RULES.get(name, _unused)(value)
        if fault is not None:
            found.append(f"config: {name}={_shown(value)}: {fault}")
    if config.get("lora_alpha") is None:
        found.append(
            "config: lora_alpha is missing, so the scale is unknown; add the value "
            "that the adapter was trained with"
        )
    matchers: dict[str, Matcher] = {}
    budget = Budget()
    for field in ("rank_pattern", "alpha_pattern"):
        found += _compile_keys(field, config.get(field), matchers, budget)
    if found:
        return None, found
    return _to_meaning(config, matchers), []


def _to_meaning(config: Mapping, matchers: Mapping[str, Matcher]) -> Meaning:
    alphas = config.get("alpha_pattern") or {}
    return Meaning(
        rank=config.get("r"),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern={key: float(alpha) for key, alpha in alphas.items()},
        matchers=matchers,
        base_model=config.get("base_model_name_or_path") or "",
    )


def _compile_keys(
    field: str, pattern: object, matchers: dict[str, Matcher], budget: Budget
) -> list[str]:
    found = []
    for key in pattern if isinstance(pattern, dict) else ():
        try:
            matchers[key] = compile_suffix(key, budget)
        except ValueError as error:
            found.append(f"config: {field}: key {_shown(key)}: {error}")
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _harmless(value: object) -> Fault:
    return None


def _unused(value: object) -> Fault:
    """The rule of an unknown field: it may be there if it says nothing."""
    if not value:
        return None
    return "is not known and may change what the weights mean; if not, remove it"


def _must_be(what: str, accepts: Callable[[object], bool]) -> Rule:
    def rule(value: object) -> Fault:
        return None if accepts(value) else f"must be {what}"

    return rule


def _refused(reason: str, *defaults: object) -> Rule:
    def rule(value: object) -> Fault:
        return None if any(_same(value, d) for d in (None, *defaults)) else reason

    return rule


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: object) -> bool:
    return (
        isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e30
    )  # also excludes NaN


def _is_flag(value: object) -> bool:
    return value is None or type(value) is bool


def _is_text(value: object) -> bool:
    return value is None or type(value) is str


def _is_mapping_to(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    def whole(value: object) -> bool:
        return value is None or (
            isinstance(value, dict) and all(accepts(item) for item in value.values())
        )

    return whole


def _is_texts(value: object) -> bool:
    return _is_text(value) or (
        isinstance(value, list) and all(type(item) is str for item in value)
    )


def _init_rule(value: object) -> Fault:
    if value is None or type(value) is bool:
        return None
    if isinstance(value, str) and value.lower() in BASE_KEEPING_INITS:
        return None
    return (
        "this init changes the base model's weights, so the file does not fit the "
        "plain base; convert it with PEFT's save_pretrained(..., "
        "path_initial_model_for_weight_conversion=...)"
    )


def _peft_type_rule(value: object) -> Fault:
    if value is None or value == "LORA":
        return None
    return "only adapters of peft_type LORA can be read"


RULES: Mapping[str, Rule] = {
    # Honoured.
    "peft_type": _peft_type_rule,
    "r": _must_be("a whole number above 0", lambda v: v is None or _is_rank(v)),
    "lora_alpha": _must_be("a finite number", lambda v: v is None or _is_alpha(v)),
    "use_rslora": _must_be("true or false", _is_flag),
    "rank_pattern": _must_be("a mapping to ranks above 0", _is_mapping_to(_is_rank)),
    "alpha_pattern": _must_be("a mapping to numbers", _is_mapping_to(_is_alpha)),
    "base_model_name_or_path": _must_be("a text", _is_text),
    "init_lora_weights": _init_rule,
    # Cross-checked against the tensors, which decide.
    "target_modules": _must_be("a text or a list of texts", _is_texts),
    # Harmless: they steer training, or repeat what the tensors say.
    "auto_mapping": _harmless,
    "corda_config": _harmless,
    "eva_config": _harmless,
    "exclude_modules": _harmless,
    "fan_in_fan_out": _harmless,
    "inference_mode": _harmless,
    "layers_pattern": _harmless,
    "layers_to_transform": _harmless,
    "loftq_config": _harmless,
    "lora_dropout": _harmless,
    "lora_ga_config": _harmless,
    "megatron_config": _harmless,
    "megatron_core": _harmless,
    "merge_weights": _harmless,
    "peft_version": _harmless,
    "qalora_group_size": _harmless,
    "revision": _harmless,
    "runtime_config": _harmless,
    "task_type": _harmless,
    "velora_config": _harmless,
    # Refused unless unused.
    "arrow_config": _refused("Arrow routing is not supported"),
    "enable_lora": _refused("MergedLinear files of PEFT before 0.3 are not supported"),
    "kasa_config": _refused("KaSA is not supported"),
    "layer_replication": _refused("layer replication is not supported", []),
    "monteclora_config": _refused("MonteCLoRA is not supported"),
    "use_bdlora": _refused("block-diagonal LoRA is not supported", False),
    "use_qalora": _refused("QALoRA is not supported", False),
    # Kinds that no reader here knows yet.
    "alora_invocation_tokens": _refused("activated LoRA is not supported"),
    "bias": _refused("trained biases are not supported", "none"),
    "ensure_weight_tying": _harmless,
    "lora_bias": _refused("LoRA biases are not supported", False),
    "modules_to_save": _refused("full modules are not supported", []),
    "target_parameters": _refused("expert parameters are not supported", []),
    "trainable_token_indices": _refused("trainable tokens are not supported", [], {}),
    "use_dora": _refused("DoRA is not supported", False),
}
"""Field -> its fault, if any. A field without a row must be null, false, 0 or empty."""
