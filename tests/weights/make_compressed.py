"""Writes `compressed/`: two linear layers as compressed-tensors stores them, and what it says they stand for.

    python tests/weights/make_compressed.py     (torch, transformers 5.24, compressed-tensors 0.20; not jhybrid)

Each layout is a file with the stored tensors, the numbers they decompress to (`whole.`), and the config as metadata.
"""

import copy
import json
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

LAYOUTS = {
    "fp8_tensor": ("float-quantized", {"type": "float", "strategy": "tensor"}),
    "fp8_channel": ("float-quantized", {"type": "float", "strategy": "channel"}),
    "fp8_block": ("float-quantized", {"type": "float", "strategy": "block", "block_structure": [32, 16]}),
    "int8_channel": ("int-quantized", {"type": "int", "strategy": "channel"}),
    "int8_packed": ("pack-quantized", {"type": "int", "strategy": "channel"}),
    "int8_packed_group": ("pack-quantized", {"type": "int", "strategy": "group", "group_size": 16}),
}


def ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest number under each scale."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        cut = weight.reshape(rows, -1, args.group_size)
        return cut.amin(2), cut.amax(2)
    high, wide = args.block_structure
    cut = weight.reshape(rows // high, high, columns // wide, wide)
    return cut.amin((1, 3)), cut.amax((1, 3))


def write(name: str, layout: str, weights: dict) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(48, 64, bias=False), "head": torch.nn.Linear(48, 32, bias=False)}
    )
    args = QuantizationArgs(num_bits=8, symmetric=True, **weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["head"], format=layout)
    apply_quantization_config(model, config)
    up = model["up"]
    scale, zero = calculate_qparams(*ranges(up.weight.data, args), args)
    up.weight_scale.data.copy_(scale.reshape(up.weight_scale.shape))
    whole = fake_quantize(up.weight.data, up.weight_scale, zero.reshape(up.weight_scale.shape), args)
    compressor = ModelCompressor(quantization_config=copy.deepcopy(config))
    compressor.compress_model(model)
    stored = {key: tensor.detach().contiguous() for key, tensor in model.state_dict().items()}
    said = json.loads(config.model_dump_json())
    said |= {"quant_method": "compressed-tensors", "format": layout}
    stored |= {"whole.up": whole.detach().contiguous()}
    path = Path(__file__).parent / "compressed" / f"{name}.safetensors"
    save_file(stored, path, metadata={"quantization_config": json.dumps(said)})
    print(name, {key: (str(t.dtype), tuple(t.shape)) for key, t in stored.items()})
    print(json.dumps(said))


for name, (layout, weights) in LAYOUTS.items():
    write(name, layout, weights)
