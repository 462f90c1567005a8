"""The options that `generate`, `embed` and `classify` share."""

import argparse
from pathlib import Path

from lora_jax.cli.sources import lora_option, positive

DEFAULT_MAX_NUM_SEQS = 16
DEFAULT_MAX_LORAS = 8


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Declares model, adapters, files, sizes and dtype."""
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="model folder, hub id, or name")
    add(
        "--lora",
        action="append",
        default=[],
        type=lora_option,
        metavar="NAME=DIR",
        help="an adapter and the name that lines use for it; may be repeated",
    )
    add("--input", required=True, type=Path, metavar="FILE", help="requests, JSONL")
    add("--output", required=True, type=Path, metavar="FILE", help="answers, JSONL")
    add(
        "--max-loras",
        type=positive,
        metavar="S",
        help="adapters in one batch: slots on the device (default: as many as given, "
        f"at most {DEFAULT_MAX_LORAS})",
    )
    add(
        "--max-lora-rank",
        type=positive,
        metavar="R",
        help="rank of the slots (default: the largest of the adapters given)",
    )
    add(
        "--max-cpu-loras",
        type=positive,
        metavar="C",
        help="adapters kept in host memory (default: all that are given)",
    )
    add(
        "--max-num-seqs",
        type=positive,
        default=DEFAULT_MAX_NUM_SEQS,
        metavar="B",
        help="lines that run at the same time (default %(default)s)",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
