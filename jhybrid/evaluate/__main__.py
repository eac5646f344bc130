"""The harness's own command line, with the model `jhybrid`: `python -m jhybrid.evaluate run --model jhybrid ...`."""

from lm_eval.__main__ import cli_evaluate

import jhybrid.evaluate.harness_model  # noqa: F401 - registers the model

if __name__ == "__main__":
    cli_evaluate()
