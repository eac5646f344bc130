"""HarnessModel: the model `jhybrid` of lm-evaluation-harness. Importing this module registers it.

The entry point `lm_eval.models` names it too, but no release of the harness up to 0.4.13 reads that, so something must
import this module: `jhybrid eval`, or the harness's own command line as `python -m jhybrid.evaluate`.
"""

import contextlib
import dataclasses
from functools import partial
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
from jhybrid.errors import ConfigError
from jhybrid.evaluate.engines import CheckpointText, EngineFleet, OneEngine, Worker
from jhybrid.evaluate.respondent import Respondent
from jhybrid.fleet import Fleet, RayOptions

UNASKED_DEVICE = "cuda:0"
"""What the harness's command line passes on when nobody named a device."""


class HarnessModel(LM):
    """Passes what the harness asks to a respondent."""

    def __init__(
        self,
        model: str = "demo",
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ):
        """`options` are EngineConfig's, with prefix caching on unless told otherwise, and RayOptions'.

        ConfigError names a wrong one.

        Steps are packed by tokens, so `batch_size` means nothing; `max_num_seqs` and `max_num_batched_tokens` do.
        """
        del batch_size, max_batch_size
        super().__init__()
        of_ray = {name: options.pop(name) for name in names_of(RayOptions) if name in options}
        unknown = sorted(set(options) - names_of(EngineConfig))
        if unknown:
            raise ConfigError(unknown[0], f"{options[unknown[0]]!r} was given, but the engine has no such option")
        config = EngineConfig(model=model, **{"enable_prefix_caching": True, **options})
        cluster = RayOptions(**of_ray)
        # Over Ray, JAX is not asked: this process would take the accelerator that an actor needs.
        if device not in (None, UNASKED_DEVICE) and (cluster.ray or device != jax.default_backend()):
            raise ConfigError("device", f"{device!r} cannot be chosen here; JAX takes it from JAX_PLATFORMS")
        self._open = contextlib.ExitStack()
        if cluster.ray:
            text = CheckpointText.of(config)
            worker = partial(Worker, partial(Engine, config))
            fleet = self._open.enter_context(Fleet(cluster, worker, config.tensor_parallel_size))
            engines = EngineFleet(fleet, config, text)
        else:
            engines = OneEngine(self._open.enter_context(Engine(config)))
        self.respondent = Respondent(
            engines,
            max_length=max_length,
            max_gen_toks=max_gen_toks,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
        )

    def close(self) -> None:
        """Give engines and cluster back."""
        self._open.close()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [(request.arguments[0], request.arguments[1]) for request in requests]
        with tqdm(total=len(pairs), desc="loglikelihood", disable=disable_tqdm) as bar:
            found = self.respondent.loglikelihoods(pairs, bar.update)
        answers = [(likelihood.total, likelihood.is_greedy) for likelihood in found]
        self._keep("loglikelihood", requests, answers)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        with tqdm(desc="loglikelihood_rolling, windows", disable=disable_tqdm) as bar:
            answers = self.respondent.rolling([request.arguments[0] for request in requests], bar.update)
        self._keep("loglikelihood_rolling", requests, answers)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [(request.arguments[0], request.arguments[1]) for request in requests]
        with tqdm(total=len(prompts), desc="generate_until", disable=disable_tqdm) as bar:
            answers = self.respondent.generate(prompts, bar.update)
        self._keep("generate_until", requests, answers)
        return answers

    def _keep(self, kind: str, requests: list[Instance], answers: list[Any]) -> None:
        """For the harness's own cache of answers."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.respondent.chat(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template is False:
            return None
        return self.respondent.chat_template(None if chat_template is True else chat_template)

    @property
    def tokenizer_name(self) -> str:
        return self.respondent.engines.model.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness puts beside its results: the model, the window, and how much work was shared."""
        engines = self.respondent.engines
        return {
            **{f"model_{name}": value for name, value in engines.facts().items()},
            "max_length": self.respondent.max_length,
            "prefix_token_id": self.respondent.prefix_token_id,
            "scoring": engines.tally.report(),
        }


def names_of(options: type) -> set[str]:
    """The names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(options)}


register_model("jhybrid")(HarnessModel)  # as a decorator it would hide the class from type checkers
