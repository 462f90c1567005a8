"""`lora-jax convert`: any adapter that can be read -> a PEFT folder."""

import argparse
from pathlib import Path

from lora_jax.adapters import combine_adapters, load_adapter, save_adapter
from lora_jax.cli.console import output

SUMMARY = "turn any adapter that can be read into a PEFT folder"

DETAILS = """\
Reads PEFT's folders of every version, and the files of MLX-LM, torchtune, kohya and
tunix. Values and scales are written as they are. With --rank the update is reduced to
the nearest of that rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("source", metavar="IN", help="folder or weights file of the adapter")
    add("target", metavar="OUT", type=Path, help="folder to write")
    add("--rank", type=int, metavar="R", help="largest rank of the result")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    adapter = load_adapter(args.source)
    if args.rank is not None:
        adapter = combine_adapters([adapter], [1.0], name=adapter.name, rank=args.rank)
    folder = save_adapter(adapter, args.target)
    console = output()
    for note in adapter.report.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    text = f"{folder}: {len(adapter.parts)} modules, rank {adapter.rank} or less"
    console.print(text, markup=False, soft_wrap=True)
    return 0
