"""jhybrid: an inference engine for hybrid language models on JAX."""

__version__ = "0.1.0"
