"""`lora-jax inspect`: what an adapter is, and whether a model can serve it."""

import argparse
import collections
import json
import re
from collections.abc import Sequence
from pathlib import Path

from lora_jax.adapters import Adapter, load_adapter
from lora_jax.adapters.expert_layout import expert_paths
from lora_jax.cli.console import output, print_error, table
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.layers import wrap
from lora_jax.models import build_model, read_config, resolve_model
from lora_jax.packing import pack

SUMMARY = "say what an adapter is, and whether a model can serve it"

DETAILS = """\
Prints base model, ranks, scale rule, modules, tensors and bytes. With --model it also
says how many of the tensors that model applies; if it cannot serve the adapter the exit
code is 2 and every reason is printed. The model's weights are not read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("adapter", type=Path, metavar="DIR", help="folder of the adapter")
    add("--model", metavar="M", help="model folder, hub id, or name to check against")
    add("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    try:
        adapter = load_adapter(args.adapter)
    except AdapterError as error:
        if args.json:
            reasons = str(error).splitlines()
            facts = {"name": args.adapter.name, "servable": False, "reasons": reasons}
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        raise
    refusal = None if args.model is None else refusal_of(adapter, args.model)
    facts = describe(adapter, args.model, refusal)
    if args.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print_tables(adapter, facts)
    if refusal is None:
        return 0
    print_error(refusal)
    return 2


def refusal_of(adapter: Adapter, model: str) -> str | None:
    """Returns why a model cannot serve an adapter; None if it can.

    Raises:
      ModelError: if there is no such model, or it is not supported.
    """
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    config = read_config(resolve_model(model))
    shapes = nnx.eval_shape(
        lambda: build_model(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    )
    sites = wrap(shapes, LoRAConfig(max_lora_rank=max(1, adapter.rank)))
    try:
        pack(adapter, sites, np.dtype(np.float32))
    except AdapterError as error:
        return str(error)
    return None


def describe(
    adapter: Adapter, model: str | None, refusal: str | None
) -> dict[str, object]:
    """Returns the facts of an adapter as plain values.

    Without a model, `servable` and `tensors_applied` are None.
    """
    report = adapter.report
    rows = report.modules
    applied = None
    if model is not None:
        applied = report.matched if refusal is None else 0
    return {
        "name": adapter.name,
        "base_model": adapter.base_model or None,
        "kinds": sorted(adapter.kinds),
        "rank": adapter.rank,
        "ranks": sorted({row.rank for row in rows}),
        "scale_rules": sorted({row.scale_rule for row in rows}),
        "dtypes": sorted({row.dtype for row in rows}),
        "modules": len(rows),
        "bytes": adapter.nbytes,
        "content_hash": adapter.content_hash,
        "tensors_total": report.total,
        "tensors_matched": report.matched,
        "model": model,
        "servable": None if model is None else refusal is None,
        "tensors_applied": applied,
        "reasons": refusal.splitlines() if refusal else [],
        "ignored": [{"tensor": i.tensor, "reason": i.reason} for i in report.ignored],
        "notes": list(report.notes),
        "report": report.to_dict(),
    }


def _print_tables(adapter: Adapter, facts: dict[str, object]) -> None:
    console = output()
    shown = [
        ("base model", facts["base_model"] or "not named"),
        ("kinds", _joined(facts["kinds"])),
        ("ranks", _joined(facts["ranks"])),
        ("scale", _joined(facts["scale_rules"])),
        ("dtype", _joined(facts["dtypes"])),
        ("modules", facts["modules"]),
        ("bytes", f"{facts['bytes']:,}"),
        ("hash", facts["content_hash"]),
        ("tensors read", f"{facts['tensors_matched']} of {facts['tensors_total']}"),
    ]
    if facts["model"] is not None:
        answer = "yes" if facts["servable"] else "no, see below"
        shown.append((f"served by {facts['model']}", answer))
        applied = f"{facts['tensors_applied']} of {facts['tensors_total']}"
        shown.append(("tensors applied", applied))
    console.print(table(f"adapter {adapter.name}", ("fact", "value"), shown))
    console.print(table("modules", _MODULE_COLUMNS, _module_rows(adapter)))
    for item in adapter.report.ignored:
        console.print(
            f"ignored {item.tensor}: {item.reason}", markup=False, soft_wrap=True
        )
    for note in adapter.report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


_MODULE_COLUMNS = ("module", "kind", "modules", "rank", "scale", "tensors", "bytes")


def _module_rows(adapter: Adapter) -> Sequence[Sequence[object]]:
    """One row for modules that differ in nothing but their place in the model."""
    groups: dict[tuple, list] = collections.defaultdict(list)
    for row in adapter.report.modules:
        paths = expert_paths(row.module, adapter.parts[row.module])
        name = _short(paths[0] if len(paths) == 1 else row.module)
        groups[(name, row.kind, row.rank, row.scale, row.scale_rule)].append(row)
    return [
        (
            name,
            kind,
            len(rows),
            rank,
            f"{scale:g} ({rule})",
            sum(len(row.tensors) for row in rows),
            f"{sum(row.nbytes for row in rows):,}",
        )
        for (name, kind, rank, scale, rule), rows in groups.items()
    ]


def _short(path: str) -> str:
    """Returns what modules of one kind share: the last name, and that of experts.

    Example:
      >>> _short("model.layers.0.mlp.experts.3.up_proj"), _short("layers.0.q_proj")
      ('experts.*.up_proj', 'q_proj')
    """
    _, _, inside = path.rpartition(".experts.")
    if inside == path:
        return path.rpartition(".")[2]
    return f"experts.{re.sub(r'[0-9]+', '*', inside)}"


def _joined(values: object) -> str:
    assert isinstance(values, list)
    return ", ".join(str(value) for value in values) or "none"
