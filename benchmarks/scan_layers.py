"""Layers unrolled against a scan over repeated groups of them: what each takes to compile, and to run, on a TPU slice.

    JAX_PLATFORMS=cpu python benchmarks/scan_layers.py [--repeats 1,2,4] [--slice v6e-8] [--output FILE]

Needs the extra `tpu`. The model is Nemotron 3 Nano 30B-A3B with only so many of its groups of seven layers, `MEMEM*E`.
A scan takes the weights of all groups stacked. Each form is compiled in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parent / "models" / "nemotron_3_nano_30b_a3b"
GROUP = "MEMEM*E"


class Scanned:
    """A decoder whose layers are `repeats` equal groups, run by `lax.scan`; in place of the module in a step."""

    def __init__(self, module: Any, size: int, repeats: int):
        self.module, self.size, self.repeats = module, size, repeats

    def __repr__(self) -> str:
        return f"Scanned({self.module!r}, {self.size}, {self.repeats})"

    def stacked(self, params: Any) -> Any:
        """Shapes of the parameters: those of equal layers of all groups as one array, along a new first axis."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        def stack(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = shape.sharding
            if isinstance(sharding, NamedSharding):
                sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
            return jax.ShapeDtypeStruct((self.repeats, *shape.shape), shape.dtype, sharding=sharding)

        kept = {name: leaves for name, leaves in params.items() if not name.startswith("layers_")}
        return kept | {"group": [jax.tree.map(stack, params[f"layers_{i}"]) for i in range(self.size)]}

    def apply(self, variables: Any, *arguments: Any, method: Any = None) -> Any:
        """As `flax.linen.Module.apply`."""
        import jax
        import jax.numpy as jnp

        params = variables["params"]
        whole = {name: leaves for name, leaves in params.items() if name != "group"}
        if method is not None:
            return self.module.apply({"params": whole}, *arguments, method=method)
        token_ids, cache, spans = arguments
        x = self.module.apply({"params": whole}, token_ids, method=lambda m, t: m.vocabulary.embed(t))
        module = self.module

        def group(carry: Any, one: Any) -> Any:
            (x, cache), (layers, turn) = carry, one
            for i, layer in enumerate(layers):
                made = module.layer(module.config, i, module.dtype)
                x, held = made.apply({"params": layer}, x, _InGroup(cache, turn, self.size), spans)
                cache = held.cache
            return (x, cache), None

        (x, cache), _ = jax.lax.scan(group, (x, cache), (params["group"], jnp.arange(self.repeats)))
        return self.module.apply({"params": whole}, x, method=lambda m, x: m.final_norm(x)), cache


class _InGroup:
    """A cache as a layer of the first group sees it, for the group whose `turn` it is."""

    def __init__(self, cache: Any, turn: Any, size: int):
        self.cache, self._turn, self._size = cache, turn, size

    def open(self, layer: int, part: str) -> tuple[Any, Any]:
        array, base = self.cache.open(layer, part)
        router = self.cache.router
        place = router.place(layer, part)
        in_group = sum(part in router.parts_of(i) for i in range(self._size))
        return array, base + self._turn * in_group * (array.shape[0] // router.arrays[place.array][1])

    def put(self, layer: int, part: str, array: Any) -> "_InGroup":
        return _InGroup(self.cache.put(layer, part, array), self._turn, self._size)


def compile_steps(form: str, repeats: int, slice_: str) -> dict[str, Any]:
    """The largest step of each kind: seconds of processor time, scratch, and cycles as the compiler estimates them."""
    import jax

    from jhybrid.cli import Compile
    from jhybrid.executables import Executables
    from jhybrid.fit import Fit, Site
    from jhybrid.slices import FOLDER, read_slice
    from kernels_pallas.program_text import cycles

    lowered_at: list[float] = []
    compile_ = jax.stages.Lowered.compile

    def compiled(lowered: Any, *arguments: Any, **options: Any) -> Any:
        lowered_at.append(time.process_time())
        return compile_(lowered, *arguments, **options)

    jax.stages.Lowered.compile = compiled
    raw = json.loads((MODEL / "config.json").read_text())
    raw |= {"hybrid_override_pattern": GROUP * repeats, "num_hidden_layers": len(GROUP) * repeats}
    path = FOLDER / f"{slice_}.toml"
    found = read_slice(path)
    assert found is not None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw))
        config = replace(Compile.of(["--config", str(path)]).engine, model=folder, load_format="dummy")
        fit = Fit(config, Site.slice(found, config))
        for bucket in fit.largest():
            programs = fit.programs([bucket], Executables(None, fit.mesh))
            if form == "scanned":
                programs.module = Scanned(programs.module, len(GROUP), repeats)
                programs.params = programs.module.stacked(programs.params)
            memory = programs.plan(scratch=0)
            started = time.process_time()
            lowered_at.clear()
            programs._compile(bucket, memory)
            traced, took = lowered_at[0] - started, time.process_time() - started
            program = programs.steps[bucket]
            spent = cycles(program.as_text(), found.chip)
            row = {"bucket": str(bucket), "processor_seconds": round(took, 1), "of_them_traced": round(traced, 1)}
            row |= {"scratch": programs.scratch(bucket), "cycles": spent._asdict()}
            rows.append(row | {"bytes": program.cost_analysis()["bytes accessed"]})
    return {"form": form, "repeats": repeats, "slice": slice_, "steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", default="1,2,4")
    parser.add_argument("--forms", default="unrolled,scanned")
    parser.add_argument("--slice", default="v6e-8")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        form, repeats, slice_ = options.one
        print(json.dumps(compile_steps(form, int(repeats), slice_)))
        return
    rows: dict[tuple[str, int, str], Any] = {}
    if options.output and options.output.exists():
        kept = json.loads(options.output.read_text())["rows"]
        rows = {(row["form"], row["repeats"], row["slice"]): row for row in kept}
    for form in options.forms.split(","):
        for repeats in map(int, options.repeats.split(",")):
            command = [sys.executable, __file__, "--one", form, str(repeats), options.slice]
            done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout.strip().splitlines()[-1])
            print(json.dumps(row), flush=True)
            rows[form, repeats, options.slice] = row
            if options.output:
                facts = {"command": "python benchmarks/scan_layers.py", "jax": version("jax")}
                facts |= {"libtpu": version("libtpu"), "machine": "2 cores with AVX-512"}
                options.output.write_text(json.dumps(facts | {"rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
