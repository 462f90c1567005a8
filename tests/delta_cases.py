"""Cases of `lora_delta` as data, and the answer in float64, row group by row group."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from lora_kernels import Routing, make_routing
from lora_kernels.lora_delta.specs import DISTRIBUTIONS, Arrays, Spec
from lora_kernels.routing import LEAVES

TOLERANCE = {
    "float32": {"atol": 3e-5, "rtol": 0.0},
    "float16": {"atol": 4e-3, "rtol": 2.0**-10},
    "bfloat16": {"atol": 2e-2, "rtol": 2.0**-8},
}
"""Error of an output near 1, by dtype; rtol is the rounding of the output itself."""

RANKS = (1, 2, 3, 7, 8, 12, 16, 24, 33, 48, 64, 96, 100, 128, 160, 256, 320, 512)
MIXED_RANKS = ((8, 0, 16, 3), (1, 2, 3, 7, 8, 12, 24, 33), (4, 256, 4), (0, 64, 512, 1))
WIDTHS = (32, 96, 100, 576, 1536, 2049, 4096, 14336)
TOKENS = (0, 1, 2, 7, 16, 64, 257, 2048)
SLOTS = (1, 2, 8, 33)
PARTS = (1, 2, 3, 4)
DTYPES = ("float32", "bfloat16", "float16")
FACTORS = {
    "ranks": [(rank,) for rank in RANKS] + list(MIXED_RANKS),
    "d_in": WIDTHS,
    "d_out": WIDTHS,
    "tokens": TOKENS,
    "slots": SLOTS,
    "parts": PARTS,
    "distribution": DISTRIBUTIONS,
    "shuffled": (True, False),
    "dtype": DTYPES,
}
"""What a case is made of -> its values."""

IDLE = {"tokens": 0, "distribution": "all_base"}
"""Values with which no row is adapted: a case covers nothing but its first of them."""

LARGEST = {False: 3e6, True: 3e7}
"""Most elements of any one array in a case: of the few cases, of all pairs."""


def expected(arrays: Arrays, part_widths: tuple[int, ...]) -> np.ndarray:
    """Returns the output in float64, computed slot by slot with merged masks."""
    wide = [np.asarray(field, np.float64) for field in arrays[:5]]
    x, y, a, b, scale = wide
    weight = np.asarray(arrays.weight, np.float64)
    out = y.copy()
    stops = np.cumsum(part_widths)
    for slot in range(a.shape[0]):
        rows = np.flatnonzero(arrays.slot == slot)
        for part, (width, stop) in enumerate(zip(part_widths, stops, strict=True)):
            rank = arrays.rank[slot, part]
            h = x[rows] @ a[slot, part, :rank].T * scale[slot, part]
            h = h * weight[rows, None]
            out[rows, stop - width : stop] += h @ b[slot, :rank, stop - width : stop]
    return out


def expected_gradients(
    arrays: Arrays, widths: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """Returns dx, da, db, dscale, dweight in float64; `arrays.y` is the cotangent."""
    x, g, a, b, scale, weight = (
        getattr(arrays, name).astype(np.float64)
        for name in ("x", "y", "a", "b", "scale", "weight")
    )
    dx, da, db, dscale, dweight = map(np.zeros_like, (x, a, b, scale, weight))
    stops = np.cumsum(widths)
    for slot in range(a.shape[0]):
        rows = np.flatnonzero(arrays.slot == slot)
        for part, (width, stop) in enumerate(zip(widths, stops, strict=True)):
            columns, rank = slice(stop - width, stop), arrays.rank[slot, part]
            own_a, own_b = a[slot, part, :rank], b[slot, :rank, columns]
            u, v = x[rows] @ own_a.T, g[rows][:, columns] @ own_b.T
            factor = (scale[slot, part] * weight[rows])[:, None]
            dx[rows] += (v * factor) @ own_a
            da[slot, part, :rank] = (v * factor).T @ x[rows]
            db[slot, :rank, columns] = (u * factor).T @ g[rows][:, columns]
            dscale[slot, part] = (u * v).sum(axis=1) @ weight[rows]
            dweight[rows] += (u * v).sum(axis=1) * scale[slot, part]
    return dx, da, db, dscale, dweight


def call_arguments(
    arrays: Arrays, part_widths: tuple[int, ...]
) -> tuple[tuple[jax.Array, ...], dict[str, object]]:
    """Returns what `lora_delta` takes: positional and keyword arguments."""
    positional = tuple(jnp.asarray(field) for field in arrays[:4])
    routing = make_routing(
        jnp.asarray(arrays.slot),
        arrays.a.shape[0],
        weight=jnp.asarray(arrays.weight),
    )
    keywords = {
        "scale": jnp.asarray(arrays.scale),
        "rank": jnp.asarray(arrays.rank),
        "routing": routing,
        "part_widths": part_widths,
    }
    return positional, keywords


def with_fields(routing: Routing, **fields: jax.Array) -> Routing:
    """Returns a routing with other arrays, past the type check of its fields."""
    leaves, tree = jax.tree.flatten(routing)
    named = dict(zip(LEAVES, leaves, strict=True)) | fields
    return jax.tree.unflatten(tree, list(named.values()))


def part_widths(d_out: int, parts: int) -> tuple[int, ...]:
    """Cuts an output into parts of unequal widths."""
    cuts = [d_out * k * (k + 1) // (parts * (parts + 1)) for k in range(parts + 1)]
    return tuple(np.diff(cuts).tolist())


def covering_cases(
    *,
    pairs: bool = False,
    limit: float = math.inf,
    tokens: tuple[int, ...] = TOKENS,
    seed: int = 0,
) -> list[Spec]:
    """Returns cases in which every value of every factor occurs, or every pair of them.

    Greedy: of 40 random rows, take the one that covers most of what is uncovered.

    Args:
      limit: most `multiplications` of a case. A large value comes with small ones.
      tokens: numbers of tokens that occur.
    """
    factors = FACTORS | {"tokens": tokens}
    rng = np.random.default_rng(seed)
    size = 2 if pairs else 1
    names = list(factors)

    def covered_by(row: tuple[int, ...]) -> set[tuple[tuple[str, int], ...]]:
        items = list(zip(names, row, strict=True))
        idle = [(n, i) for n, i in items if factors[n][i] == IDLE.get(n)]
        chosen = set(itertools.combinations(items, size))
        return {some for some in chosen if idle[0] in some} if idle else chosen

    lengths = [len(values) for values in factors.values()]
    pool = []
    for row in rng.integers(lengths, size=(6000, len(lengths))).tolist():
        case = {n: factors[n][i] for n, i in zip(names, row, strict=True)}
        fits = _largest_array(case) <= LARGEST[pairs]
        fits = fits and len(case["ranks"]) <= case["slots"] * case["parts"]
        if fits and multiplications(_spec(case)) <= limit:
            pool.append((case, covered_by(tuple(row))))
    # What no case of the pool holds (huge arrays) is not waited for.
    missing = set().union(*(covered for _, covered in pool))
    cases = []
    while missing:
        candidates = [pool[k] for k in rng.integers(len(pool), size=40)]
        candidates.append(next(row for row in pool if row[1] & missing))
        case, covered = max(candidates, key=lambda row: len(row[1] & missing))
        missing -= covered
        cases.append(_spec(case))
    return cases


def multiplications(spec: Spec) -> int:
    """Returns how many a case takes if every row meets the whole rank axis.

    As many numbers are in copies of each row's own A and B.
    """
    columns = spec.d_in * len(spec.part_widths) + sum(spec.part_widths)
    return spec.tokens * spec.rank_axis * columns


def values_of(spec: Spec) -> dict[str, object]:
    """Returns the value of each factor of a case."""
    made = {"d_out": sum(spec.part_widths), "parts": len(spec.part_widths)}
    return {name: made.get(name, getattr(spec, name, None)) for name in FACTORS}


def _largest_array(case: dict) -> float:
    rank = max(case["ranks"])
    arrays = (
        case["slots"] * case["parts"] * rank * case["d_in"],
        case["slots"] * rank * case["d_out"],
        case["tokens"] * case["d_in"],
        case["tokens"] * case["d_out"],
    )
    return max(arrays)


def _spec(case: dict) -> Spec:
    widths = part_widths(case["d_out"], case["parts"])
    fields = {key: case[key] for key in case if key not in ("d_out", "parts")}
    ranks = "_".join(map(str, case["ranks"]))
    name = (
        f"r{ranks}-{case['d_in']}x{case['d_out']}-t{case['tokens']}-s{case['slots']}"
        f"-p{case['parts']}-{case['distribution']}-{case['dtype']}"
    )
    return Spec(name=name, part_widths=widths, **fields)


SMALL = Spec(
    name="small",
    tokens=23,
    slots=5,
    d_in=24,
    part_widths=(10, 4, 7),
    ranks=(3, 0, 8, 1, 5, 8, 2),
    distribution="half_base",
)
"""Fused parts, absent parts, mixed ranks, base rows: small enough for any test."""


def small(**changes: object) -> Spec:
    """Returns `SMALL` with changed fields."""
    return dataclasses.replace(SMALL, **changes)
