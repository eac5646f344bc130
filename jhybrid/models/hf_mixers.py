"""Specs of mixers from the keys that several families of Hugging Face configs spell alike."""

from jhybrid.errors import ConfigError
from jhybrid.layers.attention import AttentionSpec
from jhybrid.layers.gated_delta import GatedDeltaSpec
from jhybrid.layers.mamba2 import Mamba2Spec
from jhybrid.layers.rope import Rope
from jhybrid.models.hf_config import HfConfig


def read_mamba2(hf: HfConfig, hidden_size: int, eps: float, inner: tuple[str, int] | None = None) -> Mamba2Spec:
    """From `mamba_n_heads`, `mamba_d_head`, ... (Granite 4 H, Bamba, Falcon-H1).

    `inner` is the key and the value of the inner width where it is not `mamba_expand` times the hidden size.
    """
    groups = hf.integer("mamba_n_groups")
    heads = hf.multiple("mamba_n_heads", of=("mamba_n_groups", groups))
    name, width = inner or ("mamba_expand * hidden_size", hf.integer("mamba_expand") * hidden_size)
    derived = hf.raw.get("mamba_d_head", "auto") == "auto"
    head_dim = width // heads if derived else hf.integer("mamba_d_head")
    check_inner_size(("mamba_n_heads", heads), ("mamba_d_head", head_dim), (name, width))
    hf.one_of("hidden_act", "silu")  # it is also the activation after the convolution
    return Mamba2Spec(
        hidden_size=hidden_size,
        num_heads=heads,
        head_dim=head_dim,
        state_size=hf.integer("mamba_d_state"),
        num_groups=groups,
        conv_kernel=hf.integer("mamba_d_conv", least=2),
        norm_groups=groups,
        norm_eps=eps,
        conv_bias=hf.flag("mamba_conv_bias"),
        proj_bias=hf.flag("mamba_proj_bias"),
        dt_limit=hf.dt_limit("time_step_limit"),
    )


def read_gated_delta(hf: HfConfig, hidden_size: int, eps: float) -> GatedDeltaSpec:
    """From `linear_num_key_heads`, `linear_key_head_dim`, ... (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""
    k_heads = hf.integer("linear_num_key_heads")
    hf.one_of("hidden_act", "silu")  # it is also the activation after the convolution
    return GatedDeltaSpec(
        hidden_size=hidden_size,
        num_k_heads=k_heads,
        num_v_heads=hf.multiple("linear_num_value_heads", of=("linear_num_key_heads", k_heads)),
        k_dim=hf.integer("linear_key_head_dim"),
        v_dim=hf.integer("linear_value_head_dim"),
        conv_kernel=hf.integer("linear_conv_kernel_dim", least=2),
        norm_eps=eps,
    )


def read_delta_layer_kinds(hf: HfConfig, layers: int) -> tuple[str, ...]:
    """From `layer_types`: "delta" for a recurrent layer of these families, or "attention"."""
    kinds = hf.layer_kinds("layer_types", allowed=("mamba", "attention"), layers=layers)
    return tuple("delta" if kind == "mamba" else kind for kind in kinds)


def check_all_attention(hf: HfConfig, layers: int) -> None:
    """Refuse `layer_types` that name anything but full attention, or another number of layers."""
    if hf.has("layer_types"):
        hf.layer_kinds("layer_types", allowed=("attention",), layers=layers)


def check_inner_size(heads: tuple[str, int], head_dim: tuple[str, int], inner: tuple[str, int]) -> None:
    """Refuse heads that do not make up the inner width; each argument is a key and its value."""
    if heads[1] * head_dim[1] != inner[1]:
        raise ConfigError(heads[0], f"{heads[1]} heads of {head_dim[0]}={head_dim[1]} are not {inner[0]} = {inner[1]}")


def read_head_dim(hf: HfConfig, hidden_size: int) -> int:
    """`head_dim`, or hidden_size / num_attention_heads where it is absent or null."""
    if hf.has("head_dim"):
        return hf.integer("head_dim")
    heads = hf.integer("num_attention_heads")
    if hidden_size % heads:
        raise ConfigError("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads={heads}")
    return hidden_size // heads


def read_attention(
    hf: HfConfig, hidden_size: int, *, scale: float, rope: Rope | None, qk_norm_eps: float | None = None
) -> AttentionSpec:
    """From `num_attention_heads`, `num_key_value_heads`, `head_dim` and `attention_bias`."""
    kv_heads = hf.integer("num_key_value_heads", default=hf.integer("num_attention_heads"))
    bias = hf.flag("attention_bias", default=False)
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=hf.multiple("num_attention_heads", of=("num_key_value_heads", kv_heads)),
        num_kv_heads=kv_heads,
        head_dim=read_head_dim(hf, hidden_size),
        scale=scale,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm_eps=qk_norm_eps,
    )


def read_dt_rank(hf: HfConfig, key: str, hidden_size: int) -> int:
    """Mamba1's rank of dt; "auto" is a sixteenth of the hidden size, rounded up."""
    return -(-hidden_size // 16) if hf.raw.get(key) == "auto" else hf.integer(key)
