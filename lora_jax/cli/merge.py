"""`lora-jax merge`: a model and adapters -> a folder of the merged model."""

import argparse
from pathlib import Path

from lora_jax.adapters import load_adapter, merge_adapters
from lora_jax.cli.console import output, table
from lora_jax.errors import RequestError
from lora_jax.models import resolve_model

SUMMARY = "write a model with adapters in its weights"

DETAILS = """\
Sums are made in float32 and rounded once. The table says how much each module changed,
and how much of the change the rounding lost. A head that is tied to the embedding is
untied when the two come to differ."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="model folder, hub id, or name")
    add(
        "--lora",
        required=True,
        action="append",
        metavar="DIR[=WEIGHT]",
        help="an adapter and its weight, 1 if not given; may be repeated",
    )
    add("--output", required=True, type=Path, metavar="OUT", help="a new folder")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the result",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    pairs = [_read_lora(word) for word in args.lora]
    report = merge_adapters(
        resolve_model(args.model),
        [load_adapter(path) for path, _ in pairs],
        args.output,
        weights=[weight for _, weight in pairs],
        dtype=args.dtype,
    )
    rows = [
        (row.module, f"{row.change:.2%}", f"{row.loss:.2%}") for row in report.modules
    ]
    console = output()
    columns = ("module", "change of weight", "lost by rounding")
    console.print(table(f"merged into {args.output}", columns, rows))
    if report.untied:
        console.print("the head was tied to the embedding; it is untied now")
    return 0


def _read_lora(word: str) -> tuple[str, float]:
    """Returns path and weight; a path may itself hold a `=`."""
    path, _, weight = word.rpartition("=")
    if not path or Path(word).expanduser().exists():
        return word, 1.0
    try:
        return path, float(weight)
    except ValueError:
        text = f"--lora {word!r}: {weight!r} is no number; write DIR or DIR=WEIGHT."
        raise RequestError(text) from None
