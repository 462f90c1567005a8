"""`lora-jax demo`: one real model, several adapters, one mixed batch, and the proof.

adapters of this package -> Engine -> the same prompts twice: the first time everything
compiles, the second time, in another row order, nothing does and the clock runs
"""

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lora_jax.adapters import Adapter
from lora_jax.cli.console import messages, output, progress, table
from lora_jax.cli.jsonl import InputLine, read_input
from lora_jax.cli.prompts import Options, to_requests
from lora_jax.cli.sources import (
    keep_compiled_programs,
    largest_rank,
    positive,
)
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterNotFoundError
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.models import (
    DEFAULT_MODEL,
    CausalLM,
    Tokenizer,
    load_causal_lm,
    load_tokenizer,
)
from lora_jax.serving import (
    CompilationCounter,
    Engine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)

SUMMARY = "answer one mixed batch with a real model and several adapters"

DETAILS = f"""\
Takes {DEFAULT_MODEL} and the adapters that come with this package, or --model and a
folder of adapters with --adapters. Prints who answered what, the proof that each
adapter was applied, tokens per second and the number of compilations."""

ADAPTERS = Path(__file__).parent.parent / "demo_adapters"
PROMPTS = "prompts.jsonl"
DEFAULT_MAX_TOKENS = 40
SHUFFLE_SEED = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        metavar="M",
        help="model folder, hub id, or name (default %(default)s)",
    )
    add(
        "--adapters",
        type=Path,
        default=ADAPTERS,
        metavar="DIR",
        help=f"folder with a folder for each adapter, and a {PROMPTS} whose lines are "
        "those of `lora-jax generate` (default: the ones of this package)",
    )
    add(
        "--max-tokens",
        type=positive,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="tokens of an answer (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    start = time.perf_counter()
    folders = find_adapters(args.adapters)
    lines = read_input(args.adapters / PROMPTS, folders)
    rank = largest_rank(folders, None)
    keep_compiled_programs()
    with progress(f"getting and loading {args.model}") as say:
        model = load_causal_lm(args.model, progress=say)
        tokenizer = load_tokenizer(args.model)
    requests = _requests(args, lines, model, tokenizer)
    with progress(f"loading {len(folders)} adapters"):
        engine, adapters = _engine(model, tokenizer, requests, folders, rank)
    with CompilationCounter() as warmup, progress("compiling, and answering once"):
        results = engine.generate(requests)
        differences = _differences(engine, requests)
    with CompilationCounter() as after, progress("answering in another row order"):
        again, seconds = _timed(engine, requests)
    console = output()
    console.print(_answer_table(lines, results, tokenizer))
    console.print(_proof_table(adapters, differences))
    _print_numbers(results, again, seconds, warmup, after)
    messages().print(f"all in all {time.perf_counter() - start:.1f} s", markup=False)
    return 0


def find_adapters(folder: Path) -> dict[str, Path]:
    """Returns name -> folder of the adapters in a folder, sorted.

    Raises:
      AdapterNotFoundError: if there is none.
    """
    found = {
        config.parent.name: config.parent
        for config in sorted(folder.glob("*/adapter_config.json"))
    }
    if not found:
        raise AdapterNotFoundError(
            f"{folder} holds no adapter folders (with adapter_config.json); name"
            " another with --adapters."
        )
    return found


def _requests(
    args: argparse.Namespace,
    lines: Sequence[InputLine],
    model: CausalLM,
    tokenizer: Tokenizer,
) -> list[GenerationRequest]:
    options = Options(
        max_tokens=args.max_tokens,
        sampling=SamplingParams(),
        prompt_logprobs=False,
        max_prompt_len=model.config.max_position_embeddings - args.max_tokens,
        vocab_size=model.config.vocab_size,
    )
    return to_requests(args.adapters / PROMPTS, lines, tokenizer, options)


def _engine(
    model: CausalLM,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    folders: dict[str, Path],
    rank: int,
) -> tuple[Engine, dict[str, Adapter]]:
    config = LoRAConfig(max_loras=len(folders), max_lora_rank=rank)
    manager = LRUCacheLoRAModelManager(model, config)
    longest_prompt = max(len(request.prompt_token_ids) for request in requests)
    longest = max(len(r.prompt_token_ids) + r.max_tokens for r in requests)
    engine = Engine(
        model,
        manager,
        max_num_seqs=len(requests),
        max_model_len=longest,
        eos_ids=tokenizer.eos_ids,
        # One length for all: one prefill program.
        prefill_lengths=[longest_prompt],
    )
    adapters = {name: engine.adapters.add(name, path) for name, path in folders.items()}
    return engine, adapters


def _differences(
    engine: Engine, requests: Sequence[GenerationRequest]
) -> dict[str, float]:
    """Returns for each adapter how far it moves the logits of its prompts at most."""
    base = [dataclasses.replace(request, lora=None) for request in requests]
    pairs = zip(engine.prompt_logits(requests), engine.prompt_logits(base), strict=True)
    found: dict[str, float] = {}
    for request, (own, other) in zip(requests, pairs, strict=True):
        if request.lora is not None:
            moved = float(np.abs(own - other).max())
            found[request.lora] = max(moved, found.get(request.lora, 0.0))
    return found


def _timed(
    engine: Engine, requests: Sequence[GenerationRequest]
) -> tuple[dict[str, GenerationResult], float]:
    """Answers again in another order; returns the answers by id, and seconds."""
    shuffled = random.Random(SHUFFLE_SEED).sample(requests, len(requests))
    start = time.perf_counter()
    results = engine.generate(shuffled)
    seconds = time.perf_counter() - start
    return {result.request_id: result for result in results}, seconds


def _answer_table(
    lines: Sequence[InputLine],
    results: Sequence[GenerationResult],
    tokenizer: Tokenizer,
):
    rows = [
        (line.lora or "(base)", _shown_prompt(line), tokenizer.decode(result.token_ids))
        for line, result in zip(lines, results, strict=True)
    ]
    return table("one batch", ("adapter", "prompt", "answer"), rows)


def _shown_prompt(line: InputLine) -> str:
    if line.messages is not None:
        return str(line.messages[-1]["content"])
    return line.prompt or json.dumps(line.prompt_token_ids)


def _proof_table(adapters: dict[str, Adapter], differences: dict[str, float]):
    rows = [
        (
            name,
            adapter.rank,
            len(adapter.parts),
            f"{adapter.report.matched} of {adapter.report.total}",
            f"{differences[name]:.2f}" if name in differences else "not asked",
        )
        for name, adapter in adapters.items()
    ]
    columns = (
        "adapter",
        "rank",
        "modules",
        "tensors applied / in file",
        "largest change of a logit",
    )
    return table("each adapter was applied", columns, rows)


def _print_numbers(
    results: Sequence[GenerationResult],
    again: dict[str, GenerationResult],
    seconds: float,
    warmup: CompilationCounter,
    after: CompilationCounter,
) -> None:
    tokens = sum(len(result.token_ids) for result in again.values())
    differing = [
        result.request_id
        for result in results
        if result.token_ids != again[result.request_id].token_ids
    ]
    console = output()
    console.print(
        f"{len(results)} rows, {tokens} tokens in {seconds:.2f} s:"
        f" {tokens / seconds:.0f} tokens/s; answers that changed with the row order:"
        f" {len(differing)}"
    )
    console.print(
        f"compilations: {warmup.count} to warm up ({warmup.seconds:.1f} s),"
        f" {after.count} afterwards"
    )
