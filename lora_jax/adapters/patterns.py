"""A config's regular expressions, matched against module names in bounded time.

Keys of `rank_pattern` come from a stranger's file, and `re` may take for ever on
`(a|a)*b`. A plain pattern is safe in `re`; any other is parsed by `re` and then walked
here by sets of positions, whose steps are counted against a budget. Only whether a
whole name matches is asked, so greedy and lazy repeats are the same.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

# The parser's tree has no public name; it has kept its form since Python 2.
from re import _constants as codes  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, Protocol, runtime_checkable

MAX_LENGTH = 10_000
"""Characters of a pattern; the longest that tools write is about 1 000."""

MAX_REPEATS = 1_000
"""Count in `{m,n}`; module names are shorter."""

MAX_STEPS = 500_000
"""Positions tried by all matches of one budget: a second. A usual match has 300."""

Matcher = Callable[[str], bool]
Ends = frozenset[int]


@dataclass
class Budget:
    """Steps left for all matches that share it; counts down."""

    steps: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Takes steps off.

        Raises:
          ValueError: if there are not as many.
        """
        self.steps -= steps
        if self.steps < 0:
            raise ValueError(f"matching takes more than {MAX_STEPS} steps; simplify it")


@runtime_checkable
class Tree(Protocol):
    """A parsed pattern: pairs of a code and its argument."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[object, Any]: ...


def compile_whole(pattern: str, budget: Budget) -> Matcher:
    """Returns the predicate "the whole name matches `pattern`", as `re.fullmatch`.

    Example:
      >>> compile_whole(r"layers\\.\\d\\.q_proj", Budget())("layers.0.q_proj")
      True

    Raises:
      ValueError: if the pattern is no regular expression, too long, or uses what
        bounded time does not allow (back references, conditionals, huge counts); the
        predicate raises it too when the budget is spent.
    """
    return _compile("", pattern, budget)


def compile_suffix(key: str, budget: Budget, *, dotted: bool = False) -> Matcher:
    """Returns PEFT's rule: `re.match(rf"(.*\\.)?({key})$", name)`.

    Args:
      key: the pattern.
      budget: what its matches may cost.
      dotted: whether something must come before the key, as in PEFT up to 0.14:
        `re.match(rf".*\\.{key}$", name)`.

    Raises:
      ValueError: as `compile_whole`.
    """
    return _compile(r".*\." if dotted else r"(?:.*\.)?", key, budget)


def first_match(keys: Mapping[str, Matcher], name: str) -> str | None:
    """Returns the first key, in the mapping's order, whose matcher takes `name`."""
    return next((key for key, matches in keys.items() if matches(name)), None)


def _compile(head: str, key: str, budget: Budget) -> Matcher:
    if len(key) > MAX_LENGTH:
        raise ValueError(f"{len(key)} characters, more than {MAX_LENGTH}")
    whole = f"{head}(?:{key})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "possible nested set"
            parser.parse(key)  # refuses a key that closes our own group
            if _is_plain(key):
                return partial(_matches_by_re, re.compile(whole))
            tree = parser.parse(whole)
        _check(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return partial(_matches_by_sets, tree, budget)


def _is_plain(key: str) -> bool:
    """Whether `re` needs at most about the square of the name's length."""
    repeats, groups = sum(map(key.count, "*+?")), key.count("(")
    return "{" not in key and (repeats, groups) in ((0, 0), (0, 1), (0, 2), (1, 0))


def _matches_by_re(compiled: re.Pattern[str], name: str) -> bool:
    return compiled.fullmatch(name) is not None


def _matches_by_sets(tree: Tree, budget: Budget, name: str) -> bool:
    return len(name) in _Walk(name, budget).through(tree, frozenset([0]))


def _check(tree: Tree) -> None:
    """Raises re.error for what `_Walk` does not walk."""
    for code, argument in tree:
        refusal = _refusal(code, argument)
        if refusal:
            raise re.error(refusal)
        for body in _bodies(code, argument):
            _check(body)


def _refusal(code: object, argument) -> str:
    if code in _REPEATS:
        counts = [count for count in argument[:2] if count is not codes.MAXREPEAT]
        return f"a repeat exceeds {MAX_REPEATS}" if max(counts) > MAX_REPEATS else ""
    if code is codes.SUBPATTERN:
        return "inline flags are not supported" if argument[1] or argument[2] else ""
    if code in _LOOK_AHEADS:
        return "look-behind is not supported" if argument[0] < 0 else ""
    if code is codes.AT:
        return "" if argument in _ANCHORS else "word boundaries are not supported"
    known = code in _SINGLE or code is codes.BRANCH
    return "" if known else f"{str(code).lower()} is not supported"


def _bodies(code: object, argument) -> Iterable[Tree]:
    if code is codes.BRANCH:
        return argument[1]
    if code in _REPEATS:
        return argument[2:]
    if code is codes.SUBPATTERN:
        return argument[3:]
    return argument[1:] if code in _LOOK_AHEADS else ()


_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_SINGLE = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
_LOOK_AHEADS = (codes.ASSERT, codes.ASSERT_NOT)
_BEGINNINGS = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_ANCHORS = (*_BEGINNINGS, codes.AT_END, codes.AT_END_STRING)
_CLASSES: Mapping[object, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    codes.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    codes.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


class _Walk:
    """One walk over one name; `through` gives the positions reached by a tree."""

    def __init__(self, name: str, budget: Budget) -> None:
        self._name = name
        self._budget = budget

    def through(self, tree: Tree, starts: Ends) -> Ends:
        for code, argument in tree:
            if not starts:
                break
            starts = self._step(code, argument, starts)
        return starts

    def _step(self, code: object, argument, starts: Ends) -> Ends:
        self._budget.spend(len(starts))
        if code in _REPEATS:
            return self._repeat(*argument, starts=starts)
        if code is codes.BRANCH:
            ends = (self.through(body, starts) for body in argument[1])
            return frozenset().union(*ends)
        if code is codes.SUBPATTERN:
            return self.through(argument[3], starts)
        if code in _LOOK_AHEADS:
            wanted = code is codes.ASSERT
            body = argument[1]
            return frozenset(
                s for s in starts if bool(self.through(body, frozenset([s]))) == wanted
            )
        if code is codes.AT:
            return starts & {0 if argument in _BEGINNINGS else len(self._name)}
        return frozenset(
            s + 1
            for s in starts
            if s < len(self._name) and _takes(code, argument, self._name[s])
        )

    def _repeat(self, low: int, high: int, body: Tree, *, starts: Ends) -> Ends:
        for _ in range(low):
            starts = self.through(body, starts)
        reached = starts
        for _ in range(low, min(high, low + len(self._name))):
            starts = self.through(body, starts) - reached
            if not starts:
                break
            reached |= starts
        return reached


def _takes(code: object, argument, char: str) -> bool:
    if code is codes.ANY:
        return char != "\n"
    if code is codes.LITERAL:
        return ord(char) == argument
    if code is codes.NOT_LITERAL:
        return ord(char) != argument
    negated = argument[0][0] is codes.NEGATE
    return negated != any(_in_set(kind, value, char) for kind, value in argument)


def _in_set(kind: object, value, char: str) -> bool:
    if kind is codes.LITERAL:
        return ord(char) == value
    if kind is codes.RANGE:
        return value[0] <= ord(char) <= value[1]
    return kind is codes.CATEGORY and _CLASSES[value](char)
