"""The named lists of workloads that the benchmark runs."""

import dataclasses

from lora_kernels.lora_delta.specs import (
    DISTRIBUTIONS,
    EXPERT_MODELS,
    Spec,
    expert_specs,
    site_specs,
)

SQUARE = Spec(name="square-2048", tokens=1, slots=8, d_in=2048, part_widths=(2048,))
"""One projection of a 1B-class model; eight slots."""


def by_tokens(workload: Spec, tokens: tuple[int, ...]) -> tuple[Spec, ...]:
    """Returns the workload at each number of tokens, named `name/t<tokens>`."""
    return tuple(
        dataclasses.replace(workload, name=f"{workload.name}/t{count}", tokens=count)
        for count in tokens
    )


def suites() -> dict[str, tuple[Spec, ...]]:
    """Returns the named lists of workloads that the benchmark runs.

    tokens: one projection, one to 512 tokens, eight adapters, all in the batch.
    smollm2: decode and prefill of SmolLM2-135M at its four fused sites.
    mixes: how the time of 32 decode rows over 32 slots depends on who is in the batch.
    ranks: 32 rows of rank 8 where slots have room for 8 and for 256, and 31 beside one
      of rank 256: a rank-8 row should cost what rank 8 costs.
    llama3: decode and prefill of Llama-3-8B in bfloat16; for GPUs.
    experts: the same of the experts of three models, with four adapters; for GPUs.
    """
    eight = dataclasses.replace(SQUARE, distribution="distinct")
    many = dataclasses.replace(SQUARE, slots=32, tokens=32)
    all_8 = dataclasses.replace(many, ranks=(8,), distribution="distinct")
    decode = Spec(name="decode-t16", tokens=16, slots=8, distribution="distinct")
    prefill = dataclasses.replace(decode, name="prefill-t512", tokens=512)
    large = Spec(name="", tokens=1, slots=32, dtype="bfloat16", distribution="distinct")
    steps = [
        dataclasses.replace(large, name=name, tokens=tokens)
        for name, tokens in [("decode-t32", 32), ("prefill-t2048", 2048)]
    ]
    return {
        "tokens": by_tokens(eight, (1, 8, 32, 128, 512)),
        "smollm2": (
            *site_specs("smollm2-135m", decode),
            *site_specs("smollm2-135m", prefill),
        ),
        "mixes": tuple(
            dataclasses.replace(many, name=f"mix/{mix}", distribution=mix)
            for mix in DISTRIBUTIONS
        ),
        "ranks": tuple(
            dataclasses.replace(all_8, name=f"ranks/{name}", ranks=ranks, max_rank=room)
            for name, ranks, room in [
                ("all-8-room-8", (8,), 8),
                ("all-8-room-256", (8,), 256),
                ("one-256-room-256", (8,) * 31 + (256,), 256),
            ]
        ),
        "llama3": tuple(
            spec for step in steps for spec in site_specs("llama-3-8b", step)
        ),
        "experts": tuple(
            spec
            for step in steps
            for model in EXPERT_MODELS
            for spec in expert_specs(model, dataclasses.replace(step, slots=4))
        ),
    }
