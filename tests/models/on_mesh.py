"""One checkpoint of Hugging Face's on a mesh of virtual devices, against its numbers. Run by test_mesh.py.

Usage: python on_mesh.py GOLDEN SHARDS; the number of devices is set by XLA_FLAGS, before JAX starts.
"""

import sys

import jax
import numpy as np
from stepper import Stepper
from test_families import GOLDEN, near

from jhybrid.mesh import make_mesh


def main(name: str, shards: int) -> None:
    stepper = Stepper(GOLDEN / name, make_mesh(jax.devices()[:shards]))
    numbers = dict(np.load(GOLDEN / name / "goldens.npz"))
    prompt: list[int] = numbers["prompt"].tolist()
    spread = {n: len({s.data.shape for s in a.addressable_shards}) for n, a in stepper.cache.arrays.items()}
    assert set(spread.values()) <= {1}, spread

    # chunked prefill beside another sequence that reads none of it, then decode
    start, rows = 0, []
    for size in numbers["chunk_lengths"].tolist():
        rows += [stepper.feed({0: prompt[start : start + size], 3: prompt[:5]})[0]]
        start += size
    near(np.concatenate(rows), numbers["full_logits"][:start])
    for step, token in enumerate(numbers["decode_ids"][:-1].tolist()):
        [logits] = stepper.feed({0: [token]}, kind="decode").values()
        near(logits[-1], numbers["decode_logits"][step + 1])

    stepper.reset()
    changed = [prompt[0] ^ 1, *prompt[1:]]  # a state that is lost or mixed up cannot pass both
    [logits] = stepper.feed({0: changed}).values()
    near(logits[-1], numbers["changed_logits"])
    assert np.abs(logits[-1] - numbers["full_logits"][-1]).max() > 0.005
    shared = [str(a.sharding.spec) for a in jax.tree.leaves(stepper.params) if not a.is_fully_replicated]
    print(
        f"{name} on {shards}: {len(shared)} of {len(jax.tree.leaves(stepper.params))} parameters shared out, "
        f"cache { ({n: p.shards for n, (p, _) in stepper.router.arrays.items()}) }"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
