"""Reads typed values out of a JSON object and keeps a list of everything wrong with it.

After a fault the reader returns a harmless stand-in, so that reading goes on and one
error can name all faults; the caller must look at `faults` before using any value.
"""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class Reader:
    """One JSON object and the faults found in it so far."""

    def __init__(self, values: Mapping[str, object]):
        self.values = values
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        """Notes one fault."""
        self.faults.append(text)

    def positive(self, key: str) -> int:
        """Returns a whole number of at least 1."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        return self._wrong(key, "a positive whole number", 1)

    def index(self, key: str) -> int:
        """Returns a whole number of at least 0."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        return self._wrong(key, "a whole number of at least 0", 0)

    def positive_or(self, key: str, default: int) -> int:
        """Returns a whole number of at least 1, or `default` for null or nothing."""
        return default if self.values.get(key) is None else self.positive(key)

    def number(self, key: str) -> float:
        """Returns a positive number."""
        value = self.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        return self._wrong(key, "a positive number", 1.0)

    def number_or(self, key: str, default: float) -> float:
        """Returns a positive number, or `default` for null, zero or nothing."""
        return self.number(key) if self.values.get(key) else default

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Returns a list of `count` positive numbers."""
        found = self.values.get(key)
        numbers = found if isinstance(found, list) else []
        inner = Reader({str(index): number for index, number in enumerate(numbers)})
        read = tuple(inner.number(index) for index in inner.values)
        if inner.faults or len(read) != count:
            self.fault(f"{key}: expected a list of {count} positive numbers")
            return (1.0,) * count
        return read

    def flag(self, key: str) -> bool:
        """Returns true or false."""
        value = self.values.get(key)
        return (
            value if isinstance(value, bool) else self._wrong(key, "a boolean", False)
        )

    def flag_or(self, key: str, default: bool) -> bool:
        """Returns true or false, or `default` for null or nothing."""
        return default if self.values.get(key) is None else self.flag(key)

    def text(self, key: str) -> str:
        """Returns a string."""
        value = self.values.get(key)
        return value if isinstance(value, str) else self._wrong(key, "a string", "")

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        """Returns a string that is among `known`."""
        value = self.values.get(key)
        if isinstance(value, str) and value in known:
            return value
        return self._wrong(key, f"one of {', '.join(known)}", known[0])

    def nested(self, *keys: str) -> dict[str, object]:
        """Returns a copy of the first object that is there, or an empty one."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, dict):
                return dict(value)
            if value is not None:
                self._wrong(key, "an object", {})
        return {}

    def _wrong(self, key: str, expected: str, stand_in: T) -> T:
        found = repr(self.values[key]) if key in self.values else "nothing"
        self.fault(f"{key}: found {found}, expected {expected}")
        return stand_in
