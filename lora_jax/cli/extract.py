"""`lora-jax extract`: a base model and a fine-tuned one -> the best adapter."""

import argparse
from pathlib import Path

from lora_jax.adapters import extract_adapter, save_adapter
from lora_jax.cli.console import output
from lora_jax.models import resolve_model

SUMMARY = "find the best adapter of a fine-tuned model"

DETAILS = """\
Writes a PEFT folder with the nearest update of the given rank for each layer that
changed, and says how much of the change each keeps. Norms and biases are kept whole."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="base: folder, hub id, or name")
    add("--tuned", required=True, metavar="T", help="fine-tuned: folder, hub id, name")
    add("--rank", required=True, type=int, metavar="R", help="rank of the adapter")
    add("--output", required=True, type=Path, metavar="OUT", help="folder to write")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    adapter = extract_adapter(
        resolve_model(args.model),
        resolve_model(args.tuned),
        args.rank,
        name=args.output.name,
    )
    folder = save_adapter(adapter, args.output)
    console = output()
    for note in adapter.report.notes:
        console.print(note, markup=False, soft_wrap=True)
    text = f"{folder}: {len(adapter.parts)} modules, rank {adapter.rank} or less"
    console.print(text, markup=False, soft_wrap=True)
    return 0
