"""`lora-jax classify`: a file of texts -> a file of label scores, heads and all."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

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
from lora_jax.errors import ModelError
from lora_jax.models import (
    Classifier,
    default_labels,
    load_model,
    load_tokenizer,
    resolve_model,
)
from lora_jax.serving.texts import classify

SUMMARY = "score a file of texts, each with its own adapter and head, in one batch"

DETAILS = f"""\
{INPUT}
An output line has id, lora, scores (raw, one for each label) and labels (their names:
the base model's; for an adapter with a head of its own, those that its files give, or
LABEL_0, LABEL_1, ...). Outputs keep the input's order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_shared_options(parser)


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
    if not isinstance(model, Classifier):
        raise ModelError(
            f"{args.model} is a {type(model).__name__}, which has no labels; a "
            "classifier's config.json names ...ForSequenceClassification"
        )
    lines = read_texts(args.input, folders, tokenizer, model)
    check_output(args.output, args.input)
    base = tuple(model.config.labels)  # type: ignore[attr-defined]
    counts = own_labels(folders)
    names = {name: _labels(folders[name], n, base) for name, n in counts.items()}
    most = max(map(len, [base, *names.values()]))
    engine = text_engine(args, model, classify, folders, rank=rank, labels=most)
    with progress(f"scoring {len(lines)} lines"):
        rows = engine.run([text for _, text in lines])
    with args.output.open("w", encoding="utf-8") as file:
        for (line_id, text), row in zip(lines, rows, strict=True):
            labels = names.get(text.lora or "", base)
            scores = row[: len(labels)].tolist()
            answer = {"id": line_id, "lora": text.lora, "scores": scores}
            file.write(
                json.dumps(answer | {"labels": labels}, ensure_ascii=False) + "\n"
            )
    return 0


def _labels(folder: Path, count: int | None, base: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the label names of an adapter: its own where it has a head of its own."""
    if count is None:
        return base
    named = _named(folder)
    return named if len(named) == count else default_labels(count)


def _named(folder: Path) -> tuple[str, ...]:
    """Label names in the adapter's folder: a config.json of a Hugging Face model."""
    path = folder / "config.json"
    if not path.is_file():
        return ()
    values = json.loads(path.read_text(encoding="utf-8"))
    named = values.get("id2label") if isinstance(values, Mapping) else None
    if not isinstance(named, Mapping):
        return ()
    return tuple(str(named.get(str(index), "")) for index in range(len(named)))
