"""`adapter_config.json` -> what it means for the weights, or every reason to refuse it.

The tensors of the file are the truth about modules and ranks; the config gives the
scale, the indices of token rows, and says which whole modules were meant to be saved.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_jax.adapters.fields import field_faults, shown
from lora_jax.adapters.patterns import Budget, Matcher, compile_suffix, first_match

WRITTEN_BY_PEFT = frozenset(
    "auto_mapping fan_in_fan_out inference_mode layers_pattern layers_to_transform "
    "rank_pattern alpha_pattern revision".split()
)
"""PEFT writes all of these since 0.6; a config without one was written by hand."""

SINCE_0_14 = ("exclude_modules", "eva_config", "lora_bias")
SINCE_0_15 = ("trainable_token_indices", "corda_config", "peft_version")

EMBEDDING_NAMES = ("embed_tokens", "lm_head")
"""PEFT saves these whole, unasked, when the vocabulary was resized."""


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
      shared_keys: whether one look-up serves both patterns, as in PEFT up to 0.13.
      dora: `use_dora`, None where the config does not say.
      lora_bias: `lora_bias`, None where the config does not say.
      bias: "none", "all" or "lora_only".
      modules_to_save: names of modules that are saved whole.
      token_indices: names -> indices of trained token rows; "" stands for any module.
      invocation_tokens: `alora_invocation_tokens`.
      targets: names that the config says were adapted, where it lists them.
      parameters: `target_parameters`.
      peft_version: version of PEFT that wrote it, "" where unknown.
      base_model: `base_model_name_or_path`, "" where unknown.
    """

    rank: int | None
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    matchers: Mapping[str, Matcher]
    shared_keys: bool
    dora: bool | None
    lora_bias: bool | None
    bias: str
    modules_to_save: tuple[str, ...]
    token_indices: Mapping[str, tuple[int, ...]]
    invocation_tokens: tuple[int, ...]
    targets: tuple[str, ...]
    parameters: tuple[str, ...]
    peft_version: str
    base_model: str

    def rank_of(self, module: str) -> int | None:
        """Returns the rank declared for a module, None where nothing is declared."""
        return self.rank_pattern.get(self._key(self.rank_pattern, module), self.rank)

    def alpha_of(self, module: str) -> float:
        """Returns alpha for a module."""
        key = self._key(self.alpha_pattern, module)
        return self.alpha_pattern.get(key, self.alpha)

    def scale_of(self, module: str, rank: int) -> tuple[float, str]:
        """Returns the factor on `B A` for a module of this rank, and the rule in words.

        Formula: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        """
        alpha = self.alpha_of(module)
        if self.rslora:
            return alpha / math.sqrt(rank), f"rslora: alpha {alpha:g} / sqrt({rank})"
        return alpha / rank, f"alpha {alpha:g} / rank {rank}"

    def saves(self, module: str) -> bool:
        """Whether this module, or one around it, is declared to be saved whole.

        PEFT compares ends of paths as texts: "norm" names `input_layernorm` too.
        """
        last = module.rpartition(".")[2]
        if last in EMBEDDING_NAMES:
            return True
        steps = module.split(".")
        paths = [".".join(steps[: count + 1]) for count in range(len(steps))]
        return any(path.endswith(n) for path in paths for n in self.modules_to_save)

    def indices_of(self, module: str) -> tuple[int, ...] | None:
        """Returns the token ids whose rows a module's file holds, None if none are."""
        for name, indices in self.token_indices.items():
            if not name or module == name or module.endswith(f".{name}"):
                return indices
        return None

    def absent(self, modules: Sequence[str]) -> list[str]:
        """Returns one note for each thing declared that these modules do not show."""
        paths = [f".{module}." for module in modules]
        notes = [
            f"config: pattern {key!r} matches no module of the file"
            for key, matches in self.matchers.items()
            if not any(matches(module) for module in modules)
        ]
        declared = {
            "target_modules": self.targets,
            "modules_to_save": self.modules_to_save,
            "target_parameters": [n.removesuffix(".weight") for n in self.parameters],
        }
        for field, names in declared.items():
            missing = [n for n in names if not any(f".{n}." in path for path in paths)]
            if missing:
                notes.append(f"config: {field} names {missing}, the file has none")
        return notes

    def _key(self, pattern: Mapping[str, object], module: str) -> str:
        keys = self.matchers if self.shared_keys else dict.fromkeys(pattern)
        found = first_match({key: self.matchers[key] for key in keys}, module)
        return module if found is None else found


def read_meaning(config: Mapping[str, object]) -> tuple[Meaning | None, list[str]]:
    """Returns the config's meaning and its faults; None where it has any fault."""
    found = field_faults(config)
    if config.get("lora_alpha") is None:
        found.append(
            "config: lora_alpha is missing, so the scale is unknown; add the value "
            "that the adapter was trained with"
        )
    matchers: dict[str, Matcher] = {}
    dotted = is_before(config, SINCE_0_15)
    budget = Budget()
    for field in ("rank_pattern", "alpha_pattern"):
        found += _compile_keys(
            field, config.get(field), matchers, budget, dotted=dotted
        )
    if found:
        return None, found
    return _to_meaning(config, matchers), []


def is_before(config: Mapping[str, object], fields: tuple[str, ...]) -> bool:
    """Whether PEFT wrote the config before it knew any of these fields."""
    return config.keys() >= WRITTEN_BY_PEFT and not any(f in config for f in fields)


def _to_meaning(config: Mapping, matchers: Mapping[str, Matcher]) -> Meaning:
    alphas = config.get("alpha_pattern") or {}
    targets = config.get("target_modules")
    return Meaning(
        rank=config.get("r"),
        alpha=float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern={key: float(alpha) for key, alpha in alphas.items()},
        matchers=matchers,
        shared_keys=is_before(config, (*SINCE_0_14, *SINCE_0_15)),
        dora=config.get("use_dora"),
        lora_bias=config.get("lora_bias"),
        bias=config.get("bias") or "none",
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        token_indices=_token_indices(config.get("trainable_token_indices")),
        invocation_tokens=tuple(config.get("alora_invocation_tokens") or ()),
        targets=tuple(targets) if isinstance(targets, list) else (),
        parameters=tuple(config.get("target_parameters") or ()),
        peft_version=config.get("peft_version") or "",
        base_model=config.get("base_model_name_or_path") or "",
    )


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    if isinstance(value, dict):
        return {name: tuple(indices) for name, indices in value.items()}
    return {"": tuple(value)} if isinstance(value, list) and value else {}


def _compile_keys(
    field: str,
    pattern: object,
    matchers: dict[str, Matcher],
    budget: Budget,
    *,
    dotted: bool,
) -> list[str]:
    found = []
    for key in pattern if isinstance(pattern, dict) else ():
        try:
            matchers[key] = compile_suffix(key, budget, dotted=dotted)
        except ValueError as error:
            found.append(f"config: {field}: key {shown(key)}: {error}")
    return found
