"""A config's regular expressions, matched against module names in bounded time.

Keys of `rank_pattern` come from a stranger's file, and `re` may take for ever on
`(a|a)*b`. A pattern without repeats or groups is safe in `re`; any other is parsed by
`re` and then walked here by sets of positions, which takes time polynomial in the
name's length whatever the pattern. Only whether a whole name matches is asked, so
greedy and lazy repeats are the same.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial

# The parser's tree has no public name; it has kept its form since Python 2.
from re import _constants as codes  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]

MAX_LENGTH = 10_000
"""Characters of a pattern; the longest that tools write is about 1 000."""

MAX_REPEATS = 1_000
"""Count in `{m,n}`; module names are shorter."""

RISKY = frozenset("*+?{(")
"""A pattern without these does no more work than its length times the name's."""

MAX_STEPS = 1_000_000
"""Positions tried in one match, about one second."""

Matcher = Callable[[str], bool]
Tree = parser.SubPattern
Ends = frozenset[int]


def compile_whole(pattern: str) -> Matcher:
    """Returns the predicate "the whole name matches `pattern`", as `re.fullmatch`.

    Example:
      >>> compile_whole(r"layers\\.\\d\\.q_proj")("layers.0.q_proj")
      True

    Raises:
      ValueError: if the pattern is no regular expression, too long, or uses what
        bounded time does not allow (back references, conditionals, huge counts); the
        predicate raises it too if one match takes too many steps.
    """
    return _compile("", pattern)


def compile_suffix(key: str) -> Matcher:
    """Returns PEFT's rule (0.15 and later): `re.match(rf"(.*\\.)?({key})$", name)`.

    Raises:
      ValueError: as `compile_whole`.
    """
    return _compile(r"(?:.*\.)?", key)


def first_match(keys: Mapping[str, Matcher], name: str) -> str | None:
    """Returns the first key, in the mapping's order, whose matcher takes `name`."""
    return next((key for key, matches in keys.items() if matches(name)), None)


def _compile(head: str, key: str) -> Matcher:
    if len(key) > MAX_LENGTH:
        raise ValueError(f"{len(key)} characters, more than {MAX_LENGTH}")
    whole = f"{head}(?:{key})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "possible nested set"
            if not RISKY & set(key):
                return partial(_matches_by_re, re.compile(whole))
            parser.parse(key)  # refuses a key that closes our own group
            tree = parser.parse(whole)
        _check(tree)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return partial(_matches_by_sets, tree)


def _matches_by_re(compiled: re.Pattern[str], name: str) -> bool:
    return compiled.fullmatch(name) is not None


def _matches_by_sets(tree: Tree, name: str) -> bool:
    return len(name) in _Walk(name).through(tree, frozenset([0]))


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

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = MAX_STEPS

    def through(self, tree: Tree, starts: Ends) -> Ends:
        for code, argument in tree:
            if not starts:
                break
            starts = self._step(code, argument, starts)
        return starts

    def _step(self, code: object, argument, starts: Ends) -> Ends:
        self._steps -= len(starts)
        if self._steps < 0:
            raise ValueError(
                f"takes more than {MAX_STEPS} steps on {self._name[:80]!r}"
            )
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
