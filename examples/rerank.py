"""A reranker and three classifiers with heads of their own, answered in one batch.

Fits four small heads on what all-MiniLM-L6-v2 makes of a few sentences (`rerank.json`)
and writes them as files: one as the head of a base model that scores how much a text
is about food, the others as PEFT adapters (`modules_to_save`) with two, three and four
labels. Then each new text is put through the base and through every adapter, as rows
of one batch.

    python examples/rerank.py --output rerank_models

The heads are least squares on one hidden state, made in seconds: the point is the
batch, not their quality.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager
from lora_jax.cli.console import output, table
from lora_jax.models import load_model, load_tokenizer, resolve_model
from lora_jax.serving.texts import Text, TextEngine, classify

DATA = Path(__file__).with_suffix(".json")
BASE_NAME = "all-minilm-l6-v2"
SCORE = ("food",)
"""The base's only label: texts are ranked by it."""

LABELS = {
    "referee": ("sport", "other"),
    "kiosk": ("food", "sport", "other"),
    "newspaper": ("food", "sport", "computer", "money"),
}
"""Adapter -> its labels; "other" stands for the topics that it does not name."""

RIDGE = 0.1  # weight of the squared head beside the squared errors
MAX_TOKENS = 32


@dataclass(frozen=True)
class Head:
    """Label scores are `pooled @ weight.T + bias`."""

    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Row:
    """One answered row of the batch.

    Attributes:
      text: what was asked.
      lora: name of the adapter, None for the base.
      scores: one for each of the row's own labels.
    """

    text: str
    lora: str | None
    scores: np.ndarray

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the scores."""
        return SCORE if self.lora is None else LABELS[self.lora]

    @property
    def best(self) -> str:
        """The label with the highest score."""
        return self.labels[int(self.scores.argmax())]


def pooled_states(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Returns what a classification head reads of each text, `(texts, d)`."""
    body, tokenizer = load_model(folder), load_tokenizer(folder)
    tokens = np.zeros((len(texts), MAX_TOKENS), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    return np.asarray(body.pooled(body(jnp.asarray(tokens), jnp.asarray(mask))))


def fit(states: np.ndarray, targets: np.ndarray) -> Head:
    """Returns the head that comes nearest to 0/1 targets `(texts, labels)`.

    Rare labels weigh as much as frequent ones.
    """
    mean, heads = states.mean(axis=0), []
    for target in targets.T:
        weight = np.where(target > 0, (1 - target).sum() / target.sum(), 1.0)
        x = states - mean
        share = (weight * target).sum() / weight.sum()
        square = (x * weight[:, None]).T @ x + RIDGE * np.eye(x.shape[1])
        head = np.linalg.solve(square, (x * weight[:, None]).T @ (target - share))
        heads.append((head, share - mean @ head))
    return Head(
        np.stack([head for head, _ in heads]).astype(np.float32),
        np.array([bias for _, bias in heads], np.float32),
    )


def label_of(topic: str, labels: Sequence[str]) -> str:
    """Returns the label that an adapter with these labels has for a topic."""
    return topic if topic in labels else "other"


def fit_all(body: Path, known: Sequence[dict[str, str]]) -> dict[str | None, Head]:
    """Returns the heads of the adapters by name, and under None that of the base."""
    states = pooled_states(body, [item["text"] for item in known])
    heads: dict[str | None, Head] = {}
    for name, labels in {None: SCORE, **LABELS}.items():
        own = [label_of(item["topic"], labels) for item in known]
        targets = np.array([[label == one for one in labels] for label in own], float)
        heads[name] = fit(states, targets)
    return heads


def write_base(body: Path, head: Head, folder: Path) -> None:
    """Writes the body with a head as a Hugging Face sequence classifier."""
    folder.mkdir(parents=True)
    tensors = load_file(body / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    head_tensors = {"classifier.weight": head.weight, "classifier.bias": head.bias}
    save_file(tensors | head_tensors, folder / "model.safetensors")
    config = json.loads((body / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["BertForSequenceClassification"]
    config["id2label"] = {str(i): name for i, name in enumerate(SCORE)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(body / name, folder / name)


def write_adapter(head: Head, labels: Sequence[str], folder: Path) -> None:
    """Writes a head as PEFT writes an adapter with `modules_to_save`."""
    folder.mkdir(parents=True)
    key = "base_model.model.classifier"
    tensors = {f"{key}.weight": head.weight, f"{key}.bias": head.bias}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [],
        "modules_to_save": ["classifier"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    names = {"id2label": {str(i): name for i, name in enumerate(labels)}}
    (folder / "config.json").write_text(json.dumps(names), encoding="utf-8")


def answer(folder: Path, asked: Sequence[tuple[str, str | None]]) -> list[Row]:
    """Answers texts, each with its own adapter or none, as the rows of one batch."""
    model, tokenizer = load_model(folder / "base"), load_tokenizer(folder / "base")
    most = max(len(labels) for labels in LABELS.values())
    config = LoRAConfig(max_loras=len(LABELS), max_lora_cls_labels=most)
    engine = TextEngine(
        model,
        classify,
        LRUCacheLoRAModelManager(model, config),
        max_num_seqs=len(asked),
        max_len=MAX_TOKENS,
    )
    for name in LABELS:
        engine.adapters.add(name, folder / name)
    texts = [Text(tuple(tokenizer.encode(text)), lora=lora) for text, lora in asked]
    rows = zip(asked, engine.run(texts), strict=True)
    # The batch is as wide as its widest head; what a row does not have is -inf.
    return [Row(text, lora, own[np.isfinite(own)]) for (text, lora), own in rows]


def show(rows: Sequence[Row]) -> None:
    """Prints the texts by the base's score, then what each adapter says of them."""
    base = [row for row in rows if row.lora is None]
    ranked = sorted(base, key=lambda row: -row.scores[0])
    cells = [(row.text, f"{row.scores[0]:.2f}") for row in ranked]
    output().print(table("Ranked by the base", ("text", *SCORE), cells))
    for name, labels in LABELS.items():
        cells = [
            (row.text, *(f"{score:.2f}" for score in row.scores), row.best)
            for row in rows
            if row.lora == name
        ]
        columns = ("text", *labels, "answer")
        output().print(table(f"Adapter {name}", columns, cells))
    widths = sorted({len(row.labels) for row in rows})
    output().print(f"{len(rows)} rows with {widths} labels, one batch.")


def run(folder: Path) -> list[Row]:
    """Makes the base and the adapters in a folder; answers the new texts."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    body = resolve_model(BASE_NAME)
    for name, head in fit_all(body, data["known"]).items():
        if name is None:
            write_base(body, head, folder / "base")
        else:
            write_adapter(head, LABELS[name], folder / name)
    return answer(
        folder,
        [(item["text"], lora) for item in data["new"] for lora in (None, *LABELS)],
    )


def main() -> None:
    """Reads the options, runs, prints."""
    parser = argparse.ArgumentParser(description="rank and label texts in one batch")
    parser.add_argument("--output", type=Path, help="keep the models in a new folder")
    folder = parser.parse_args().output
    if folder is not None:
        show(run(folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        show(run(Path(scratch)))


if __name__ == "__main__":
    main()
