"""Cases of `grouped_dot` as data, and the answers in float64, group by group."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lora_kernels import make_routing

TOLERANCE = {
    "float32": {"atol": 3e-5, "rtol": 0.0},
    "float16": {"atol": 2e-3, "rtol": 2.0**-10},
    "bfloat16": {"atol": 1e-2, "rtol": 2.0**-8},
}
"""Error of an output near 1, by dtype; rtol is the rounding of the output itself."""

SPREADS = ("uniform", "one", "half_idle", "half_remote", "zipf", "all_remote")
"""How pairs fall to groups; a remote pair has a group that is not there."""

REMOTE = (-1, -7, 128, 2**31 - 1)
"""Groups that are not there, whatever the number of groups."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: sizes, dtype, and how the pairs fall to groups."""

    rows: int = 13
    per_row: int = 3
    groups: int = 5
    d_in: int = 24
    d_out: int = 21
    spread: str = "half_remote"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        sizes = f"{self.rows}x{self.per_row}-g{self.groups}-{self.d_in}x{self.d_out}"
        return f"{sizes}-{self.spread}-{self.dtype}"


class Arrays(NamedTuple):
    """Arguments of `grouped_dot`, its output's cotangent, and the pairs' groups."""

    x: np.ndarray
    kernel: np.ndarray
    g: np.ndarray
    group: np.ndarray


def arrays_of(case: Case, *, seed: int = 0) -> Arrays:
    """Returns the arguments of a case; outputs are near 1."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    pairs = case.rows * case.per_row

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    kernel = normal(case.groups, case.d_in, case.d_out) / np.sqrt(max(case.d_in, 1))
    return Arrays(
        x=normal(case.rows, case.d_in).astype(dtype),
        kernel=kernel.astype(dtype),
        g=normal(pairs, case.d_out).astype(dtype),
        group=_groups(case, pairs, rng).astype(np.int32),
    )


def _groups(case: Case, pairs: int, rng: np.random.Generator) -> np.ndarray:
    uniform = rng.integers(case.groups, size=pairs)
    match case.spread:
        case "one":
            return np.full(pairs, case.groups // 2)
        case "half_idle":
            return uniform // 2
        case "half_remote":
            return np.where(rng.random(pairs) < 0.5, uniform, rng.choice(REMOTE, pairs))
        case "zipf":
            share = 1.0 / (1 + np.arange(case.groups))
            return rng.choice(case.groups, pairs, p=share / share.sum())
        case "all_remote":
            return rng.choice(REMOTE, pairs)
    return uniform


def local(arrays: Arrays) -> np.ndarray:
    """Which pairs have a group that is there."""
    return (arrays.group >= 0) & (arrays.group < arrays.kernel.shape[0])


def expected(arrays: Arrays) -> np.ndarray:
    """Returns the output in float64."""
    x, kernel, _ = (np.asarray(field, np.float64) for field in arrays[:3])
    out = np.zeros((len(arrays.group), kernel.shape[2]))
    per_row = len(arrays.group) // max(len(x), 1)
    for group in range(len(kernel)):
        (pairs,) = np.nonzero(arrays.group == group)
        out[pairs] = x[pairs // per_row] @ kernel[group] if len(pairs) else 0
    return out


def expected_gradients(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cotangents of x and kernel in float64."""
    x, kernel, g = (np.asarray(field, np.float64) for field in arrays[:3])
    dx, dkernel = np.zeros_like(x), np.zeros_like(kernel)
    per_row = len(arrays.group) // max(len(x), 1)
    for group in range(len(kernel)):
        (pairs,) = np.nonzero(arrays.group == group)
        if len(pairs):
            np.add.at(dx, pairs // per_row, g[pairs] @ kernel[group].T)
            dkernel[group] = x[pairs // per_row].T @ g[pairs]
    return dx, dkernel


def forward_arguments(arrays: Arrays) -> tuple:
    """Returns what `grouped_dot` takes."""
    pairs = make_routing(jnp.asarray(arrays.group), arrays.kernel.shape[0])
    return jnp.asarray(arrays.x), jnp.asarray(arrays.kernel), pairs


def backward_arguments(arrays: Arrays) -> tuple:
    """Returns what `grouped_dot_backward` takes."""
    x, kernel, pairs = forward_arguments(arrays)
    return x, jnp.asarray(arrays.g), kernel, pairs


def poisoned(arrays: Arrays, groups: list[int]) -> Arrays:
    """Returns the arguments with NaN in kernels, and in rows all of whose pairs are
    of these groups or remote."""
    kernel, x = arrays.kernel.copy(), arrays.x.copy()
    kernel[groups] = np.nan
    bad = np.isin(arrays.group, groups) | ~local(arrays)
    x[bad.reshape(len(x), -1).all(axis=1)] = np.nan
    return arrays._replace(kernel=kernel, x=x)


FACTORS = {
    "rows": (1, 2, 7, 33, 150),
    "per_row": (1, 2, 3, 4, 6, 8),
    "groups": (1, 2, 3, 8, 60, 128),
    "d_in": (1, 7, 32, 100, 129, 576),
    "d_out": (1, 9, 64, 96, 130, 577),
    "spread": SPREADS,
    "dtype": ("float32", "bfloat16", "float16"),
}


def covering_cases(
    count: int = 24, *, limit: float = math.inf, seed: int = 0
) -> list[Case]:
    """Returns cases in which every value of every factor occurs, several times if many.

    Greedy: of 40 random cases, take the one that covers most of what is uncovered.

    Args:
      limit: most `multiplications` of a case. A large value comes with small ones.
    """
    rng = np.random.default_rng(seed)
    lengths = [len(values) for values in FACTORS.values()]
    pool = []
    for row in rng.integers(lengths, size=(2000, len(lengths))).tolist():
        pairs = zip(FACTORS.items(), row, strict=True)
        case = Case(**{name: values[i] for (name, values), i in pairs})
        if multiplications(case) <= limit:
            pool.append((case, _covered_by(case)))
    cases, missing = [], set()
    for _ in range(count):
        missing = missing or set().union(*(covered for _, covered in pool))
        candidates = [pool[k] for k in rng.integers(len(pool), size=40)]
        candidates.append(next(row for row in pool if row[1] & missing))
        case, covered = max(candidates, key=lambda row: len(row[1] & missing))
        missing = missing - covered
        cases.append(case)
    return cases


def multiplications(case: Case) -> int:
    """Returns how many a case takes if all its pairs are local."""
    return case.rows * case.per_row * case.d_in * case.d_out


def _covered_by(case: Case) -> set[tuple[str, object]]:
    # Where no pair has a kernel, no other value is put to a test.
    if case.spread == "all_remote":
        return {("spread", case.spread)}
    return {(name, getattr(case, name)) for name in FACTORS}


def small(**changes: object) -> Case:
    """Returns the default case with changed fields."""
    return dataclasses.replace(Case(), **changes)
