"""jhybrid: an inference engine for hybrid language models on JAX.

```python
with Engine(EngineConfig(model="demo")) as engine:
    [out] = engine.generate([Request(prompt="To be, or", sampling=SamplingParams(max_tokens=32))])
```
"""

from jhybrid.config import EngineConfig
from jhybrid.engine import Engine
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
    "WeightsError",
]
