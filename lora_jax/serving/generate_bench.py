"""How many tokens a second one batch generates, with adapters and without.

    lora-jax bench generate

The same prompts through the same engine, in turn: as requests to the base model, which
run the program without LoRA, and as requests that take turns over the adapters. These
are zeros of a given rank on every layer that takes one: they cost what others do.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lora_jax.adapters.adapter import take_id
from lora_jax.config import LoRAConfig
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.models import CausalLM
from lora_jax.serving.compilations import CompilationCounter
from lora_jax.serving.engine import Engine
from lora_jax.serving.requests import GenerationRequest


@dataclass(frozen=True)
class GenerationSizes:
    """What is generated.

    Attributes:
      rows: requests, all of them in one batch.
      prompt, new: tokens of each prompt, and generated for it.
      adapters: distinct adapters in the batch, and slots of the bank.
      rank: of the adapters and the slots.
      runs: times that each is measured.
    """

    rows: int = 16
    prompt: int = 64
    new: int = 64
    adapters: int = 8
    rank: int = 16
    runs: int = 3


@dataclass(frozen=True)
class GenerationTimes:
    """Seconds of each run, prefill included, and of runs that end after a prefill."""

    whole: tuple[float, ...]
    prefill: tuple[float, ...]

    def tokens_per_second(self, sizes: GenerationSizes) -> float:
        """Generated tokens a second, prefill included: the median run."""
        return sizes.rows * sizes.new / statistics.median(self.whole)

    def step(self, sizes: GenerationSizes) -> float:
        """Seconds of one decode step: what the median run takes after its prefill."""
        decode = statistics.median(self.whole) - statistics.median(self.prefill)
        return decode / max(sizes.new - 1, 1)


def measure_generation(
    model: CausalLM, sizes: GenerationSizes
) -> tuple[GenerationTimes, GenerationTimes, int]:
    """Returns the times of the base model and with LoRA, and what was compiled.

    Wraps `model`. The count is of compilations after the warm-up; it should be 0.
    """
    config = LoRAConfig(max_loras=sizes.adapters, max_lora_rank=sizes.rank)
    manager = LRUCacheLoRAModelManager(model, config)
    names = [f"adapter-{number}" for number in range(sizes.adapters)]
    for name in names:
        dummy = manager.create_dummy_lora(take_id(None), sizes.rank)
        manager.add_adapter(replace(dummy, name=name))
    engine = Engine(
        model,
        manager,
        max_num_seqs=sizes.rows,
        max_model_len=sizes.prompt + sizes.new,
        prefill_lengths=(sizes.prompt,),
    )
    rng = np.random.default_rng(0)
    shape = (sizes.rows, sizes.prompt)
    prompts = rng.integers(0, model.config.vocab_size, shape).tolist()

    def seconds(loras: Sequence[str | None], new: int) -> float:
        requests = [
            GenerationRequest(
                str(row),
                tuple(prompt),
                lora=loras[row % len(loras)],
                max_tokens=new,
                stop_token_ids=(),
            )
            for row, prompt in enumerate(prompts)
        ]
        start = time.perf_counter()
        engine.generate(requests)
        return time.perf_counter() - start

    kinds: list[Sequence[str | None]] = [[None], names]
    for loras in kinds:
        seconds(loras, min(sizes.new, 2))
    whole: list[list[float]] = [[], []]
    prefill: list[list[float]] = [[], []]
    with CompilationCounter() as compilations:
        for _ in range(sizes.runs):
            for kind, loras in enumerate(kinds):
                prefill[kind].append(seconds(loras, 1))
                whole[kind].append(seconds(loras, sizes.new))
    base, lora = (
        GenerationTimes(tuple(whole[kind]), tuple(prefill[kind])) for kind in (0, 1)
    )
    return base, lora, compilations.count
