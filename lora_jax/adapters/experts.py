"""The tensors of a fused expert parameter -> one update for all experts.

PEFT (`target_parameters`) writes flat factors at `experts` and `experts.base_layer`,
vLLM's shared layout three-axis factors at `experts.w1`. A pair of one expert alone,
`experts.3.gate_proj`, is an ordinary `LowRank`. Which model they fit, and in which
orientation PEFT stored them, is `expert_layout.py`'s.
"""

from lora_jax.adapters.built import Built, Tensor, Tensors, pair_faults, rank_faults
from lora_jax.adapters.config import Meaning
from lora_jax.adapters.names import Role
from lora_jax.adapters.parts import ExpertPairs, ExpertsLowRank

GATE_UP, DOWN = "gate_up_proj", "down_proj"

PARAMETERS = frozenset({GATE_UP, DOWN, "gate_proj", "up_proj", "w1", "w2", "w3"})
"""Last names of projections that follow `experts.` without an expert's number."""


def is_experts(module: str) -> bool:
    """Whether the path is a fused expert parameter's, as PEFT nests them."""
    return module.removesuffix(".base_layer").endswith("experts")


def names_parameter(module: str) -> bool:
    """Whether the path is that of one projection of all experts."""
    head, _, last = module.rpartition(".")
    return is_experts(head) and last in PARAMETERS


def build_experts(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds the updates of a fused expert parameter (PEFT's `target_parameters`)."""
    parameter = _parameter_of(module, meaning)
    return _build_flat(module, parameter, tensors, meaning)


def build_expert_pairs(module: str, tensors: Tensors, meaning: Meaning) -> Built:
    """Builds the updates of a projection that is named after `experts`."""
    a, b = tensors[Role.A], tensors[Role.B]
    if a.array.ndim == b.array.ndim == 2:
        return _build_flat(module, module.rpartition(".")[2], tensors, meaning)
    found = _variant_faults(module, meaning) + _three_axes_faults(module, a, b)
    if not found:
        found = rank_faults(module, a.array.shape[1], meaning)
    if found:
        return Built(None, "", tuple(found))
    scale, rule = meaning.scale_of(module, a.array.shape[1])
    return Built(ExpertPairs(a.array, b.array, scale), rule, ())


def _build_flat(
    module: str, parameter: str, tensors: Tensors, meaning: Meaning
) -> Built:
    a, b = tensors[Role.A], tensors[Role.B]
    found = _variant_faults(module, meaning) + pair_faults(module, a, b)
    alias = f"{experts_path(module)}.{parameter or DOWN}"
    rank = meaning.rank_of(alias)
    if rank is None:
        found.append(f"{module}: r is missing, so the experts' rank is unknown; add it")
    elif not found and a.array.shape[0] % rank:
        found.append(
            f"{module}: {a.array.shape[0]} rows of lora_A are no multiple of the "
            f"declared rank {rank}; correct r or rank_pattern"
        )
    if found or rank is None:
        return Built(None, "", tuple(found))
    scale, rule = meaning.scale_of(alias, rank)
    version = meaning.peft_version
    part = ExpertsLowRank(a.array, b.array, scale, rank, parameter, version)
    return Built(part, rule, (), alias)


def experts_path(module: str) -> str:
    """Returns the path of the experts to which a fused parameter belongs."""
    path = module.removesuffix(".base_layer")
    return path.rpartition(".")[0] if names_parameter(path) else path


def _parameter_of(module: str, meaning: Meaning) -> str:
    """The expert parameter behind a path, "" where nothing tells.

    PEFT nests two parameters of one module in the model's order, so the first is
    `.base_layer`; one alone never is, and then only the config tells which it is.
    """
    root = module.removesuffix(".base_layer")
    names = [name.rpartition(".") for name in meaning.parameters]
    mine = [p for head, _, p in names if not head or f".{root}".endswith(f".{head}")]
    if len(mine) == 1:
        return mine[0]
    if module.endswith(".base_layer"):
        return GATE_UP
    return DOWN if mine else ""


def _variant_faults(module: str, meaning: Meaning) -> list[str]:
    """What the config declares of every module, and PEFT does not have for experts."""
    declared = {"use_dora": meaning.dora, "lora_bias": meaning.lora_bias}
    return [
        f"{module}: the config says {field}=True, experts cannot have it; correct it"
        for field, value in declared.items()
        if value
    ]


def _three_axes_faults(module: str, a: Tensor, b: Tensor) -> list[str]:
    found = [
        f"{module}: {tensor.name} has shape {tensor.array.shape}, expected (experts or "
        f"1, {axes}), none of them empty"
        for tensor, axes in ((a, "rank, width"), (b, "width, rank"))
        if tensor.array.ndim != 3 or 0 in tensor.array.shape
    ]
    if found:
        return found
    experts = {a.array.shape[0], b.array.shape[0]} - {1}
    if len(experts) > 1:
        found.append(
            f"{module}: lora_A {a.array.shape} and lora_B {b.array.shape} are of "
            f"{a.array.shape[0]} and {b.array.shape[0]} experts; expected as many, or 1"
        )
    if a.array.shape[1] != b.array.shape[2]:
        found.append(
            f"{module}: rank {a.array.shape[1]} of lora_A {a.array.shape} is not the "
            f"rank {b.array.shape[2]} of lora_B {b.array.shape}"
        )
    return found
