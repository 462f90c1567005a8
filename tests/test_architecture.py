"""Holds the house to its plan: imports downhill, short files, a light import."""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slow_cases import SLOW_CASES

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "lora_jax": ROOT / "lora_jax",
    "lora_kernels": ROOT / "kernels/lora_kernels",
}

FLOORS = {
    "lora_kernels": 0,
    "lora_jax.errors": 0,
    "lora_jax.shapes": 0,
    "lora_jax.config": 0,
    "lora_jax.lru": 0,
    "lora_jax.models": 0,
    "lora_jax.adapters": 1,
    "lora_jax.request": 1,
    "lora_jax.routing": 1,
    "lora_jax.rules": 1,
    "lora_jax.slots": 1,
    "lora_jax.layers": 2,
    "lora_jax.basecopies": 3,
    "lora_jax.packing": 3,
    "lora_jax.staging": 4,
    "lora_jax.bank": 4,
    "lora_jax.forward": 5,
    "lora_jax.manager": 6,
    "lora_jax.worker": 7,
    "lora_jax.training": 8,
    "lora_jax.serving": 8,
    "lora_jax.cli": 9,
    "lora_jax": 10,
}
"""A module may import its own floor, without a circle, and every floor below."""

LIBRARY_LINES = 300
TEST_LINES = 400

HEAVY = {
    "gguf",
    "huggingface_hub",
    "jax_triton",
    "jinja2",
    "peft",
    "rich",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
}
"""Packages that are imported by the function that needs them, never on import."""

IMPORT_SECONDS = 1.5
"""Processor time, which a busy machine does not change, that `import lora_jax` may
take once JAX and Flax are imported."""

PROBE = """
import sys, time
import jax, jax.numpy, flax.nnx
before, start = set(sys.modules), time.process_time()
import lora_jax
print(time.process_time() - start)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def room(module: str) -> str:
    """The part of the house that a module belongs to: the longest prefix in FLOORS."""
    names = module.split(".")
    prefixes = (".".join(names[:n]) for n in range(len(names), 1, -1))
    return next((prefix for prefix in prefixes if prefix in FLOORS), names[0])


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """Every module that a module imports, also inside its functions."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -node.level + 1 or None] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                child = f"{source}.{alias.name}"
                yield child if child in MODULES else source


def house_imports(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_floor(module):
    assert module == "lora_jax" or room(module) != "lora_jax", (
        f"{module} has no floor; give it one in FLOORS"
    )


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downhill(module):
    floor = FLOORS[room(module)]
    uphill = {
        name
        for name in house_imports(module)
        if room(name) != room(module) and FLOORS[room(name)] > floor
    }
    assert not uphill


def test_rooms_of_one_floor_import_in_no_circle():
    below = {room(module): set() for module in MODULES}
    for module in MODULES:
        below[room(module)] |= {room(name) for name in house_imports(module)}
    for start in below:
        seen, waiting = set(), below[start] - {start}
        while waiting:
            name = waiting.pop()
            seen.add(name)
            waiting |= below.get(name, set()) - seen
        assert start not in seen, f"{start} imports itself through others"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("lora_kernels")])
def test_kernels_know_nothing_of_the_library(module):
    assert not {name for name in imports(module) if name.startswith("lora_jax")}


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) == "lora_jax.models"])
def test_models_know_nothing_of_lora(module):
    strangers = {
        "lora_kernels",
        "lora_jax.errors",
        "lora_jax.shapes",
        "lora_jax.models",
    }
    assert {room(name) for name in house_imports(module)} <= strangers


@pytest.mark.parametrize(
    "module", [m for m in MODULES if room(m) in ("lora_jax.adapters", "lora_jax.slots")]
)
def test_host_rooms_never_import_jax(module):
    assert not {
        name for name in imports(module) if name.split(".")[0] in ("jax", "flax")
    }


def test_slots_use_the_standard_library_and_the_house_alone():
    allowed = sys.stdlib_module_names | PACKAGES.keys()
    assert {name.split(".")[0] for name in imports("lora_jax.slots")} <= allowed


def test_the_kernels_folder_is_no_package():
    assert not (ROOT / "kernels/__init__.py").exists()


def test_test_folders_are_no_packages():
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_does(module):
    assert ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", MODULES)
def test_library_files_stay_short(module):
    lines = MODULES[module].read_text(encoding="utf-8").count("\n")
    assert lines <= LIBRARY_LINES, "split it along the path of data"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem
)
def test_test_files_stay_short(path):
    assert path.read_text(encoding="utf-8").count("\n") <= TEST_LINES


def test_importing_the_library_is_light():
    seconds, loaded = [], set()
    for _ in range(3):
        seen = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            check=True,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        ).stdout.splitlines()
        seconds.append(float(seen[0]))
        loaded |= set(seen[1].split())
    assert not loaded & HEAVY
    assert min(seconds) < IMPORT_SECONDS


def public_names() -> list[tuple[str, object]]:
    import lora_jax
    import lora_kernels

    return [
        (f"{package.__name__}.{name}", value)
        for package in (lora_jax, lora_kernels)
        for name, value in vars(package).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
    ]


def test_every_public_name_has_a_docstring():
    bare = [name for name, value in public_names() if not _documented(value)]
    assert public_names()
    assert not bare


def test_every_public_method_has_a_docstring():
    bare = [
        f"{name}.{method}"
        for name, value in public_names()
        if inspect.isclass(value)
        for method, function in vars(value).items()
        if not method.startswith("_")
        and (inspect.isroutine(function) or isinstance(function, property))
        and not inspect.getdoc(getattr(value, method))
    ]
    assert not bare


def _documented(value: object) -> bool:
    # A dataclass without a docstring gets its signature for one.
    text = getattr(value, "__doc__", None) or ""
    return bool(text) and not text.startswith(f"{getattr(value, '__name__', '')}(")


@pytest.mark.parametrize("file", SLOW_CASES)
def test_slow_cases_are_of_files_that_are_there(file):
    assert (ROOT / "tests" / file).is_file()
