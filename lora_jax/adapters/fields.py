"""One rule for each field of PEFT's LoRA config: honoured, harmless, or refused.

A field without a row is unknown and must say nothing (null, false, 0 or empty): whether
deleting it would be right, only its writer knows.

Source: the `LoraConfig` of PEFT 0.0.1 to 0.21.2.
"""

from collections.abc import Callable, Mapping

Fault = str | None
Rule = Callable[[object], Fault]

BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga", "default")
"""Values of `init_lora_weights` after which the file still fits the plain base."""


BIASES = (None, "none", "all", "lora_only")

MAX_TOKEN = 2**31 - 1
"""Token ids are int32."""


def field_faults(config: Mapping[str, object]) -> list[str]:
    """Returns one text for each field whose value cannot be honoured."""
    found = []
    for name, value in config.items():
        fault = RULES.get(name, _unused)(value)
        if fault is not None:
            found.append(f"config: {name}={shown(value)}: {fault}")
    return found


def shown(value: object) -> str:
    """Returns a value as text, cut to a readable length."""
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


def _is_text_list(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and all(type(item) is str for item in value)
    )


def _is_texts(value: object) -> bool:
    return _is_text(value) or _is_text_list(value)


def _is_token_list(value: object) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(type(item) is int and 0 <= item <= MAX_TOKEN for item in value)
    )


def _is_token_lists(value: object) -> bool:
    lists = value.values() if isinstance(value, dict) else [value]
    return all(_is_token_list(item) and _is_distinct(item) for item in lists)


def _is_distinct(value: object) -> bool:
    return not isinstance(value, list) or len(set(value)) == len(value)


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
    "alora_invocation_tokens": _must_be("a list of token ids", _is_token_list),
    "bias": _must_be("none, all or lora_only", lambda v: v in BIASES),
    "lora_bias": _must_be("true or false", _is_flag),
    "modules_to_save": _must_be("a list of texts", _is_text_list),
    "peft_version": _must_be("a text", _is_text),
    "target_parameters": _must_be("a list of texts", _is_text_list),
    "trainable_token_indices": _must_be(
        "a list of distinct token ids, or a mapping to such lists", _is_token_lists
    ),
    "use_dora": _must_be("true or false", _is_flag),
    # Cross-checked against the tensors, which decide.
    "target_modules": _must_be("a text or a list of texts", _is_texts),
    # Harmless: they steer training, or repeat what the tensors say.
    "auto_mapping": _harmless,
    "corda_config": _harmless,
    "ensure_weight_tying": _harmless,
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
}
"""Field -> its fault, if any. A field without a row must be null, false, 0 or empty."""
