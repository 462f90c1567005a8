"""Named workloads of `lora_delta`: real sites, ranks and mixes of adapters.

The same data serve the tests, the benchmark and the tuning. Arrays are NumPy's, drawn
from a seed; a spec itself is plain numbers.
"""

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes
import numpy as np

DISTRIBUTIONS = (
    "identical",
    "distinct",
    "uniform",
    "skewed",
    "zipf",
    "half_base",
    "all_base",
)
"""How rows fall to slots: `slots_of_rows`."""

SKEW = 1.5
"""Ratio of successive group sizes in Punica's skewed distribution."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One workload.

    Attributes:
      name: what the benchmark calls it.
      tokens, slots, d_in, part_widths: sizes of the arguments.
      ranks: true ranks, dealt in turn to the slots' parts; 0 = part absent.
      max_rank: rank axis of the slot arrays; None = the largest of `ranks`.
      distribution: one of `DISTRIBUTIONS`.
      shuffled: whether rows of one slot are scattered over the batch.
      dtype: of x, y, a and b.
    """

    name: str
    tokens: int
    slots: int
    d_in: int = 1
    part_widths: tuple[int, ...] = (1,)
    ranks: tuple[int, ...] = (16,)
    max_rank: int | None = None
    distribution: str = "uniform"
    shuffled: bool = True
    dtype: str = "float32"

    @property
    def rank_axis(self) -> int:
        """Length of the rank axis of a and b."""
        return max(self.ranks) if self.max_rank is None else self.max_rank


class Arrays(NamedTuple):
    """NumPy arguments of `lora_delta`; `slot` is what `make_routing` takes."""

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    weight: np.ndarray


def arrays_of(spec: Spec, *, seed: int = 0) -> Arrays:
    """Returns the arguments of a workload, zeros in the rank tails.

    x and y are normal; a and b are scaled so that every update has y's size.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    rank, d_out = ranks_of(spec), sum(spec.part_widths)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    row = np.arange(spec.rank_axis)
    a = normal(*rank.shape, spec.rank_axis, spec.d_in) / np.sqrt(spec.d_in)
    a = np.where((row < rank[:, :, None])[..., None], a, 0)
    b = normal(spec.slots, spec.rank_axis, d_out)
    rank_of_column = np.repeat(rank, spec.part_widths, axis=1)  # [s, d_out]
    b = np.where(row[None, :, None] < rank_of_column[:, None, :], b, 0)
    scale = (0.5 + rng.random(rank.shape)) / np.sqrt(np.maximum(rank, 1))
    return Arrays(
        x=normal(spec.tokens, spec.d_in).astype(dtype),
        y=normal(spec.tokens, d_out).astype(dtype),
        a=a.astype(dtype),
        b=b.astype(dtype),
        scale=scale.astype(np.float32),
        rank=rank,
        slot=slots_of_rows(spec, rng),
        weight=(0.5 + rng.random(spec.tokens)).astype(np.float32),
    )


def ranks_of(spec: Spec) -> np.ndarray:
    """Returns the true rank of each slot and part, `(slots, parts)` int32."""
    ranks = np.array(spec.ranks, np.int32)
    return np.resize(ranks, (spec.slots, len(spec.part_widths)))


def slots_of_rows(spec: Spec, rng: np.random.Generator) -> np.ndarray:
    """Returns the slot of each row, `(tokens,)` int32, -1 for base rows.

    identical: all rows one slot. distinct: as many slots as there are. uniform:
    `sqrt(tokens)` slots, equal shares. skewed: geometric shares. zipf: shares `1 / k`.
    half_base: uniform, every other row base. Source: Punica's benchmark, S-LoRA.
    """
    rows = np.arange(spec.tokens)
    groups = min(spec.slots, max(1, int(np.ceil(np.sqrt(spec.tokens)))))
    shares = {
        "skewed": SKEW ** -np.arange(spec.slots, dtype=float),
        "zipf": 1.0 / (1 + np.arange(spec.slots)),
    }
    match spec.distribution:
        case "identical":
            slot = np.full(spec.tokens, spec.slots // 2)
        case "distinct":
            slot = rows % spec.slots
        case "uniform" | "half_base":
            slot = rows % groups
        case "skewed" | "zipf":
            share = shares[spec.distribution]
            slot = rng.choice(spec.slots, spec.tokens, p=share / share.sum())
        case "all_base":
            slot = np.full(spec.tokens, -1)
        case other:
            raise ValueError(f"unknown distribution {other!r}; known: {DISTRIBUTIONS}")
    slot = np.sort(slot)
    if spec.distribution == "half_base":
        slot[::2] = -1
    if spec.shuffled:
        rng.shuffle(slot)
    return slot.astype(np.int32)


SITES = MappingProxyType(
    {
        "smollm2-135m": MappingProxyType(
            {
                "qkv": (576, (576, 192, 192)),
                "o": (576, (576,)),
                "gate_up": (576, (1536, 1536)),
                "down": (1536, (576,)),
            }
        ),
        "llama-3.2-1b": MappingProxyType(
            {
                "qkv": (2048, (2048, 512, 512)),
                "o": (2048, (2048,)),
                "gate_up": (2048, (8192, 8192)),
                "down": (8192, (2048,)),
            }
        ),
        "llama-3-8b": MappingProxyType(
            {
                "qkv": (4096, (4096, 1024, 1024)),
                "o": (4096, (4096,)),
                "gate_up": (4096, (14336, 14336)),
                "down": (14336, (4096,)),
            }
        ),
    }
)
"""Model -> fused site -> `d_in` and the parts' widths."""


def site_specs(model: str, workload: Spec) -> tuple[Spec, ...]:
    """Returns the workload at each fused site of a model, named `model/site/name`.

    Args:
      model: a key of `SITES`.
      workload: everything but `d_in` and `part_widths`, which are the site's.
    """
    return tuple(
        dataclasses.replace(
            workload,
            name=f"{model}/{site}/{workload.name}",
            d_in=d_in,
            part_widths=part_widths,
        )
        for site, (d_in, part_widths) in SITES[model].items()
    )


class ExpertModel(NamedTuple):
    """How many experts a layer has, how many a token chooses, and their sites."""

    experts: int
    chosen: int
    sites: dict[str, tuple[int, tuple[int, ...]]]


EXPERT_MODELS = MappingProxyType(
    {
        name: ExpertModel(
            experts,
            chosen,
            {"gate_up": (hidden, (width, width)), "down": (width, (hidden,))},
        )
        for name, experts, chosen, hidden, width in [
            ("mixtral-8x7b", 8, 2, 4096, 14336),
            ("qwen3-30b-a3b", 128, 8, 2048, 768),
            ("gpt-oss-20b", 32, 4, 2880, 2880),
        ]
    }
)
"""Models whose experts `lora_experts` adapts."""


def expert_specs(model: str, workload: Spec) -> tuple[Spec, ...]:
    """Returns the workload at a model's experts, as `lora_delta` computes it.

    A token and an expert that it chose are a row, an adapter and an expert are a slot.
    Rows of x that a token's experts share are counted once for each.

    Args:
      model: a key of `EXPERT_MODELS`.
      workload: its `tokens` and `slots` are those of the dense layers.
    """
    experts, chosen, sites = EXPERT_MODELS[model]
    return tuple(
        dataclasses.replace(
            workload,
            name=f"{model}/{site}/{workload.name}",
            tokens=workload.tokens * chosen,
            slots=workload.slots * experts,
            d_in=d_in,
            part_widths=part_widths,
        )
        for site, (d_in, part_widths) in sites.items()
    )
