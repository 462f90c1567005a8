"""A table of implementations -> the result of the first that accepts the arguments.

Knows nothing of what the implementations compute.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
Implementation = str | Sequence[str] | None


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
      default: what None means.
      table: name -> module.
      op: what an error calls the op.
    Raises:
      ValueError: if a name is not in `table`, or there is none to try.
    """
    if implementation is None:
        return tuple(default)
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

    Args:
      names: keys of `table`, in the order to try.
      table: name -> module that holds `function`; imported when it is tried.
      function: name of the implementation's function.
      call: gives the function its arguments.
    Raises:
      NotImplementedError: if all refuse, with every reason.
    """
    refusals: dict[str, str] = {}
    for name in names:
        try:
            implementation = getattr(importlib.import_module(table[name]), function)
            return Choice(name, refusals), call(implementation)
        except (NotImplementedError, ImportError) as refusal:
            refusals[name] = str(refusal)
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals.items())
    raise NotImplementedError(f"{function}: no implementation accepts this:{reasons}")
