"""What an engine can serve, and what is wrong with a request that it cannot."""

import dataclasses
from collections.abc import Sequence

from lora_jax.errors import ConfigError, faults
from lora_jax.models import ModelConfig
from lora_jax.serving.buckets import check_ladder, length_ladder
from lora_jax.serving.requests import GenerationRequest

DEFAULT_MODEL_LEN = 2048
"""Tokens of a sequence unless told otherwise; every row reserves cache for them all."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of an engine.

    Attributes:
      max_num_seqs: rows of the batch.
      max_model_len: prompt plus generated tokens of one request, at most.
      prefill_lengths: the lengths that prompts are padded to, ascending.
      vocab_size: token ids are below it.
    """

    max_num_seqs: int
    max_model_len: int
    prefill_lengths: tuple[int, ...]
    vocab_size: int

    def faults(
        self, request: GenerationRequest, own_vocabulary: int | None
    ) -> list[str]:
        """Returns everything about the request's sizes that cannot be served.

        Args:
          request: what is asked.
          own_vocabulary: tokens that its adapter's own embedding knows, None if it has
            the base's.
        """
        found = []
        vocab_size = own_vocabulary or self.vocab_size
        prompt = request.prompt_token_ids
        if not prompt:
            found.append("the prompt is empty; give at least one token.")
        outside = sorted({t for t in prompt if not 0 <= t < vocab_size})
        if outside:
            found.append(
                f"token ids {outside[:5]} are outside the vocabulary of {vocab_size}."
            )
        if request.max_tokens < 0:
            found.append(f"max_tokens {request.max_tokens}: expected 0 or more.")
        room = self.max_model_len - (request.max_tokens > 0)
        longest = min(self.prefill_lengths[-1], room)
        if len(prompt) > longest:
            found.append(
                f"the prompt has {len(prompt)} tokens, at most {longest} fit with"
                f" max_model_len={self.max_model_len} and prefill lengths up to"
                f" {self.prefill_lengths[-1]}; shorten it or raise the limit."
            )
        return found


def engine_limits(
    config: ModelConfig,
    *,
    max_num_seqs: int,
    max_model_len: int | None,
    prefill_lengths: Sequence[int] | None,
) -> Limits:
    """Returns the limits of an engine; for the arguments see `Engine`.

    Raises:
      ConfigError: naming every option that cannot work.
    """
    longest = config.max_position_embeddings
    if max_model_len is None:
        max_model_len = min(DEFAULT_MODEL_LEN, longest)
    found = []
    if max_num_seqs < 1:
        found.append(f"max_num_seqs={max_num_seqs}: expected at least 1.")
    if not 1 <= max_model_len <= longest:
        found.append(
            f"max_model_len={max_model_len}: expected between 1 and the model's"
            f" max_position_embeddings={longest}."
        )
    if found:
        raise ConfigError(faults("the engine cannot be built:", found))
    lengths = length_ladder(max_model_len)
    if prefill_lengths is not None:
        lengths = check_ladder(prefill_lengths, max_model_len)
    return Limits(max_num_seqs, max_model_len, lengths, config.vocab_size)
