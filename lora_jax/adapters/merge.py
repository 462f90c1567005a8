"""Adapters and a model's folder -> a folder of the merged model.

Sums are made in float32 and rounded once, to the dtype of the base's tensor or to the
one asked for; the report says what the rounding cost. A head tied to the embedding is
untied when the two come to differ.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lora_jax.adapters.adapter import Adapter
from lora_jax.adapters.base_folder import BaseFolder, open_base
from lora_jax.adapters.delta import Layer, merge_part
from lora_jax.adapters.expert_tensors import Place, expert_places
from lora_jax.adapters.merge_experts import Update, find_experts, merge_tensor
from lora_jax.adapters.merged_folder import DTYPES, Merged, write_merged
from lora_jax.adapters.names import match_modules
from lora_jax.adapters.parts import AdapterPart, FullModule, TokenRows
from lora_jax.errors import AdapterError, faults

HEAD = "lm_head"
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
CONV1D_LAYERS = ("c_attn", "c_proj", "c_fc", "q_attn")


@dataclass(frozen=True)
class MergedModule:
    """What merging did to one module.

    Attributes:
      module: module path in the base; a tensor of all experts counts as a module.
      change: length of the change over the length of the base weight.
      loss: length of the rounding error over the length of the change; 1 would mean
        that rounding lost as much as the adapter gave.
    """

    module: str
    change: float
    loss: float


@dataclass(frozen=True)
class MergeReport:
    """What merging did: each module, and whether the head was untied."""

    modules: tuple[MergedModule, ...]
    untied: bool

    @property
    def loss(self) -> float:
        """The largest relative loss of any module."""
        return max((module.loss for module in self.modules), default=0.0)


Weighted = tuple[float, AdapterPart]


@dataclass
class _Plan:
    """Which parts go into which module; used by one call of `merge_adapters` only.

    Updates of experts go by tensor, because one tensor may hold all of them.
    """

    base: BaseFolder
    embed: str
    head: str
    untied: bool = False
    parts: dict[str, list[Weighted]] = field(default_factory=dict)
    updates: dict[str, list[Update]] = field(default_factory=dict)
    done: list[MergedModule] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def merge_adapters(
    base: str | os.PathLike[str],
    adapters: Sequence[Adapter],
    output: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    dtype: str | None = None,
) -> MergeReport:
    """Writes the model with the adapters in its weights.

    With several adapters the new weight is `W + sum(weight * (merged(W) - W))`.

    Args:
      base: folder of the base model, safetensors.
      adapters: at least one.
      output: a new or empty folder.
      weights: factor of each adapter, 1.0 if None.
      dtype: "float32", "float16" or "bfloat16" for all tensors; None keeps each one's.

    Returns:
      What each module changed by, and what rounding lost.

    Raises:
      AdapterError: naming every part that the base has no place for, before anything is
        written.
      ModelError: if the base cannot be read.
    """
    plan = _plan(open_base(Path(base).expanduser()), adapters, weights, dtype)
    target = Path(output).expanduser()
    if target.exists() and any(target.iterdir()):
        raise AdapterError(f"{target}: is not empty; give a new folder.")
    layers = {module: _merge_module(plan, module, dtype) for module in plan.parts}
    experts = {name: _merge_experts(plan, name, dtype) for name in plan.updates}
    if plan.faults:
        names = ", ".join(repr(adapter.name) for adapter in adapters)
        headline = f"adapter {names} cannot be merged into {plan.base.path}:"
        raise AdapterError(faults(headline, plan.faults))
    whole = {module: layer for module, layer in layers.items() if layer is not None}
    merged = Merged(
        plan.base, whole, experts, plan.embed, plan.head, plan.untied, dtype
    )
    write_merged(merged, target)
    return MergeReport(tuple(plan.done), plan.untied)


def _plan(
    base: BaseFolder,
    adapters: Sequence[Adapter],
    weights: Sequence[float] | None,
    dtype: str | None,
) -> _Plan:
    if dtype is not None and dtype not in DTYPES:
        raise AdapterError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}.")
    if not adapters or (weights is not None and len(weights) != len(adapters)):
        raise AdapterError(
            f"{len(adapters)} adapters with {len(weights or ())} weights; give one or "
            "more adapters, and as many weights or None."
        )
    modules = {n.removesuffix(".weight") for n in base.shapes if n.endswith(".weight")}
    embed = next((m for m in sorted(modules) if m.endswith("embed_tokens")), "")
    head = next((m for m in sorted(modules) if m.endswith(HEAD)), HEAD)
    plan = _Plan(base, embed, head)
    known = modules | ({HEAD} if base.is_tied else set())
    places = expert_places(base.shapes, base.config.get("model_type"))
    for adapter, weight in zip(adapters, weights or [1.0] * len(adapters), strict=True):
        _add_parts(plan, adapter, weight, known, places)
    plan.faults += [
        f"{module}: adapters of this kind and low-rank ones cannot be merged together"
        for module in plan.parts
        if f"{module}.weight" in plan.updates
    ]
    if base.is_tied:
        _untie(plan)
    if len(adapters) > 1 or (weights is not None and set(weights) != {1.0}):
        _refuse_resizing(plan)
    return plan


def _add_parts(
    plan: _Plan,
    adapter: Adapter,
    weight: float,
    known: set[str],
    places: Mapping[str, Place],
) -> None:
    plan.faults += _copy_faults(plan, adapter, known)
    if adapter.is_partial:
        plan.faults.append(
            f"{adapter.name}: experts of it were not read; load it whole"
        )
    experts = find_experts(adapter.parts, weight, places)
    plan.faults += experts.faults
    for update in experts.updates:
        plan.updates.setdefault(update.rows.tensor, []).append(update)
    others = [module for module in adapter.parts if module not in experts.modules]
    matched, unmatched = match_modules(others, known)
    plan.faults += [f"{module}: is no module of the base" for module in unmatched]
    if adapter.invocation_tokens:
        text = "alora_invocation_tokens: an adapter that waits for tokens has no merge"
        plan.faults.append(text)
    for module, name in matched.items():
        plan.parts.setdefault(name, []).append((weight, adapter.parts[module]))


def _copy_faults(plan: _Plan, adapter: Adapter, known: set[str]) -> list[str]:
    """Base layers that the file carries and that are not this base's."""
    found = []
    for module, name in match_modules(adapter.base_copies, known)[0].items():
        tied = name == plan.head and plan.base.is_tied
        weight = plan.base.read(f"{plan.embed if tied else name}.weight")
        difference = adapter.base_copies[module].difference(weight)
        if difference is not None:
            found.append(f"{module}: was trained on another base: {difference}")
    return found


def _untie(plan: _Plan) -> None:
    """Gives the head parts of its own if it comes to differ from the embedding."""
    of_embed = plan.parts.get(plan.embed, [])
    rows = [item for item in of_embed if isinstance(item[1], TokenRows)]
    plan.untied = plan.head in plan.parts or len(rows) < len(of_embed)
    if plan.untied:
        plan.parts[plan.head] = rows + plan.parts.get(plan.head, [])


def _refuse_resizing(plan: _Plan) -> None:
    for module, parts in plan.parts.items():
        shape = plan.base.shapes.get(f"{module}.weight")
        for _, part in parts:
            if isinstance(part, FullModule) and part.weight.shape != shape:
                plan.faults.append(f"{module}: several adapters cannot resize a module")


def _merge_module(plan: _Plan, module: str, dtype: str | None) -> Layer | None:
    """Returns the rounded layer; None after a fault."""
    tied = plan.untied and module == plan.head
    source = plan.embed if tied else module
    stored = plan.base.read(f"{source}.weight")
    bias = None
    if f"{module}.bias" in plan.base.shapes:
        bias = plan.base.read(f"{module}.bias").astype(np.float32)
    flip = _is_input_major(plan.base, module)
    layer = Layer(_turn(stored.astype(np.float32), flip), bias)
    try:
        whole = _sum(layer, plan.parts[module])
    except AdapterError as error:
        plan.faults.append(f"{module}: {error}")
        return None
    target = DTYPES[dtype] if dtype else stored.dtype
    with np.errstate(over="ignore"):  # told below, by module
        rounded = whole.weight.astype(target)
    plan.done.append(_measure(module, layer.weight, whole.weight, rounded))
    if not np.isfinite(rounded).all():
        plan.faults.append(_overflow(module, target))
    return Layer(
        _turn(rounded, flip), None if whole.bias is None else whole.bias.astype(target)
    )


def _merge_experts(plan: _Plan, name: str, dtype: str | None) -> np.ndarray:
    """Returns a tensor of experts with its updates, rounded."""
    stored = plan.base.read(name)
    target = DTYPES[dtype] if dtype else stored.dtype
    merged = merge_tensor(stored, plan.updates[name], target)
    module = name.removesuffix(".weight")
    plan.done.append(_measured(module, merged.before, merged.change, merged.error))
    if not np.isfinite(merged.values).all():
        plan.faults.append(_overflow(module, target))
    return merged.values


def _is_input_major(base: BaseFolder, module: str) -> bool:
    """Whether the checkpoint stores this layer as (d_in, d_out), as GPT-2's Conv1D."""
    return base.config.get("model_type") in CONV1D_MODELS and (
        module.rpartition(".")[2] in CONV1D_LAYERS
    )


def _turn(weight: np.ndarray, flip: bool) -> np.ndarray:
    return weight.T if flip else weight


def _sum(layer: Layer, parts: Sequence[Weighted]) -> Layer:
    if len(parts) == 1 and parts[0][0] == 1.0:
        return merge_part(parts[0][1], layer)
    if all(isinstance(part, TokenRows) for _, part in parts[:-1]) and len(parts) == 2:
        # Rows of a head that was tied come first, its own update after them.
        if all(weight == 1.0 for weight, _ in parts):
            return merge_part(parts[1][1], merge_part(parts[0][1], layer))
    weight, bias = layer.weight, layer.bias
    for factor, part in parts:
        own = merge_part(part, layer)
        weight = weight + np.float32(factor) * (own.weight - layer.weight)
        if bias is not None and own.bias is not None and layer.bias is not None:
            bias = bias + np.float32(factor) * (own.bias - layer.bias)
    return Layer(weight, bias)


def _measure(
    module: str, before: np.ndarray, after: np.ndarray, rounded: np.ndarray
) -> MergedModule:
    rows = min(len(before), len(after))
    change = float(np.linalg.norm(after[:rows] - before[:rows]))
    error = float(np.linalg.norm(after - rounded.astype(np.float32)))
    return _measured(module, float(np.linalg.norm(before)), change, error)


def _measured(module: str, before: float, change: float, error: float) -> MergedModule:
    share = change / before if before else np.inf
    return MergedModule(module, share, error / change if change else 0.0)


def _overflow(module: str, target: np.dtype) -> str:
    return f"{module}: overflows {target}; ask for a wider dtype"
