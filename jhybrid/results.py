"""Step results read out for one sequence: log-probability entries, and what the sampler must know of a new row."""

import numpy as np

from jhybrid.batch import needs_row
from jhybrid.request import TokenLogprobs
from jhybrid.runner import StepResult
from jhybrid.sampling import LOGPROB_FLOOR, PROMPT_BIT
from jhybrid.scheduler import Item
from jhybrid.sequence import Sequence


def entry(token: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray, count: int) -> TokenLogprobs:
    """The `count` most likely tokens, highest first, with `token` always among them."""
    best = [(int(i), float(lp)) for i, lp in zip(top_ids[:count], top_logprobs[:count], strict=True) if i >= 0]
    if all(i != token for i, _ in best):
        best.append((token, float(logprob)))
    return best


def sampled_entry(result: StepResult, i: int, token: int, count: int) -> TokenLogprobs:
    """Entry of the token that sequence `i` of a step sampled."""
    assert result.logprob is not None and result.top_ids is not None and result.top_logprobs is not None
    return entry(token, result.logprob[i], result.top_ids[i], result.top_logprobs[i], count)


def prompt_entries(item: Item, result: StepResult, start: int) -> bool:
    """Fill in the sequence's prompt entries that this step computed. False if the logits were not finite.

    The token at position p + 1 is scored by the logits at position p; `start` is the item's first token in the step.
    """
    sequence = item.sequence
    entries, count = sequence.prompt_logprobs, sequence.request.sampling.prompt_logprobs
    assert entries is not None and count is not None
    last = min(item.first_pos + item.num_tokens, sequence.prompt_len - 1)
    for position in range(max(item.first_pos, sequence.request.sampling.prompt_logprobs_from - 1), last):
        assert result.prompt_logprob is not None
        assert result.prompt_top_ids is not None and result.prompt_top_logprobs is not None
        at = start + position - item.first_pos
        if result.prompt_top_logprobs[at, 0] <= LOGPROB_FLOOR:  # even the likeliest: logits that are not finite
            return False
        token = sequence.token_ids[position + 1]
        entries[position + 1] = entry(
            token, result.prompt_logprob[at], result.prompt_top_ids[at], result.prompt_top_logprobs[at], count
        )
    return True


def adjustments(sequence: Sequence, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Token counts [V] and biases [V] that the sampler needs for this sequence; None if it needs neither."""
    if not needs_row(sequence):
        return None
    prompt = np.array(sequence.token_ids[: sequence.prompt_len])
    outputs = np.array(sequence.token_ids[sequence.prompt_len :], np.int64)
    counts = np.bincount(outputs, minlength=vocab_size).astype(np.int32)
    counts[np.unique(prompt)] += PROMPT_BIT
    bias = np.zeros(vocab_size, np.float32)
    for token, value in sequence.request.sampling.logit_bias.items():
        bias[token] = value
    return counts, bias
