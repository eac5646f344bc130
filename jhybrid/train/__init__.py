"""Training of small native models: corpus, recipe, optimiser, loop. The demo model comes from here."""

from jhybrid.train.bits_per_byte import bits_per_byte
from jhybrid.train.recipe import Recipe, TrainConfig
from jhybrid.train.trainer import TrainResult, train

__all__ = ["Recipe", "TrainConfig", "TrainResult", "bits_per_byte", "train"]
