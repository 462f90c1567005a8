"""Cases of `lora_experts` as data, and the answer in float64, expert by expert."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels import make_routing, pair_routing
from lora_kernels.lora_delta.specs import Arrays, Spec, arrays_of, slots_of_rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `lora_experts`.

    Attributes:
      chosen: experts of each token.
      ranks: dealt in turn to slots, experts and parts; 0 = expert or part absent.
      distribution: how tokens fall to slots, as in `Spec`.
      row_for_each_pair: x is an expert's second input, not shared by its token's pairs.
      remote: part of the pairs whose expert is elsewhere.
    """

    name: str
    tokens: int
    chosen: int
    experts: int
    slots: int
    d_in: int
    part_widths: tuple[int, ...]
    ranks: tuple[int, ...]
    max_rank: int | None = None
    distribution: str = "distinct"
    row_for_each_pair: bool = False
    remote: float = 0.0
    dtype: str = "float32"

    @property
    def spec(self) -> Spec:
        """The pairs as a workload of `lora_delta`; only its routing is not the one."""
        return Spec(
            name=self.name,
            tokens=self.tokens * self.chosen,
            slots=self.slots * self.experts,
            d_in=self.d_in,
            part_widths=self.part_widths,
            ranks=self.ranks,
            max_rank=self.max_rank,
            dtype=self.dtype,
        )


class ExpertArrays(NamedTuple):
    """NumPy arguments of `lora_experts`; slot and weight of tokens, expert of pairs."""

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray
    rank: np.ndarray
    slot: np.ndarray
    weight: np.ndarray
    expert: np.ndarray

    @property
    def chosen(self) -> int:
        """Experts of each token."""
        return len(self.expert) // max(len(self.slot), 1)

    @property
    def virtual(self) -> Arrays:
        """The same as arguments of `lora_delta`: x repeated, experts as slots."""
        slots, experts = self.a.shape[:2]
        slot = np.repeat(self.slot, self.chosen)
        here = (slot >= 0) & (self.expert >= 0) & (self.expert < experts)
        repeats = len(self.expert) // max(len(self.x), 1)
        flat = [
            array.reshape(slots * experts, *array.shape[2:])
            for array in (self.a, self.b, self.scale, self.rank)
        ]
        return Arrays(
            np.repeat(self.x, repeats, axis=0),
            self.y,
            *flat,
            np.where(here, slot * experts + self.expert, -1).astype(np.int32),
            np.repeat(self.weight, self.chosen),
        )


def expert_arrays(case: Case, *, seed: int = 0) -> ExpertArrays:
    """Returns the arguments of a case, zeros in the rank tails."""
    rng = np.random.default_rng(seed)
    flat = arrays_of(case.spec, seed=seed)
    of_tokens = Spec(
        name="",
        tokens=case.tokens,
        slots=case.slots,
        distribution=case.distribution,
    )
    choices = [rng.permutation(case.experts)[: case.chosen] for _ in range(case.tokens)]
    expert = np.array(choices, np.int32).reshape(-1)
    away = rng.random(len(expert)) < case.remote
    elsewhere = rng.choice([-1, case.experts, 2**30], len(expert))
    a, b, scale, rank = (
        array.reshape(case.slots, case.experts, *array.shape[1:])
        for array in (flat.a, flat.b, flat.scale, flat.rank)
    )
    rows = case.tokens * (case.chosen if case.row_for_each_pair else 1)
    return ExpertArrays(
        x=flat.x[:rows],
        y=flat.y,
        a=a,
        b=b,
        scale=scale,
        rank=rank,
        slot=slots_of_rows(of_tokens, rng),
        weight=flat.weight[: case.tokens],
        expert=np.where(away, elsewhere, expert).astype(np.int32),
    )


def expected_experts(arrays: ExpertArrays, part_widths: tuple[int, ...]) -> np.ndarray:
    """Returns the output in float64: one dense update for each adapter and expert."""
    x, y, a, b, scale = (np.asarray(field, np.float64) for field in arrays[:5])
    out = y.copy()
    slot, weight = (
        np.repeat(field, arrays.chosen) for field in (arrays.slot, arrays.weight)
    )
    row = np.arange(len(y)) // (len(y) // max(len(x), 1) or 1)
    stops = np.cumsum(part_widths)
    for s, e in np.ndindex(a.shape[:2]):
        pairs = np.flatnonzero((slot == s) & (arrays.expert == e))
        dense = np.zeros((x.shape[1], y.shape[1]))
        for part, (width, stop) in enumerate(zip(part_widths, stops, strict=True)):
            rank, columns = arrays.rank[s, e, part], slice(stop - width, stop)
            product = a[s, e, part, :rank].T @ b[s, e, :rank, columns]
            dense[:, columns] = product * scale[s, e, part]
        out[pairs] += x[row[pairs]] @ dense * weight[pairs, None]
    return out


def untouched(arrays: ExpertArrays) -> np.ndarray:
    """Returns which pairs have no adapter: they keep y bit for bit."""
    return arrays.virtual.slot < 0


def expert_arguments(
    arrays: ExpertArrays, part_widths: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], dict[str, object]]:
    """Returns what `lora_experts` takes: positional and keyword arguments."""
    slots, experts = arrays.a.shape[:2]
    tokens = make_routing(
        jnp.asarray(arrays.slot), slots, weight=jnp.asarray(arrays.weight)
    )
    keywords = {
        "scale": jnp.asarray(arrays.scale),
        "rank": jnp.asarray(arrays.rank),
        "routing": pair_routing(tokens, jnp.asarray(arrays.expert), experts),
        "part_widths": part_widths,
    }
    return tuple(jnp.asarray(field) for field in arrays[:4]), keywords


def backend_arguments(
    arrays: ExpertArrays, part_widths: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], dict[str, object]]:
    """Returns what `lora_experts` hands to a backend of `lora_delta`."""
    (x, y, *_), keywords = expert_arguments(arrays, part_widths)
    flat = arrays.virtual
    keywords |= {"scale": jnp.asarray(flat.scale), "rank": jnp.asarray(flat.rank)}
    return (x, y, jnp.asarray(flat.a), jnp.asarray(flat.b)), keywords


SMALL = Case(
    name="small",
    tokens=13,
    chosen=3,
    experts=5,
    slots=3,
    d_in=24,
    part_widths=(10, 14),
    ranks=(3, 0, 8, 1, 5, 8, 2),
    distribution="half_base",
    remote=0.2,
)
"""Gate and up, experts without either, mixed ranks, base rows, experts elsewhere."""


def small(**changes: object) -> Case:
    """Returns `SMALL` with changed fields."""
    return dataclasses.replace(SMALL, **changes)


DOWN = {"part_widths": (24,), "row_for_each_pair": True}

CASES = [
    small(),
    small(name="down", **DOWN),
    small(name="non-square", d_in=40, part_widths=(9, 9)),
    small(name="one-part", part_widths=(31,)),
    small(name="rank-equals-experts", experts=4, ranks=(4,)),
    small(name="rank-below-experts", experts=8, ranks=(3,), max_rank=3),
    small(name="rank-above-experts", experts=4, ranks=(12, 9)),
    small(name="large-ranks", ranks=(40, 0, 17, 64), tokens=5),
    small(name="top-1", chosen=1, tokens=23),
    small(name="top-2", chosen=2, experts=8),
    small(name="top-8", chosen=8, experts=16, tokens=9),
    small(name="top-8-of-64", chosen=8, experts=64, tokens=20, slots=2, ranks=(4,)),
    small(name="128-experts", chosen=8, experts=128, tokens=6, slots=4, d_in=8),
    small(name="all-experts", chosen=4, experts=4),
    small(name="absent-experts", ranks=(0, 0, 0, 0, 6, 6, 0, 0)),
    small(name="part-absent", ranks=(0, 5)),
    small(name="one-slot", slots=1, distribution="identical", remote=0.0),
    small(name="one-token", tokens=1, distribution="identical"),
    small(name="all-base", distribution="all_base"),
    small(name="all-remote", remote=1.0),
    small(name="no-tokens", tokens=0),
    small(name="many-rows", tokens=140, slots=2, distribution="zipf"),
    small(name="many-rows-down", tokens=140, slots=2, distribution="zipf", **DOWN),
]
