"""What every test runs under: CPU, four devices, strict shapes, fixed seeds, offline.

The environment is set before JAX is imported, and only where nothing is set, so that
`JAX_PLATFORMS=cuda pytest -m gpu` runs on a GPU.
"""

import itertools
import os
import re
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import jax
import pytest

from gpu_report import report_lines
from slow_cases import SLOW_CASES

TESTS = Path(__file__).parent

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the cases of `slow_cases.py` the mark `slow`."""
    for item in items:
        name = item.path.relative_to(TESTS).as_posix()
        if any(re.search(pattern, item.name) for pattern in SLOW_CASES.get(name, ())):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests of compiled GPU programs have recorded."""
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    lines = report_lines(
        tuple(recorded)
        for report in reports
        if isinstance(report, pytest.TestReport)
        for recorded in report.user_properties
    )
    if lines:
        terminalreporter.section("compiled for GPUs")
        terminalreporter.write_line("\n".join(lines))
