"""Does anybody else still hold the bank? Then a write must not delete it.

A write in place (donation) deletes the arrays that it was given. That is right while
the manager alone holds them, and wrong as soon as a snapshot, a running step on
another thread, or a caller's variable does: they would find deleted arrays. Nobody has
to tell us: CPython counts references, so the bank is ours alone if no object of it
has more references than right after we made it. More references than that, for
whatever reason, only cost a copy; there is no way to have fewer and still reach the
arrays. Interpreters without a global lock count loosely, so there nothing is donated.
"""

import sys

from lora_jax.bank import Bank

EXACT_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether `sys.getrefcount` is exact on this interpreter."""

References = list[int]
"""Reference counts of a bank, of its dictionaries and of its arrays, in that order."""


def count_references(bank: Bank) -> References:
    """Returns the reference counts of everything that leads to the bank's arrays."""
    count = sys.getrefcount
    counts = [count(bank), count(bank.arrays)]
    for site in bank.arrays.values():
        counts.append(count(site))
        counts.extend(count(array) for array in site.values())
    return counts


def is_sole_owner(now: References, own: References) -> bool:
    """Says whether references counted `now` are no more than our `own`."""
    return EXACT_COUNTS and all(n <= o for n, o in zip(now, own, strict=True))
