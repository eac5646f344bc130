"""What can be known of TPU slices without one: whole steps compiled for them, memory of each device.

    JAX_PLATFORMS=cpu python benchmarks/tpu_compile.py [--models A,B] [--slices v5e-8,v6e-8] [--output FILE]

Needs the extra `tpu`. The largest step of each kind is compiled, with shapes for weights, in a process of its own for
each model and slice. An earlier output is kept where this run has nothing newer.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jhybrid.slices import FOLDER, read_slice

MODELS = Path(__file__).parent / "models"
NAMES = ("nemotron_3_nano_30b_a3b", "granite_4_h_small", "granite_4_h_tiny", "falcon_h1_7b", "demo")
SLICES = ("v5e-8", "v6e-8", "v5p-8", "tpu7x-8")


def compile_steps(model: str, slice_: str) -> dict[str, Any]:
    """The report of `jhybrid compile` on the largest steps; the refusal of a model that does not fit."""
    from jhybrid.cli import Compile
    from jhybrid.errors import OutOfMemoryError
    from jhybrid.fit import Fit, Site

    path = FOLDER / f"{slice_}.toml"
    config = Compile.of(["--config", str(path)]).engine
    if model == "demo":
        config = replace(config, max_model_len=None)  # which is its own, less than the slice's
    else:
        config = replace(config, model=str(MODELS / model), load_format="dummy")
    found = read_slice(path)
    assert found is not None
    fit = Fit(config, Site.slice(found, config))
    try:
        report = fit.report()
    except OutOfMemoryError as error:
        return {"refused": str(error)}
    for step in report["steps"]:
        step["kernels"] = sum(step["kernels"].values())
        del step["seconds"]  # which depend on what else the machine does
    return report | {"cpu_seconds": round(time.process_time(), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--slices", default=",".join(SLICES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, known in (("models", NAMES), ("slices", tuple(path.stem for path in FOLDER.glob("*.toml")))):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(sorted(known))}")
    if options.one:
        print(json.dumps(compile_steps(*options.one)))
        return
    rows: dict[tuple[str, str], Any] = {}
    if options.output and options.output.exists():
        rows = {(r["model"], r["slice"]): r for r in json.loads(options.output.read_text())["rows"]}
    for model in options.models.split(","):
        for slice_ in options.slices.split(","):
            command = [sys.executable, __file__, "--one", model, slice_]
            done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
            row: dict[str, Any] = {"model": model, "slice": slice_}
            if done.returncode:
                sys.exit(f"{model} for {slice_}: {done.stderr.strip()[-1500:]}")
            row |= json.loads(done.stdout.strip().splitlines()[-1])
            print(json.dumps(row), flush=True)
            rows[model, slice_] = row
            if options.output:
                facts = {"command": "python benchmarks/tpu_compile.py", "jax": version("jax")}
                facts |= {"libtpu": version("libtpu"), "machine": "2 cores with AVX-512"}
                options.output.write_text(json.dumps(facts | {"rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
