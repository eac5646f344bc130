"""Tasks of lm-evaluation-harness on one of our models. `jhybrid eval` calls it."""

import contextlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jhybrid.config import EngineConfig
from jhybrid.errors import ConfigError
from jhybrid.fleet import RayOptions


@dataclass(frozen=True)
class Evaluation:
    """What is asked of the harness. Names and meanings are those of its own command line."""

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    log_samples: bool = False
    max_length: int | None = None
    max_gen_toks: int = 256

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ConfigError("limit", f"must be a positive number of questions, or a share below 1, got {self.limit}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError("num_fewshot", f"must not be negative, got {self.num_fewshot}")
        if self.max_gen_toks < 1:
            raise ConfigError("max_gen_toks", f"must be at least 1, got {self.max_gen_toks}")

    def run(self, config: EngineConfig, cluster: RayOptions = RayOptions()) -> dict[str, Any]:  # noqa: B008 - frozen
        """Results in the harness's own format. Raises ConfigError if it is not installed or knows no such task."""
        try:
            from lm_eval import simple_evaluate
            from lm_eval.tasks import TaskManager

            from jhybrid.evaluate.harness_model import HarnessModel
        except ModuleNotFoundError as error:
            raise ConfigError(
                "tasks", f"lm-evaluation-harness is needed ({error}); install it: pip install 'jhybrid[eval]'"
            ) from error
        if self.include_path is not None and not self.include_path.is_dir():
            raise ConfigError("include_path", f"{self.include_path} is no folder; give one with the tasks' YAML files")
        path = None if self.include_path is None else str(self.include_path)
        asked = [name for given in self.tasks for name in given.split(",") if name]
        manager = TaskManager(include_path=path, include_defaults=False)
        if not set(asked) <= set(manager.all_subtasks):  # reading the harness's own tasks takes seconds
            manager = TaskManager(include_path=path)
        unknown = [name for name in asked if not manager.match_tasks([name])]
        if unknown or not asked:
            raise ConfigError("tasks", f"{', '.join(unknown) or 'none'}: no such task; --include-path adds a folder")
        options = changed(config)
        of_ray = {name: value for name, value in asdict(cluster).items() if cluster.ray}
        model = HarnessModel(**options, **of_ray, max_length=self.max_length, max_gen_toks=self.max_gen_toks)
        with contextlib.closing(model):
            run: Any = simple_evaluate  # its decorator hides its parameters
            results = run(
                model=model,
                tasks=[name for pattern in asked for name in manager.match_tasks([pattern])],
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                task_manager=manager,
                apply_chat_template=self.apply_chat_template,
                system_instruction=self.system_instruction,
                log_samples=self.log_samples,
            )
        assert results is not None, "only one process takes part, so it is the one with the results"
        found: dict[str, Any] = dict(results)
        found["config"] |= {"model": "jhybrid", "model_args": options}
        return found


def changed(config: EngineConfig) -> dict[str, Any]:
    """The options of a configuration that are not the defaults, and in any case the model and prefix caching."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    usual = {field.name: field.default for field in fields(config)}
    always = ("model", "enable_prefix_caching")
    return {name: value for name, value in values.items() if name in always or value != usual[name]}


def as_json(results: dict[str, Any]) -> str:
    """Results as the harness writes them."""
    from lm_eval.utils import handle_non_serializable

    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)


def as_table(results: dict[str, Any]) -> str:
    """The harness's table of results, groups after tasks."""
    from lm_eval.utils import make_table

    parts = [make_table(results), make_table(results, "groups") if results.get("groups") else ""]
    return "\n".join(part for part in parts if part)
