"""`lora-jax generate`: a file of requests -> a file of answers.

input lines -> (checked) -> model, adapters -> prompts as token ids -> Engine
            -> output lines, in the input's order
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_jax.cli.console import messages, progress
from lora_jax.cli.jsonl import InputLine, read_input
from lora_jax.cli.options import DEFAULT_MAX_LORAS, add_shared_options
from lora_jax.cli.prompts import Options, to_requests
from lora_jax.cli.sources import (
    keep_compiled_programs,
    largest_rank,
    not_negative,
    unique_names,
)
from lora_jax.cli.textlines import check_output
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError, RequestError, faults
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.models import CausalLM, Tokenizer, load_causal_lm, load_tokenizer
from lora_jax.serving import (
    CompilationCounter,
    Engine,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)

SUMMARY = "answer a file of prompts, each with its own adapter, in one batch"

DETAILS = """\
An input line is
  {"id": ..., "prompt": "..." | "prompt_token_ids": [...] | "messages": [...],
   "lora": NAME or null, "max_tokens": N (optional)}
An output line has id, lora, prompt_token_ids, token_ids, text and finish_reason
("stop" or "length"), and with --prompt-logprobs also prompt_logprobs: null, then one
number for each further prompt token. Outputs keep the input's order.

"prompt" is continued as it is; "messages" goes through the model's chat template.
There may be more adapters than --max-loras and more lines than --max-num-seqs."""

DEFAULT_MAX_TOKENS = 64

LENGTH_STEP = 64
"""The cache is as long as the longest request, rounded up to a multiple of this, so
that files of similar prompts share compiled programs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    add_shared_options(parser)
    add = parser.add_argument
    add(
        "--max-tokens",
        type=not_negative,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="tokens to generate where a line does not say (default %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the most likely token (default); above 0 draws",
    )
    add(
        "--top-k", type=int, default=0, metavar="K", help="draw among K tokens (0: all)"
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest tokens that sum to P (default 1)",
    )
    add("--seed", type=int, default=0, metavar="S", help="of the draws (default 0)")
    add(
        "--prompt-logprobs",
        action="store_true",
        help="also write the log-probability of each prompt token",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    folders = unique_names(args.lora)
    lines = read_input(args.input, folders)
    check_output(args.output, args.input)
    rank = largest_rank(folders, args.max_lora_rank)
    keep_compiled_programs()
    with progress(f"loading {args.model}") as say:
        tokenizer = load_tokenizer(args.model)  # First: a fault there is told at once.
        model = load_causal_lm(args.model, args.dtype, progress=say)
    options = Options(
        max_tokens=args.max_tokens,
        sampling=sampling,
        prompt_logprobs=args.prompt_logprobs,
        max_prompt_len=model.config.max_position_embeddings - 1,
        vocab_size=model.config.vocab_size,
    )
    requests = to_requests(args.input, lines, tokenizer, options)
    with progress(f"loading {len(folders)} adapters"):
        engine = _engine(args, model, tokenizer, requests, rank, folders)
    start = time.perf_counter()
    by_id = {str(line.number): line for line in lines}
    with args.output.open("w", encoding="utf-8") as file, CompilationCounter() as count:

        def write(result: GenerationResult) -> None:
            line = by_id[result.request_id]
            scored = args.prompt_logprobs
            file.write(_output_line(line, result, tokenizer, scored=scored) + "\n")
            file.flush()

        with progress(f"answering {len(requests)} lines"):
            results = _answer_all(engine, requests, write)
    _print_summary(results, time.perf_counter() - start, count.count)
    _raise_failures(args.input, results)
    return 0


def _engine(
    args: argparse.Namespace,
    model: CausalLM,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    rank: int,
    folders: dict[str, Path],
) -> Engine:
    manager = None
    if folders:
        slots = args.max_loras or min(len(folders), DEFAULT_MAX_LORAS)
        config = LoRAConfig(
            max_loras=slots,
            max_lora_rank=args.max_lora_rank or rank,
            max_cpu_loras=args.max_cpu_loras or max(slots, len(folders)),
        )
        manager = LRUCacheLoRAModelManager(model, config)
    engine = Engine(
        model,
        manager,
        max_num_seqs=max(1, min(args.max_num_seqs, len(requests))),
        max_model_len=_needed_length(requests, model.config.max_position_embeddings),
        eos_ids=tokenizer.eos_ids,
    )
    found = []
    for name, folder in folders.items():
        try:
            engine.adapters.add(name, folder)
        except AdapterError as error:
            found.append(str(error))
    if found:
        raise AdapterError("\n".join(found))
    return engine


def _needed_length(requests: Sequence[GenerationRequest], limit: int) -> int:
    longest = max((len(r.prompt_token_ids) + r.max_tokens for r in requests), default=1)
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, limit)


def _answer_all(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    write: Callable[[GenerationResult], None],
) -> list[GenerationResult]:
    """Runs the requests; writes each answer as soon as all before it are written.

    Returns:
      The answers in the requests' order, failed ones too (those are not written).
    """
    finished: dict[str, GenerationResult] = {}
    in_order: list[GenerationResult] = []
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for event in engine.step():
            if event.result is not None:
                finished[event.request_id] = event.result
        while len(in_order) < len(requests):
            result = finished.pop(requests[len(in_order)].request_id, None)
            if result is None:
                break
            in_order.append(result)
            if result.finish_reason is not FinishReason.ERROR:
                write(result)
    return in_order


def _output_line(
    line: InputLine, result: GenerationResult, tokenizer: Tokenizer, *, scored: bool
) -> str:
    """Returns the answer's line of the output file, without its end."""
    fields = {
        "id": line.id,
        "lora": line.lora,
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "text": tokenizer.decode(result.token_ids),
        "finish_reason": result.finish_reason,
    }
    if scored:
        fields["prompt_logprobs"] = result.prompt_logprobs
    return json.dumps(fields, ensure_ascii=False)


def _raise_failures(path: Path, results: Sequence[GenerationResult]) -> None:
    failed = [
        f"{path}:{result.request_id}: {result.error}"
        for result in results
        if result.finish_reason is FinishReason.ERROR
    ]
    if failed:
        headline = "these lines could not be answered; the others are written:"
        raise RequestError(faults(headline, failed))


def _print_summary(
    results: Sequence[GenerationResult], seconds: float, compilations: int
) -> None:
    tokens = sum(len(result.token_ids) for result in results)
    messages().print(
        f"{len(results)} answers, {tokens} tokens in {seconds:.1f} s"
        f" ({tokens / max(seconds, 1e-9):.0f} tokens/s, {compilations} compilations"
        " included)",
        markup=False,
    )
