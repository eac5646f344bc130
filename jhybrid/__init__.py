"""jhybrid: an inference engine for hybrid language models on JAX.

```python
with Engine(EngineConfig(model="demo")) as engine:
    [out] = engine.generate([Request(prompt="To be, or", sampling=SamplingParams(max_tokens=32))])
```
"""

from typing import TYPE_CHECKING, Any

from jhybrid.config import EngineConfig
from jhybrid.errors import (
    ConfigError,
    EngineDeadError,
    JhybridError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    StepError,
    WeightsError,
)
from jhybrid.request import Completion, Delta, Output, Request, SamplingParams
from jhybrid.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jhybrid.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "ConfigError",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "JhybridError",
    "OutOfMemoryError",
    "Output",
    "QueueFullError",
    "Request",
    "RequestError",
    "SamplingParams",
    "StepError",
    "StructuredOutputs",
    "WeightsError",
]


def __getattr__(name: str) -> Any:
    """Engine is imported when it is first asked for: a client of a server needs no JAX."""
    if name != "Engine":
        raise AttributeError(f"module 'jhybrid' has no attribute {name!r}")
    from jhybrid.engine import Engine

    return Engine
