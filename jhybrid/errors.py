"""The errors that reach users. Each says what was wrong, the value seen, and what to do about it."""


class JhybridError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(JhybridError):
    """An engine or model configuration that cannot work; `field` names the culprit."""

    def __init__(self, field: str, message: str):
        super().__init__(field, message)  # what pickling gives back to this
        self.field = field

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class RequestError(JhybridError, ValueError):
    """A request refused at the door; nothing was scheduled. `field` names the culprit."""

    def __init__(self, field: str, message: str):
        super().__init__(field, message)  # what pickling gives back to this
        self.field = field

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class QueueFullError(JhybridError):
    """The waiting queue is at its bound; try again later."""


class WeightsError(JhybridError):
    """A checkpoint that does not fit its model: missing, unexpected and misshapen tensors, all named."""


class OutOfMemoryError(JhybridError):
    """What was asked does not fit: the message has bytes asked, bytes available, and what to change."""


class SlotPoolEmptyError(JhybridError):
    """A slot was asked of an empty pool. There are as many slots as running sequences, so this is a bug of ours."""


class StepError(JhybridError):
    """A device step failed; every sequence in it fails with this cause and is never retried."""


class MissingBucketError(JhybridError):
    """A batch fits no compiled bucket. Nothing compiles after ready, so this is a bug of ours."""


class EngineDeadError(JhybridError):
    """The engine thread has died; the cause is chained. Every waiting caller gets this."""
