"""Layers as bitsandbytes, compressed-tensors, GPTQ of 2, 3 and 8 bits, AutoAWQ's kernels and FP8 and MXFP4 checkpoints
store them, and what these programs read from them, in `../fixtures/quantised`.

    pip install torch==2.15.0 numpy==2.4.6 transformers==5.23.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2 gguf==0.19.0
    pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.9
    python formats.py ../fixtures/quantised

The weights are those of `quantised.py`. `formats.json` has for each folder each tensor's shape and its values as the
program dequantizes them: the first four, and the SHA-256 of all of them as little-endian f32. Scales are made f32 before
that, as they are in graphs for the CPU. `exact` is false where the order of two multiplications differs, so that f32 may
round otherwise. A folder that is a whole model has greedy tokens of `transformers` with these values, and the least
difference between the best and the second-best logit.

| folder | packed by | read by |
|---|---|---|
| `gptq-2`, `gptq-3`, `gptq-8`, `gptq-act` | AutoGPTQ, `qlinear_cuda.QuantLinear.pack` | the same class, multiplying by the unit matrix |
| `awq-gemv`, `awq-marlin`, `awq-marlin-rows` | AutoAWQ, `from_linear` of `WQLinear_GEMV`, `WQLinear_Marlin` | nothing: the values are what it was given, its kernels need a GPU |
| `compressed`, `compressed-mixed` | `compress` of compressed-tensors' compressors | `decompress` of the same |
| `fp8-block`, `fp8-scale` | torch | `_dequantize_fp8_weight` of `transformers` |
| `nf4`, `fp4-int8` | bitsandbytes, `quantize_4bit`, `int8_vectorwise_quant` | `dequantize_4bit` of its kernels for any device, since those for CPUs read rows that blocks do not divide otherwise; `int8_vectorwise_dequant` |
| `mxfp4` | here | `convert_moe_packed_tensors` of `transformers` |
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute, _get_4bit_code
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from quantised import GROUP, HIDDEN, INTER, VOCAB, digest, groups_of, tensors, write_config


def folder_only(name):
    """Lets modules of a package be imported without what its own file imports, such as kernels for CUDA."""
    module = types.ModuleType(name)
    module.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
    sys.modules[name] = module


for package, folders in {"auto_gptq": ["nn_modules", "nn_modules.qlinear"], "awq": ["modules", "modules.linear"]}.items():
    folder_only(package)
    for inner in folders:
        folder_only(f"{package}.{inner}")

from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
from awq.modules.linear.gemv import WQLinear_GEMV
from awq.modules.linear.marlin import WQLinear_Marlin

LAYER = "model.layers.0."
TOKENS = 12


def linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = torch.as_tensor(np.ascontiguousarray(weight))
    return layer


def is_linear(name):
    return "_proj" in name


def prefixed(layer, parts):
    return {f"{layer}.{name}": part.detach().clone().contiguous() for name, part in parts.items()}


# Each of these gives the tensors of the file, and the values that are read from them.


def gptq(bits, order=False):
    def pack(layer, weight, rng):
        outputs, inputs = weight.shape
        groups = np.arange(inputs) // GROUP
        if order:
            groups = groups[rng.permutation(inputs)]
        low, high = np.zeros((2, outputs, inputs // GROUP), np.float32)
        for group in range(inputs // GROUP):
            low[:, group] = np.minimum(weight[:, groups == group].min(1), 0)
            high[:, group] = np.maximum(weight[:, groups == group].max(1), 0)
        scales = ((high - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
        zeros = np.clip(np.round(-low / scales), 1, 2**bits - 1).astype(np.float32)
        spread = lambda numbers: numbers[:, groups]
        integers = np.clip(np.round(weight / spread(scales)) + spread(zeros), 0, 2**bits - 1)
        rounded = (integers - spread(zeros)) * spread(scales)
        packed = QuantLinear(bits, GROUP, inputs, outputs, bias=False, weight_dtype=torch.float32)
        packed.pack(linear(rounded), torch.from_numpy(scales), torch.from_numpy(zeros), torch.from_numpy(groups.astype(np.int32)))
        names = ["qweight", "qzeros", "scales", "g_idx"]
        stored = {name: getattr(packed, name) for name in names}
        stored |= {"scales": stored["scales"].half(), "g_idx": stored["g_idx"].int()}
        packed.scales = stored["scales"].float()
        # AutoGPTQ writes a bias of zeros for each layer.
        stored["bias"] = torch.zeros(outputs, dtype=torch.float16)
        return prefixed(layer, stored), packed(torch.eye(inputs)).T

    said = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": order, "sym": False}
    return pack, said


def awq_gemv():
    def pack(layer, weight, _):
        scales, zeros, rounded = groups_of(weight, False)
        given = [torch.from_numpy(part.astype(np.float32)) for part in (scales, zeros)]
        packed = WQLinear_GEMV.from_linear(linear(rounded), 4, GROUP, scales=given[0], zeros=given[1])
        stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
        return prefixed(layer, stored), torch.from_numpy(rounded)

    return pack, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemv"}


def awq_marlin(group):
    def pack(layer, weight, _):
        outputs, inputs = weight.shape
        size = inputs if group == -1 else group
        grouped = weight.reshape(outputs, inputs // size, size)
        scales = (2 * np.abs(grouped).max(2) / 15).astype(np.float16).astype(np.float32)
        integers = np.clip(np.round(grouped / scales[..., None]) + 8, 0, 15) - 8
        rounded = (integers * scales[..., None]).reshape(outputs, inputs)
        packed = WQLinear_Marlin.from_linear(linear(rounded), 4, size, scales=torch.from_numpy(scales))
        return prefixed(layer, {"qweight": packed.qweight, "scales": packed.scales}), torch.from_numpy(rounded)

    return pack, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": False, "version": "marlin"}


def compressed(scheme_of, said):
    def pack(layer, weight, _):
        scheme, kind = scheme_of(layer)
        args = scheme.weights
        weight = torch.from_numpy(weight)
        outputs, inputs = weight.shape
        strategy = args.strategy
        if strategy == "group":
            cells = weight.reshape(outputs, inputs // args.group_size, args.group_size)
            low, high = cells.amin(2), cells.amax(2)
        elif strategy == "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        elif strategy == "block":
            rows, cols = args.block_structure
            cells = weight.reshape(outputs // rows, rows, inputs // cols, cols)
            low, high = cells.amin((1, 3)), cells.amax((1, 3))
        else:
            low, high = weight.amin().reshape(1), weight.amax().reshape(1)
        scales, zeros = calculate_qparams(low, high, args)
        scales = scales.bfloat16()
        state = {"weight": weight, "weight_scale": scales.float()}
        if not args.symmetric:
            state["weight_zero_point"] = zeros.to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        real = compressor.decompress(dict(stored), scheme)["weight"].float()
        if stored["weight_scale"].dtype == torch.float32:
            stored["weight_scale"] = stored["weight_scale"].bfloat16()
        return prefixed(layer, stored), real

    return pack, said


def args(**more):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**more))


# A scheme for each layer of `compressed-mixed`, and how its targets name it.
MIXED = {
    "q_proj": (args(num_bits=3, type="int", strategy="channel"), "pack-quantized", LAYER + "self_attn.q_proj"),
    "k_proj": (args(num_bits=8, type="int", strategy="group", group_size=64, symmetric=False), "pack-quantized", "re:.*k_proj$"),
    "v_proj": (args(num_bits=8, type="int", strategy="channel", symmetric=False), "int-quantized", r"re:.*\.v_proj"),
    "o_proj": (args(num_bits=8, type="int", strategy="tensor"), "int-quantized", "re:^(?!.*mlp).*o_proj"),
    "gate_proj": (args(num_bits=8, type="float", strategy="channel"), "float-quantized", "re:.*gate_proj"),
    "up_proj": (args(num_bits=8, type="float", strategy="block", block_structure=[32, 64]), "float-quantized", "re:.*up_proj"),
    "down_proj": (args(num_bits=4, type="int", strategy="group", group_size=16), "pack-quantized", "Linear"),
}


def declared(scheme, targets, kind):
    return {"targets": targets, "weights": json.loads(scheme.weights.model_dump_json()), "input_activations": None, "format": kind}


def fp8_block(layer, weight, _):
    """Blocks of 64 by 64, which do not divide 96."""
    weight = torch.from_numpy(weight)
    outputs, inputs = weight.shape
    down, across = -(-outputs // 64), -(-inputs // 64)
    scales = torch.zeros(down, across)
    for row in range(down):
        for col in range(across):
            scales[row, col] = weight[row * 64 : row * 64 + 64, col * 64 : col * 64 + 64].abs().max() / 448
    scales = scales.bfloat16()
    wide = scales.float().repeat_interleave(64, 0)[:outputs].repeat_interleave(64, 1)[:, :inputs]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    real = _dequantize_fp8_weight(codes, scales, [64, 64], torch.float32)
    return prefixed(layer, {"weight": codes, "weight_scale_inv": scales}), real


def fp8_scale(layer, weight, _):
    """A scale for each output, for all, or for all of e5m2."""
    weight = torch.from_numpy(weight)
    kind = torch.float8_e5m2 if "k_proj" in layer else torch.float8_e4m3fn
    peak = weight.abs().amax(1, keepdim=True) if "o_proj" in layer else weight.abs().max()
    scales = peak / torch.finfo(kind).max
    codes = (weight / scales).to(kind)
    stored = {"weight": codes, "weight_scale": scales}
    if "k_proj" in layer:
        stored = {"weight": codes, "weight_scale_inv": scales}
    stored["input_scale"] = torch.tensor(0.5)
    return prefixed(layer, stored), _dequantize_fp8_weight(codes, scales, None, torch.float32)


def four_bits(kind, nested):
    def pack(layer, weight, _):
        codes, state = bnb.quantize_4bit(torch.from_numpy(weight), quant_type=kind, compress_statistics=nested, blocksize=64)
        stored = prefixed(f"{layer}.weight", state.as_dict(packed=True)) | {f"{layer}.weight": codes}
        maxima = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
        table = _get_4bit_code(kind, torch.device("cpu"))
        return stored, _dequantize_4bit_compute(codes.flatten(), maxima, table, 64, weight.shape, torch.float32)

    return pack


def fp4_int8(layer, weight, rng):
    if "o_proj" in layer:
        return four_bits("fp4", False)(layer, weight, rng)
    codes, peaks, _ = bnb.int8_vectorwise_quant(torch.from_numpy(weight).half())
    stored = {"weight": codes, "SCB": peaks, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return prefixed(layer, stored), bnb.int8_vectorwise_dequant(codes, peaks)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(layer, weight, _, name="weight_"):
    """`weight` may be a stack."""
    cells = weight.reshape(*weight.shape[:-1], -1, 32)
    powers = np.floor(np.log2(np.abs(cells).max(-1))) - 2
    scaled = cells / np.exp2(powers)[..., None]
    nearest = np.abs(scaled[..., None] - E2M1).argmin(-1).astype(np.uint8)
    blocks = nearest[..., ::2] | nearest[..., 1::2] << 4
    blocks, scales = torch.from_numpy(blocks), torch.from_numpy((powers + 127).astype(np.uint8))
    stack = (blocks, scales) if blocks.ndim == 4 else (blocks[None], scales[None])
    # It gives inputs by outputs.
    real = convert_moe_packed_tensors(*stack, dtype=torch.float32).transpose(1, 2)
    end = "." + name if name else "_"
    stored = {f"{layer}{end}blocks": blocks, f"{layer}{end}scales": scales}
    return stored, real.reshape(weight.shape)


def tokens(weights, real):
    """A prompt and what follows greedily, in f32."""
    config = json.loads((OUT / "nf4/config.json").read_text())
    config.pop("quantization_config")
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    plain = {name: torch.from_numpy(weight.astype(np.float16).astype(np.float32)) for name, weight in weights.items()}
    model.load_state_dict(plain | {name: values.float() for name, values in real.items()})
    for seed in range(64):
        prompt = np.random.default_rng(seed).integers(3, VOCAB, 5).tolist()
        ids, margin = torch.tensor([prompt]), np.inf
        with torch.no_grad():
            for _ in range(TOKENS):
                best = model(ids).logits[0, -1].topk(2)
                margin = min(margin, float(best.values[0] - best.values[1]))
                ids = torch.cat([ids, best.indices[:1][None]], 1)
        output = ids[0, 5:].tolist()
        if margin > 0.02 and not {1, 2} & set(output):
            return {"prompt": prompt, "output": output, "margin": margin}
    raise SystemExit("no prompt has clear tokens")


def folder(name, weights, pack, said, whole=True, exact=True):
    rng = np.random.default_rng(11)
    path = OUT / name
    path.mkdir(exist_ok=True)
    stored, real = {}, {}
    for tensor, weight in weights.items():
        if is_linear(tensor):
            parts, real[tensor] = pack(tensor.removesuffix(".weight"), weight, rng)
            stored |= parts
        elif whole:
            stored[tensor] = torch.from_numpy(weight.astype(np.float16))
    if name == "mxfp4":
        experts = rng.standard_normal((2, 4, 64)).astype(np.float32)
        parts, real[f"{LAYER}mlp.experts.gate_up_proj"] = mxfp4(f"{LAYER}mlp.experts.gate_up_proj", experts, rng, "")
        stored |= parts
    if name == "fp4-int8":
        # More blocks than 256, so that there are two maxima of maxima.
        large = rng.standard_normal((96, 192)).astype(np.float32)
        parts, real["large.weight"] = four_bits("nf4", True)("large", large, rng)
        stored |= parts
    save_file(stored, path / "model.safetensors")
    write_config(path, said)
    found = {
        tensor: {"shape": list(values.shape), "real": digest(values.detach().numpy(), "<f4"), "exact": exact}
        for tensor, values in real.items()
    }
    RECORD[name] = {"tensors": found}
    if whole:
        real = {tensor: values for tensor, values in real.items() if tensor in weights}
        RECORD[name]["tokens"] = tokens(weights, real)


def tokenizer(path):
    """Numbers, as words."""
    vocab = {str(token): token for token in range(VOCAB)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "0"}
    rest = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    rest |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    path.write_text(json.dumps(rest) + "\n")


def main():
    torch.manual_seed(0)
    weights = tensors(np.random.default_rng(7))
    only = lambda *ends: {name: weight for name, weight in weights.items() if any(end in name for end in ends)}
    double = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    folder("nf4", weights, four_bits("nf4", True), double)
    folder("fp4-int8", only("o_proj", "down_proj"), fp4_int8, {"quant_method": "bitsandbytes"}, False, False)
    for bits in (2, 3, 8):
        folder(f"gptq-{bits}", only("down_proj"), *gptq(bits), whole=False)
    folder("gptq-act", weights, *gptq(4, order=True))
    folder("awq-gemv", weights, *awq_gemv())
    folder("awq-marlin", only("o_proj", "down_proj"), *awq_marlin(32), whole=False)
    folder("awq-marlin-rows", only("down_proj"), *awq_marlin(-1), whole=False)
    group = args(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False)
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    said |= {"ignore": ["lm_head"], "config_groups": {"group_0": declared(group, ["Linear"], None)}}
    folder("compressed", weights, *compressed(lambda _: (group, "pack-quantized"), said))
    groups = {f"group_{n}": declared(scheme, [target], kind) for n, (scheme, kind, target) in enumerate(MIXED.values())}
    said = said | {"format": "mixed-precision", "config_groups": groups}
    folder("compressed-mixed", weights, *compressed(lambda layer: MIXED[layer.rsplit(".", 1)[1]][:2], said))
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 64]}
    folder("fp8-block", weights, fp8_block, block)
    folder("fp8-scale", only("o_proj", "down_proj", "k_proj"), fp8_scale, {"quant_method": "fp8"}, False)
    folder("mxfp4", weights, mxfp4, {"quant_method": "mxfp4"})
    tokenizer(OUT / "tokenizer.json")
    (OUT / "formats.json").write_text(json.dumps(RECORD, indent=1) + "\n")


if __name__ == "__main__":
    OUT, RECORD = Path(sys.argv[1]), {}
    main()
