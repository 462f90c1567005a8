"""A table of implementations -> the result of the first that accepts the arguments.

Knows nothing of what the implementations compute, but which of them run on a GPU only.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

Result = TypeVar("Result")
Implementation = str | Sequence[str] | None

GPU_ONLY = frozenset({"triton", "triton_invariant", "mosaic_gpu"})
"""Names of implementations that NVIDIA GPUs alone can run."""


@dataclass(frozen=True)
class Choice:
    """Which implementation runs, and why those tried before it do not.

    Attributes:
      name: the implementation that accepted the arguments.
      refusals: name -> reason, of every implementation tried before it.
    """

    name: str
    refusals: Mapping[str, str]


def names_to_try(
    implementation: Implementation,
    *,
    default: Sequence[str],
    table: Mapping[str, str],
    op: str = "lora_delta",
) -> tuple[str, ...]:
    """Returns the implementations to try, first to last.

    Args:
      implementation: what the caller of the op asked for.
      default: what None means where arrays are on JAX's default backend. Those of
        `GPU_ONLY` are left out where `jax_default_device` is no GPU.
      table: name -> module.
      op: what an error calls the op.
    Raises:
      ValueError: if a name is not in `table`, or there is none to try.
    """
    if implementation is None:
        elsewhere = GPU_ONLY if _computes_off_gpu() else ()
        return tuple(name for name in default if name not in elsewhere)
    names = (implementation,) if isinstance(implementation, str) else implementation
    unknown = [name for name in names if name not in table]
    if unknown or not names:
        raise ValueError(
            f"{op}: unknown implementation {', '.join(unknown) or '()'}; "
            f"known: {', '.join(table)}."
        )
    return tuple(names)


def first_accepting(
    names: Sequence[str],
    table: Mapping[str, str],
    function: str,
    call: Callable[[Callable[..., Result]], Result],
) -> tuple[Choice, Result]:
    """Returns the first accepting implementation and what it returned.

    Where that one runs on GPUs only, the arrays may turn out to be on another device,
    which tracing does not tell: there the first of the other names runs instead.

    Args:
      names: keys of `table`, in the order to try.
      table: name -> module that holds `function`; imported when it is tried.
      function: name of the implementation's function.
      call: gives the function its arguments.
    Raises:
      NotImplementedError: if all refuse, with every reason.
    """
    refusals: dict[str, str] = {}
    for position, name in enumerate(names):
        portable = [later for later in names[position:] if later not in GPU_ONLY]
        try:
            run = functools.partial(_run, table[name], function, call)
            if name in portable or not portable or _has_mesh():
                return Choice(name, refusals), run()
            elsewhere = functools.partial(_run, table[portable[0]], function, call)
            result = jax.lax.platform_dependent(cuda=run, default=elsewhere)
            return Choice(name, refusals), result
        except (NotImplementedError, ImportError) as refusal:
            refusals[name] = str(refusal)
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"{function}: no implementation accepts this:{reasons}")


def _run(
    module: str, function: str, call: Callable[[Callable[..., Result]], Result]
) -> Result:
    return call(getattr(importlib.import_module(module), function))


def _computes_off_gpu() -> bool:
    # A device, the name of a platform, or None.
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return device is not None and getattr(device, "platform", device) not in (
        "gpu",
        "cuda",
    )


def _has_mesh() -> bool:
    # The two programs would have to agree on how their results lie over its devices.
    return not jax.sharding.get_abstract_mesh().empty
