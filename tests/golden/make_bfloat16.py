"""How far Hugging Face's own bfloat16 is from its float32, on the checkpoints of make_goldens.py: bfloat16.json.

Run in the environment of make_goldens.py. The distance is the root mean square of the differences of all logits of a
whole prompt, over the standard deviation of the float32 ones: a model's rounding noise, to hold another
implementation's to.
"""

import json
import math

import numpy as np
import torch
from make_goldens import HERE, full, limit_time_steps
from transformers import AutoModelForCausalLM


def distance(name: str) -> float:
    """Of one checkpoint."""
    numbers = np.load(HERE / name / "goldens.npz")
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.bfloat16, **eager).eval()
    limit_time_steps(model, getattr(model.config, "time_step_limit", (0.0, math.inf)))
    reference = numbers["full_logits"]
    with torch.no_grad():
        error = full(model, numbers["prompt"].tolist()).float().numpy() - reference
    return float(np.sqrt(np.mean(error**2)) / reference.std())


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sorted(path.parent.name for path in HERE.glob("*/goldens.npz"))
    found = {name: round(distance(name), 4) for name in names}
    (HERE / "bfloat16.json").write_text(json.dumps(found, indent=1) + "\n")
    print(found)
