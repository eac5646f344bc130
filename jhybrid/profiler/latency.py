"""LatencyModel: seconds of a step from what is in it, fitted to measured points; a planner reads it as JSON.

    seconds = base[bucket] + decode_token * decoding sequences + decode_context * tokens of their contexts
              + prefill_chunk * chunks + prefill_context * sum over chunks of rows * context at its end

A step runs in the smallest bucket that holds it, padding included, so every bucket has a base of its own, which has all
products with weights in it. Prompts go through scans and attention chunk by chunk, the last one padded as well: a chunk
has `chunk_size` rows, or as many as the bucket has tokens. Sequences that decode beside a prompt are computed by other
code than a batch that decodes alone: they count as `mixed_token` and `mixed_context`. All coefficients are at least 0.
They minimise the relative error, because steps differ in time by orders of magnitude, with a loss that grows but
linearly for what is far off.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.optimize import least_squares, nnls

from jhybrid.batch import Bucket
from jhybrid.errors import ConfigError

FORMAT = 1
MODEL_FILE = "latency_model.json"
ROUGH = 0.03  # relative error beyond which a point counts less: it was disturbed, and others were not
SLOPES = ("decode_token", "decode_context", "mixed_token", "mixed_context", "prefill_chunk", "prefill_context")


@dataclass(frozen=True)
class Observation:
    """Steps that took `seconds` together. Each is (decodes, prefills): contexts, and (new, cached)."""

    steps: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    seconds: float


@dataclass(frozen=True)
class LatencyModel:
    """`bases` are by bucket, `slopes` by name, all in seconds. `errors` says how good it is."""

    bases: dict[str, float]
    slopes: dict[str, float]
    buckets: tuple[Bucket, ...]
    max_num_batched_tokens: int
    chunk_size: int
    errors: dict[str, Any]

    # using it

    def predict(self, decodes: Sequence[int] = (), prefills: Sequence[tuple[int, int]] = ()) -> float:
        """Seconds of one step. `decodes`: the context of each decoding sequence; `prefills`: (new, cached) each.

        Raises ConfigError for a step that no bucket holds.
        """
        bucket = self.bucket(decodes, prefills)
        features = self._features(decodes, prefills, bucket)
        return self._base(bucket) + sum(self.slopes[name] * value for name, value in zip(SLOPES, features, strict=True))

    def itl(self, batch: int, depth: int) -> float:
        """Seconds between two tokens of each of `batch` sequences that have `depth` tokens of context."""
        return self.predict([depth] * batch)

    def ttft(self, new: int, cached: int = 0) -> float:
        """Seconds to the first token of a prompt, alone, in as many steps as its `new` tokens take."""
        total = 0.0
        for at in range(0, new, self.max_num_batched_tokens):
            total += self.predict(prefills=[(min(new - at, self.max_num_batched_tokens), cached + at)])
        return total

    def bucket(self, decodes: Sequence[int], prefills: Sequence[tuple[int, int]]) -> Bucket:
        """The smallest bucket that holds a step."""
        tokens = len(decodes) + sum(new for new, _ in prefills)
        sequences = len(decodes) + len(prefills)
        kind = "decode" if tokens == sequences else "ragged"
        for bucket in sorted(self.buckets):
            if bucket.kind == kind and bucket.tokens >= tokens and bucket.seqs >= sequences:
                return bucket
        raise ConfigError("step", f"no {kind} bucket holds {tokens} tokens of {sequences} sequences")

    def _base(self, bucket: Bucket) -> float:
        """Of a bucket that no point ran in: between its neighbours of the same kind, by their tokens."""
        if str(bucket) in self.bases:
            return self.bases[str(bucket)]
        known = [b for b in sorted(self.buckets) if b.kind == bucket.kind and str(b) in self.bases]
        if not known:
            raise ConfigError("step", f"the profile has no {bucket.kind} points to tell {bucket} from")
        return float(np.interp(bucket.tokens, [b.tokens for b in known], [self.bases[str(b)] for b in known]))

    def _features(self, decodes: Sequence[int], prefills: Sequence[tuple[int, int]], bucket: Bucket) -> list[float]:
        """Of a step, in the order of SLOPES. A prompt's only token costs what one of a decoding sequence does."""
        contexts = [*decodes, *(cached + 1 for new, cached in prefills if new == 1)]
        ends = [
            cached + min(at + self.chunk_size, new)
            for new, cached in prefills
            if new > 1
            for at in range(0, new, self.chunk_size)
        ]
        alone, beside = (len(contexts), sum(contexts)), (0, 0)
        if ends:
            alone, beside = beside, alone
        return [*alone, *beside, len(ends), min(self.chunk_size, bucket.tokens) * sum(ends)]

    def seconds_of(self, steps: Iterable[tuple[Sequence[int], Sequence[tuple[int, int]]]]) -> float:
        """Seconds of several steps."""
        return sum(self.predict(decodes, prefills) for decodes, prefills in steps)

    # making it

    @classmethod
    def fit(
        cls,
        observations: list[Observation],
        held_out: list[Observation],
        buckets: Sequence[Bucket],
        max_num_batched_tokens: int,
        chunk_size: int,
    ) -> Self:
        """The model of some observations, with its relative errors on those and on others that it did not see."""
        blank = cls({}, dict.fromkeys(SLOPES, 0.0), tuple(buckets), max_num_batched_tokens, chunk_size, {})
        names = sorted({str(blank.bucket(*step)) for observation in observations for step in observation.steps})
        rows = np.array([blank._row(observation, names) for observation in observations])
        seconds = np.array([observation.seconds for observation in observations])
        scale = np.maximum(rows.max(axis=0), 1e-30)  # of each column, so that the solver's tolerance suits all
        relative, ones = rows / scale / seconds[:, None], np.ones(len(seconds))
        start, _ = nnls(relative, ones, maxiter=100 * rows.shape[1])
        robust = least_squares(
            lambda x: relative @ x - ones,
            start,
            bounds=(0, np.inf),
            loss="soft_l1",
            f_scale=ROUGH,
        )
        found: list[float] = (robust.x / scale).tolist()
        bases = dict(zip(names, found[: len(names)], strict=True))
        slopes: dict[str, float] = dict(zip(SLOPES, found[len(names) :], strict=True))
        if not rows[:, len(names) + SLOPES.index("mixed_token")].any():  # no mixed points: the best guess
            slopes |= {"mixed_token": slopes["decode_token"], "mixed_context": slopes["decode_context"]}
        model = replace(blank, bases=bases, slopes=slopes)
        return replace(model, errors={"fitted": model.errors_on(observations), "held_out": model.errors_on(held_out)})

    def _row(self, observation: Observation, names: list[str]) -> list[float]:
        """How often each bucket ran, then the sums of the features."""
        counts = dict.fromkeys(names, 0.0)
        sums = np.zeros(len(SLOPES))
        for step in observation.steps:
            bucket = self.bucket(*step)
            counts[str(bucket)] += 1
            sums += self._features(*step, bucket)
        assert np.isfinite(sums).all(), observation
        return [*counts.values(), *sums]

    def errors_on(self, observations: list[Observation]) -> dict[str, float | int]:
        """Relative errors: mean, median and largest magnitude; and of the sum of all seconds."""
        if not observations:
            return {"points": 0}
        predicted = np.array([self.seconds_of(o.steps) for o in observations])
        seconds = np.array([o.seconds for o in observations])
        errors = np.abs(predicted / seconds - 1)
        return {
            "points": len(observations),
            "mean": float(errors.mean()),
            "median": float(np.median(errors)),
            "largest": float(errors.max()),
            "of_total": float(predicted.sum() / seconds.sum() - 1),
        }

    # keeping it

    def save(self, path: Path) -> None:
        """Write it as JSON; docs/profiling.md names the fields. Raises ConfigError if that fails."""
        fields = asdict(self) | {"format": FORMAT, "unit": "seconds"}
        try:
            path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("latency_model", f"{path} cannot be written: {error}; run it again to go on") from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a file that `save` wrote, or a folder with one. Raises ConfigError for anything else."""
        path = path / MODEL_FILE if path.is_dir() else path
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise ConfigError("latency_model", f"{path} has format {fields['format']}, this reads {FORMAT}")
            return cls(
                fields["bases"],
                fields["slopes"],
                tuple(Bucket(**bucket) for bucket in fields["buckets"]),
                fields["max_num_batched_tokens"],
                fields["chunk_size"],
                fields["errors"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("latency_model", f"{path} is no latency model: {error!r}") from error
