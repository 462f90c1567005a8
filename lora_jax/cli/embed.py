"""`lora-jax embed`: a file of texts -> a file of vectors, each with its adapter."""

import argparse
import json

from lora_jax.cli.console import progress
from lora_jax.cli.options import add_shared_options
from lora_jax.cli.sources import keep_compiled_programs, largest_rank, unique_names
from lora_jax.cli.textlines import (
    INPUT,
    check_output,
    own_labels,
    read_texts,
    text_engine,
)
from lora_jax.models import (
    POOLINGS,
    folder_pooling,
    load_model,
    load_tokenizer,
    resolve_model,
)
from lora_jax.serving.texts import embed_with

SUMMARY = "embed a file of texts, each with its own adapter, in one batch"

DETAILS = f"""\
{INPUT}
An output line has id, lora and embedding. Outputs keep the input's order."""

FALLBACK = "mean"
"""Pooling of a model whose folder asks for none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_shared_options(parser)
    parser.add_argument(
        "--pooling",
        choices=sorted(POOLINGS),
        help="tokens to vector (default: what the model's folder asks for, or mean)",
    )
    parser.add_argument(
        "--normalize", action="store_true", help="give vectors of length 1"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    folders = unique_names(args.lora)
    rank = largest_rank(folders, args.max_lora_rank)
    keep_compiled_programs()
    with progress(f"loading {args.model}") as say:
        folder = resolve_model(args.model, progress=say)
        model = load_model(folder, args.dtype, progress=say)
        tokenizer = (
            load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        )
    lines = read_texts(args.input, folders, tokenizer, model)
    check_output(args.output, args.input)
    pooling = args.pooling or folder_pooling(folder) or FALLBACK
    score = embed_with(pooling, unit_length=args.normalize)
    counts = [count for count in own_labels(folders).values() if count is not None]
    labels = max(counts, default=None)
    engine = text_engine(args, model, score, folders, rank=rank, labels=labels)
    with progress(f"embedding {len(lines)} lines"):
        vectors = engine.run([text for _, text in lines])
    with args.output.open("w", encoding="utf-8") as file:
        for (line_id, text), vector in zip(lines, vectors, strict=True):
            answer = {"id": line_id, "lora": text.lora, "embedding": vector.tolist()}
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
    return 0
