"""Layers that the programs for GPTQ and AWQ packed, and what these programs read from them, in `../fixtures/quantised`.

    pip install torch==2.6.0 numpy==2.4.6 transformers==5.23.0 gguf==0.19.0
    pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.9 accelerate==1.4.0 psutil logbar==0.4.15 device-smi==0.5.7
    pip download --no-deps --no-build-isolation gptqmodel==2.2.0    # and unpack gptqmodel/ beside the others
    python packers.py ../fixtures/quantised

The weights are those of `quantised.py`, rounded to the nearest: what GPTQ and AWQ do to round better is not looked at
here. A linear layer of torch goes through the program's own packer, and `packed.json` has what the program's own code
reads from the packed tensors, in the form of `expected.json`.

| folder | packed by | read by |
|---|---|---|
| `gptq-asym`, `gptq-sym` | AutoGPTQ, `qlinear_cuda_old.QuantLinear.pack` | the same class, multiplying by the unit matrix |
| `gptq-v2` | GPTQModel, `TorchQuantLinear.pack` | `dequantize_weight` of the same class |
| `awq` | AutoAWQ, `WQLinear_GEMM.from_linear` | `unpack_awq`, `reverse_awq_order`, `dequantize_gemm` |

GPTQModel's `setup.py` wants a compiler for CUDA: `CUDA_HOME=/tmp CUDA_VERSION=12.4 TORCH_CUDA_ARCH_LIST=8.0
BUILD_CUDA_EXT=0` lets pip have the sources without.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

from quantised import GROUP, groups_of, record, tensors, write_config, write_safetensors


def folder_only(name):
    """Lets modules of a package be imported without what its own file imports, such as kernels for CUDA."""
    path = importlib.util.find_spec(name).submodule_search_locations
    module = types.ModuleType(name)
    module.__path__ = list(path)
    sys.modules[name] = module


for package, folders in {
    "auto_gptq": ["nn_modules", "nn_modules.qlinear"],
    "awq": ["modules", "modules.linear"],
    "gptqmodel": ["utils", "models", "nn_modules", "adapter"],
}.items():
    folder_only(package)
    for name in folders:
        folder_only(f"{package}.{name}")
sys.modules["gptqmodel.utils"].BACKEND = importlib.import_module("gptqmodel.utils.backend").BACKEND

from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm, reverse_awq_order, unpack_awq
from gptqmodel.nn_modules.qlinear.torch import TorchQuantLinear


def linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = torch.from_numpy(weight)
    return layer


def by_ones(read, scales, integers):
    """Integers and zero points `[inputs, outputs]` of a layer that has no names for them: with scales of one `read()`
    gives integers less zero points, and with integers of zero the zero points' negatives."""
    scales.fill_(1)
    less = read()
    integers.zero_()
    minus = read()
    return (less - minus).numpy().astype(int), -minus.numpy().astype(int)


def found(integers, scales, zeros, real, symmetric):
    """Of what a program reads: `[inputs, outputs]`, and scales `[groups, outputs]`."""
    offsets = None if symmetric else 8 - zeros[::GROUP].T
    return record(integers.T - 8, scales.float().numpy().T, offsets, real.float().numpy().T)


def gptq(weight, scales, zeros, symmetric, version):
    """The packed tensors, and what the program reads from them."""
    outputs, inputs = weight.shape
    given = [torch.from_numpy(part.astype(np.float32)) for part in (scales, zeros)]
    if version == 1:
        layer = QuantLinear(4, GROUP, inputs, outputs, bias=False, weight_dtype=torch.float32)
        layer.pack(linear(weight), *given, None)
        read = lambda: layer(torch.eye(inputs))
    else:
        layer = TorchQuantLinear(4, GROUP, symmetric, False, inputs, outputs, bias=False)
        layer.pack(linear(weight), *given)
        layer.scales = layer.scales.float()
        # Without compiling the method, which the class itself would do.
        super(TorchQuantLinear, layer).post_init()
        read = layer.dequantize_weight
    stored = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    stored["scales"] = stored["scales"].half()
    with torch.no_grad():
        real = read().clone()
        integers, points = by_ones(read, layer.scales, layer.qweight)
    return stored, found(integers, stored["scales"], points, real, symmetric)


def awq(weight, scales, zeros):
    """The packed tensors, and what AutoAWQ reads from them."""
    given = [torch.from_numpy(np.ascontiguousarray(part.T.astype(np.float32))) for part in (scales, zeros)]
    packed = WQLinear_GEMM.from_linear(linear(weight), 4, GROUP, scales=given[0], zeros=given[1])
    integers, points = (part & 15 for part in reverse_awq_order(*unpack_awq(packed.qweight, packed.qzeros, 4), 4))
    real = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, GROUP)
    stored = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    integers, points = (part.numpy().astype(int) for part in (integers, points))
    return stored, found(integers, packed.scales, points.repeat(GROUP, 0), real, False)


def folder(path, weights, method, symmetric, version=1):
    path.mkdir(exist_ok=True)
    stored, expected = {}, {}
    for name, weight in weights.items():
        if weight.ndim == 1 or "embed_tokens" in name or "lm_head" in name:
            stored[name] = weight.astype(np.float16)
            continue
        scales, zeros, rounded = groups_of(weight, symmetric)
        if method == "gptq":
            parts, expected[name] = gptq(rounded, scales, zeros, symmetric, version)
        else:
            parts, expected[name] = awq(rounded, scales, zeros)
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{part}": np.ascontiguousarray(value.numpy()) for part, value in parts.items()}
    write_safetensors(path / "model.safetensors", stored)
    said = {"quant_method": method, "bits": 4, "group_size": GROUP}
    if method == "gptq":
        said |= {"desc_act": False, "sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    else:
        said |= {"zero_point": True, "version": "gemm"}
    write_config(path, said)
    return expected


def main(out):
    weights = tensors(np.random.default_rng(7))
    down = {name: weight for name, weight in weights.items() if "down_proj" in name}
    expected = {}
    for name, held, method, symmetric, version in [
        ("gptq-asym", weights, "gptq", False, 1),
        ("gptq-sym", down, "gptq", True, 1),
        ("gptq-v2", down, "gptq", False, 2),
        ("awq", weights, "awq", False, 1),
    ]:
        expected[name] = folder(out / name, held, method, symmetric, version)
    (out / "packed.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
