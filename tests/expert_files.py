"""Adapter files for experts in every layout, each with the change that it means.

A case draws factors, says what they add to each expert's dense weights (float64, as
`(experts, d_out, d_in)`), and writes them as the named layout does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

BLOCK = "model.layers.0.mlp"
EXPERTS = f"{BLOCK}.experts"
ALPHA = 6.0


@dataclass(frozen=True)
class Sizes:
    """Experts, width of tokens and width inside an expert."""

    experts: int
    d: int
    width: int
    interleaved: bool = False


@dataclass(frozen=True)
class File:
    """Tensors, config, and what they add: "gate", "up", "down" and "router"."""

    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, object]
    deltas: Mapping[str, np.ndarray]


def _normal(rng, *shape):
    return (0.5 * rng.standard_normal(shape)).astype(np.float32)


def _product(b, a, rank):
    """Of stacked factors: `(experts, d_out, d_in)`."""
    return (ALPHA / rank) * (b.astype(np.float64) @ a.astype(np.float64))


def _pairs(rng, sizes, rank, names, *, leave_out=()):
    """One pair for each expert and projection, apart from those left out."""
    gate, up, down = names
    widths = {
        gate: (sizes.d, sizes.width),
        up: (sizes.d, sizes.width),
        down: (sizes.width, sizes.d),
    }
    tensors, deltas = {}, {}
    for name, role in zip(names, ("gate", "up", "down"), strict=True):
        d_in, d_out = widths[name]
        deltas[role] = np.zeros((sizes.experts, d_out, d_in))
        for expert in range(sizes.experts):
            if (expert, role) in leave_out:
                continue
            a, b = _normal(rng, rank, d_in), _normal(rng, d_out, rank)
            tensors[f"{EXPERTS}.{expert}.{name}.lora_A.weight"] = a
            tensors[f"{EXPERTS}.{expert}.{name}.lora_B.weight"] = b
            deltas[role][expert] = _product(b, a, rank)
    return tensors, deltas


def _flat(a, b, *, swapped):
    """PEFT's flat factors: experts slowest in A, fastest in B."""
    first, second = (b.swapaxes(1, 2), a.swapaxes(1, 2)) if swapped else (a, b)
    return np.concatenate(list(first)), np.stack(list(second), axis=-1).reshape(
        second.shape[1], -1
    )


def _halves(sizes, delta):
    """A gate_up of a file cut into gate and up: halves, or even and odd rows."""
    if sizes.interleaved:
        return {"gate": delta[:, 0::2], "up": delta[:, 1::2]}
    return {"gate": delta[:, : sizes.width], "up": delta[:, sizes.width :]}


def _fused(rng, sizes, rank, *, swapped=False, only=None):
    """PEFT's `target_parameters`, both parameters or only one of them."""
    e, d, w = sizes.experts, sizes.d, sizes.width
    tensors, deltas = {}, {}
    for name, d_in, d_out in (("gate_up_proj", d, 2 * w), ("down_proj", w, d)):
        if only not in (None, name):
            continue
        a, b = _normal(rng, e, rank, d_in), _normal(rng, e, d_out, rank)
        inner = name == "gate_up_proj" and only is None
        module = f"{EXPERTS}.base_layer" if inner else EXPERTS
        flat_a, flat_b = _flat(a, b, swapped=swapped)
        tensors[f"{module}.lora_A.weight"] = flat_a
        tensors[f"{module}.lora_B.weight"] = flat_b
        delta = _product(b, a, rank)
        is_down = name == "down_proj"
        deltas |= {"down": delta} if is_down else _halves(sizes, delta)
    return tensors, deltas


def pairs(rng, sizes, rank):
    tensors, deltas = _pairs(rng, sizes, rank, ("gate_proj", "up_proj", "down_proj"))
    return File(tensors, {"r": rank}, deltas)


def mixtral_names(rng, sizes, rank):
    tensors, deltas = _pairs(rng, sizes, rank, ("w1", "w3", "w2"))
    old = {n.replace(".mlp.", ".block_sparse_moe."): t for n, t in tensors.items()}
    return File(old, {"r": rank}, deltas)


def some_experts(rng, sizes, rank):
    gone = {(0, "gate"), (0, "up"), (0, "down"), (1, "up"), (2, "down")}
    names = ("gate_proj", "up_proj", "down_proj")
    tensors, deltas = _pairs(rng, sizes, rank, names, leave_out=gone)
    return File(tensors, {"r": rank}, deltas)


def own_alphas(rng, sizes, rank):
    names = ("gate_proj", "up_proj", "down_proj")
    tensors, deltas = _pairs(rng, sizes, rank, names)
    deltas["down"][1] *= 2.5
    deltas["up"] *= 0.5
    pattern = {r"experts\.1\.down_proj": 2.5 * ALPHA, "up_proj": 0.5 * ALPHA}
    return File(tensors, {"r": rank, "alpha_pattern": pattern}, deltas)


def own_ranks(rng, sizes, rank):
    """Another rank for each projection, and for one expert."""
    tensors, deltas = {}, {}
    ranks = {"gate_proj": rank, "up_proj": rank + 1, "down_proj": rank + 2}
    widths = {"gate": (sizes.d, sizes.width), "up": (sizes.d, sizes.width)}
    widths["down"] = (sizes.width, sizes.d)
    for name, (role, (d_in, d_out)) in zip(ranks, widths.items(), strict=True):
        deltas[role] = np.zeros((sizes.experts, d_out, d_in))
        for expert in range(sizes.experts):
            own = 1 if (expert, role) == (1, "down") else ranks[name]
            a, b = _normal(rng, own, d_in), _normal(rng, d_out, own)
            tensors[f"{EXPERTS}.{expert}.{name}.lora_A.weight"] = a
            tensors[f"{EXPERTS}.{expert}.{name}.lora_B.weight"] = b
            deltas[role][expert] = _product(b, a, own)
    pattern = {r"experts\.1\.down_proj": 1, **ranks}
    return File(tensors, {"r": rank, "rank_pattern": pattern}, deltas)


def _named(*names):
    return {"target_parameters": [f"mlp.experts.{name}" for name in names]}


def fused(rng, sizes, rank):
    tensors, deltas = _fused(rng, sizes, rank)
    config = {"r": rank, "peft_version": "0.21.2"}
    return File(tensors, config | _named("gate_up_proj", "down_proj"), deltas)


def fused_reversed(rng, sizes, rank):
    tensors, deltas = _fused(rng, sizes, rank)
    return File(tensors, {"r": rank} | _named("down_proj", "gate_up_proj"), deltas)


def fused_by_old_peft(rng, sizes, rank):
    tensors, deltas = _fused(rng, sizes, rank, swapped=True)
    config = {"r": rank, "peft_version": "0.18.1"}
    return File(tensors, config | _named("gate_up_proj", "down_proj"), deltas)


def gate_up_only(rng, sizes, rank):
    tensors, deltas = _fused(rng, sizes, rank, only="gate_up_proj")
    return File(tensors, {"r": rank} | _named("gate_up_proj"), deltas)


def down_only(rng, sizes, rank):
    tensors, deltas = _fused(rng, sizes, rank, only="down_proj")
    return File(tensors, {"r": rank} | _named("down_proj"), deltas)


def gate_up_unnamed(rng, sizes, rank):
    tensors, deltas = _fused(rng, sizes, rank, only="gate_up_proj")
    return File(tensors, {"r": rank}, deltas)


def doubled_rank(rng, sizes, rank):
    """What PEFT makes of per-expert gate and up: block-diagonal, rank 2r, alpha 2a."""
    e, w = sizes.experts, sizes.width
    names = ("gate_proj", "up_proj", "down_proj")
    tensors, deltas = _pairs(rng, sizes, rank, names)

    def stacked(name, factor):
        keys = [f"{EXPERTS}.{i}.{name}.lora_{factor}.weight" for i in range(e)]
        return np.stack([tensors[key] for key in keys])

    a = np.concatenate([stacked("gate_proj", "A"), stacked("up_proj", "A")], axis=1)
    b = np.zeros((e, 2 * w, 2 * rank), np.float32)
    b[:, :w, :rank], b[:, w:, rank:] = (
        stacked("gate_proj", "B"),
        stacked("up_proj", "B"),
    )
    flat = {}
    for module, pair in (
        (f"{EXPERTS}.base_layer", _flat(a, b, swapped=False)),
        (
            EXPERTS,
            _flat(stacked("down_proj", "A"), stacked("down_proj", "B"), swapped=False),
        ),
    ):
        flat[f"{module}.lora_A.weight"], flat[f"{module}.lora_B.weight"] = pair
    config = {
        "r": rank,
        "rank_pattern": {r".*\.gate_up_proj": 2 * rank},
        "alpha_pattern": {r".*\.gate_up_proj": 2 * ALPHA},
    }
    return File(flat, config | _named("gate_up_proj", "down_proj"), deltas)


def shared_outer(rng, sizes, rank):
    """A of gate and up and B of down shared by all experts, in three axes."""
    e, d, w = sizes.experts, sizes.d, sizes.width
    tensors, deltas = {}, {}
    for name, role, a_experts, b_experts, d_in, d_out in (
        ("w1", "gate", 1, e, d, w),
        ("w3", "up", 1, e, d, w),
        ("w2", "down", e, 1, w, d),
    ):
        a, b = _normal(rng, a_experts, rank, d_in), _normal(rng, b_experts, d_out, rank)
        tensors[f"{EXPERTS}.{name}.lora_A.weight"] = a
        tensors[f"{EXPERTS}.{name}.lora_B.weight"] = b
        deltas[role] = np.broadcast_to(_product(b, a, rank), (e, d_out, d_in))
    return File(tensors, {"r": rank}, deltas)


def _per_expert_fused(rng, sizes, rank, gate_up, down):
    tensors, deltas = {}, {}
    d_ups, d_downs = [], []
    for expert in range(sizes.experts):
        for template, widths, into in (
            (gate_up, (sizes.d, 2 * sizes.width), d_ups),
            (down, (sizes.width, sizes.d), d_downs),
        ):
            d_in, d_out = widths
            a, b = _normal(rng, rank, d_in), _normal(rng, d_out, rank)
            module = f"{EXPERTS}.{template.format(expert)}"
            tensors[f"{module}.lora_A.weight"] = a
            tensors[f"{module}.lora_B.weight"] = b
            into.append(_product(b, a, rank))
    deltas = _halves(sizes, np.stack(d_ups)) | {"down": np.stack(d_downs)}
    return File(tensors, {"r": rank}, deltas)


def fused_in_each_expert(rng, sizes, rank):
    return _per_expert_fused(rng, sizes, rank, "{}.gate_up_proj", "{}.down_proj")


def lists_of_experts(rng, sizes, rank):
    """Names of gpt-oss in 4 bits: each projection a list of experts."""
    return _per_expert_fused(rng, sizes, rank, "gate_up_projs.{}", "down_projs.{}")


def router(rng, sizes, rank):
    a, b = _normal(rng, rank, sizes.d), _normal(rng, sizes.experts, rank)
    names = {f"{BLOCK}.gate.lora_A.weight": a, f"{BLOCK}.gate.lora_B.weight": b}
    config = {"r": rank, "target_parameters": ["mlp.gate.weight"]}
    return File(names, config, {"router": _product(b, a, rank)})


def router_and_experts(rng, sizes, rank):
    first, second = router(rng, sizes, rank), fused(rng, sizes, rank)
    targets = [*first.config["target_parameters"], *second.config["target_parameters"]]
    config = {**second.config, "target_parameters": targets}
    tensors = {**first.tensors, **second.tensors}
    return File(tensors, config, {**first.deltas, **second.deltas})


FILES = {
    make.__name__: make
    for make in (
        pairs,
        mixtral_names,
        some_experts,
        own_alphas,
        own_ranks,
        fused,
        fused_reversed,
        fused_by_old_peft,
        gate_up_only,
        down_only,
        gate_up_unnamed,
        doubled_rank,
        shared_outer,
        fused_in_each_expert,
        lists_of_experts,
        router,
        router_and_experts,
    )
}
"""Every layout of a gated mixture."""
