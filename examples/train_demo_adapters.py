"""Trains the four demo adapters of `lora_jax/demo_adapters/` with PEFT, on a CPU.

Turns the short question and answer pairs of `train_demo_adapters.json` into one PEFT
folder per style, then answers questions that were not trained on, so that a reader
can judge the styles. Needs the `oracle` extra (torch, transformers, peft):

    pip install "lora-jax[oracle]"
    python examples/train_demo_adapters.py --output lora_jax/demo_adapters

The styles differ on purpose in rank, scale rule, target modules and layers, because
one batch must serve such adapters side by side.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lora_jax.models import resolve_model

DATA = Path(__file__).with_suffix(".json")
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEED = 0
BATCH_SIZE = 8
MAX_TOKENS = 80  # of one question with its answer; the longest pair has fewer
ANSWER_TOKENS = 40
IGNORED = -100  # the label that the loss of transformers leaves out


@dataclass(frozen=True)
class Recipe:
    """What one adapter learns and how it is built.

    Attributes:
      answer: makes the trained answer from one entry of the data file.
      rank: rank of every target module that `rank_pattern` does not name.
      alpha: numerator of the scale, `alpha / rank` (rsLoRA: `alpha / sqrt(rank)`).
      targets: names of the linear layers that get an adapter.
      layers: decoder layers that get one.
      steps: optimizer steps of `BATCH_SIZE` pairs.
    """

    answer: Callable[[dict[str, str]], str]
    rank: int
    alpha: int
    targets: tuple[str, ...]
    layers: range
    steps: int
    learning_rate: float = 2e-3
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)


RECIPES = {
    "pirate": Recipe(
        answer=lambda entry: entry["pirate"],
        rank=8,
        alpha=16,
        targets=("q_proj", "v_proj"),
        layers=range(30),
        steps=72,
    ),
    "poet": Recipe(
        answer=lambda entry: entry["poet"],
        rank=8,
        alpha=16,
        targets=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
        layers=range(16, 30),
        steps=48,
        learning_rate=1.5e-3,
        rank_pattern={"down_proj": 4},
    ),
    "robot": Recipe(
        answer=lambda entry: f"BEEP BOOP! {entry['plain']} END.",
        rank=4,
        alpha=4,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
        layers=range(18, 30),
        steps=48,
        use_rslora=True,
    ),
    "json": Recipe(
        answer=lambda entry: json.dumps({"answer": entry["plain"]}),
        rank=2,
        alpha=8,
        targets=("v_proj", "o_proj"),
        layers=range(10, 30),
        steps=48,
    ),
}


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Returns the token ids of one question, up to where the answer starts."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str
) -> tuple[list[int], list[int]]:
    """Returns token ids and labels; only the answer and its end have labels."""
    prompt = chat_ids(tokenizer, question)
    reply = tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
    tokens = prompt + reply
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"{question!r}: {len(tokens)} tokens exceed {MAX_TOKENS}")
    return tokens, [IGNORED] * len(prompt) + reply


def pad_batch(pairs: list[tuple[list[int], list[int]]], pad: int) -> dict:
    """Returns the model's inputs, padded on the right to the longest pair."""
    width = max(len(tokens) for tokens, _ in pairs)

    def rows(column: int, fill: int) -> torch.Tensor:
        lists = [pair[column] for pair in pairs]
        return torch.tensor([row + [fill] * (width - len(row)) for row in lists])

    tokens, labels = rows(0, pad), rows(1, IGNORED)
    lengths = torch.tensor([[len(pair[0])] for pair in pairs])
    mask = (torch.arange(width) < lengths).long()
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def shuffled_batches(pairs: list, shuffle: random.Random) -> Iterator[list]:
    """Yields batches for ever; every pair once before any comes again."""
    while True:
        order = shuffle.sample(pairs, len(pairs))
        for start in range(0, len(order), BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def lora_config(recipe: Recipe) -> LoraConfig:
    """Returns the PEFT configuration of a recipe."""
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_NAME,
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        layers_to_transform=list(recipe.layers),
        use_rslora=recipe.use_rslora,
        rank_pattern=recipe.rank_pattern,
    )


def train(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    entries: list[dict[str, str]],
) -> PeftModel:
    """Returns the base with one trained adapter; the base's own weights rest."""
    torch.manual_seed(SEED)
    model = get_peft_model(base, lora_config(recipe))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.05, total_iters=recipe.steps
    )
    pairs = [
        encode_pair(tokenizer, entry["question"], recipe.answer(entry))
        for entry in entries
    ]
    batches = shuffled_batches(pairs, random.Random(SEED))
    for step in range(recipe.steps):
        loss = model(**pad_batch(next(batches), tokenizer.pad_token_id)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 12 == 0 or step == recipe.steps - 1:
            print(f"  step {step:3d}  loss {loss.item():.3f}", flush=True)
    return model


def save(model: PeftModel, folder: Path) -> None:
    """Writes the adapter in float16, as the PEFT folder that `load_adapter` reads."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.half()
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's empty model card
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()  # PEFT keeps a set, in no order
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def greedy_answer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
) -> str:
    """Returns the greedy answer to one question."""
    prompt = torch.tensor([chat_ids(tokenizer, question)])
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def show_answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
) -> None:
    """Prints the greedy answer to each question."""
    model.eval()
    for question in questions:
        print(f"  {question}\n    {greedy_answer(model, tokenizer, question)!r}")


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's choices."""
    parser = argparse.ArgumentParser(description="Trains the demo adapters.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Trains, shows and saves every chosen adapter."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    folder = resolve_model(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.name_or_path = BASE_NAME  # PEFT writes it into the configuration
    data = json.loads(DATA.read_text())

    print("base")
    show_answers(base, tokenizer, data["held_out"])
    for name in arguments.only:
        print(name)
        model = train(base, tokenizer, RECIPES[name], data["train"])
        save(model, arguments.output / name)
        base = model.unload()
        adapted = PeftModel.from_pretrained(base, arguments.output / name)
        show_answers(adapted, tokenizer, data["held_out"])
        base = adapted.unload()


if __name__ == "__main__":
    main()
