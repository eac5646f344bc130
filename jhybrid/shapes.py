"""The one legend of dimension letters, and the array aliases that public signatures use.

Every `# [T, H, P]` comment and every jaxtyping annotation in this project reads by this table.

| letter | meaning |
|---|---|
| `T` | tokens packed on one axis in a step, all sequences back to back, padding last |
| `S` | sequences of a step (padded to the bucket) |
| `C` | chunks of a step: runs of at most `Q` tokens of one sequence |
| `Q` | most tokens in a chunk |
| `R` | rows of a cache array: layers of that part x slots (or pages) of a layer |
| `W` | page-table width: most pages of one sequence |
| `M` | model width (hidden size) |
| `H`, `P`, `N`, `G` | Mamba2: heads, head dim, state size, B/C groups |
| `H`, `Hk`, `dk`, `dv` | gated delta rule: value heads, key heads, widths of a key and of a value |
| `K` | taps of a causal convolution |
| `Hq`, `Hkv`, `Dh` | attention: query heads, key/value heads, head dim |
| `E`, `I` | experts, width inside an expert or MLP |
| `V` | vocabulary |
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

Tokens = Int32[Array, "T"]
Hidden = Float[Array, "T M"]
Logits = Float32[Array, "S V"]
PageTable = Int32[Array, "S W"]
PerSeqInt = Int32[Array, "S"]
PerSeqFloat = Float32[Array, "S"]
PerSeqBool = Bool[Array, "S"]
