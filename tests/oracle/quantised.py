"""Tiny models that llama.cpp's Python package quantised, and what it reads from them, in `../fixtures/quantised`.

    pip install gguf==0.19.0 && python quantised.py ../fixtures/quantised

The blocks are quantised and read by gguf==0.19.0. The same weights stand behind all files, those of `packers.py`, too: a
Llama of one layer, drawn from a seed. `expected.json` has for each file and each quantised tensor, under its name in a
Hugging Face checkpoint, integers from -8 to 7 (Q8_0: -128 to 127), scales and offsets, and real values as the program
reads them: the first four, and the SHA-256 of all of them as i8 or little-endian f32. `kinds.gguf` and `q6_k.gguf` hold
random blocks of the other forms, of which real values alone are compared.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter, quants
from gguf import GGMLQuantizationType as Type

HIDDEN, INTER, HEADS, GROUPS, VOCAB = 64, 96, 4, 2, 48
DIM = HIDDEN // HEADS
GROUP = 32


def tensors(rng):
    def draw(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN),
        "model.norm.weight": 1 + 0.1 * draw(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN),
        layer + "input_layernorm.weight": 1 + 0.1 * draw(HIDDEN),
        layer + "post_attention_layernorm.weight": 1 + 0.1 * draw(HIDDEN),
        layer + "self_attn.q_proj.weight": draw(HIDDEN, HIDDEN),
        layer + "self_attn.k_proj.weight": draw(GROUPS * DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": draw(GROUPS * DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
        layer + "mlp.gate_proj.weight": draw(INTER, HIDDEN),
        layer + "mlp.up_proj.weight": draw(INTER, HIDDEN),
        layer + "mlp.down_proj.weight": draw(HIDDEN, INTER),
    }


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return NAMES[stem] + ".weight"
    return "blk.0." + NAMES[stem.removeprefix("model.layers.0.")] + ".weight"


def permute(weight, heads):
    """`LlamaModel.permute` of `convert_hf_to_gguf.py`."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def digest(array, dtype):
    array = np.ascontiguousarray(array, dtype=dtype).reshape(-1)
    return {"first": array[:4].tolist(), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}


def record(values, scales, offsets, real):
    found = {"values": digest(values, "i1"), "scales": digest(scales, "<f4"), "real": digest(real, "<f4")}
    if offsets is not None:
        found["offsets"] = digest(offsets, "<f4")
    return found


def blocks(data, kind, real):
    """Integers, scales and offsets of quantised rows, read by the layout of `ggml-common.h`."""
    size = {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q8_0: 34}[kind]
    rows = data.reshape(-1, size)
    scales = rows[:, :2].copy().view("<f2").astype(np.float32)
    if kind == Type.Q8_0:
        return record(rows[:, 2:].view(np.int8), scales, None, real)
    packed = rows[:, size - 16 :]
    values = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.int16) - 8
    if kind == Type.Q4_0:
        return record(values, scales, None, real)
    least = rows[:, 2:4].copy().view("<f2").astype(np.float32)
    return record(values, scales, 8 + least / scales, real)


def gguf(path, weights):
    """A file as `convert_hf_to_gguf.py` and `llama-quantize` make it, but with all forms in one."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    expected = {}
    for name, weight in weights.items():
        stored = weight
        if "q_proj" in name or "k_proj" in name:
            stored = permute(weight, HEADS if "q_proj" in name else GROUPS)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        elif "embed_tokens" in name or "lm_head" in name:
            writer.add_tensor(gguf_name(name), stored.astype(np.float16))
        else:
            kind = Type.Q4_1 if "v_proj" in name or "gate" in name else Type.Q8_0 if "down" in name else Type.Q4_0
            writer.add_tensor(gguf_name(name), quants.quantize(stored, kind), raw_dtype=kind)
            # Rows are quantised one by one: these are the integers in the order of the checkpoint.
            data = quants.quantize(weight, kind)
            expected[name] = blocks(data, kind, quants.dequantize(data, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def sixes(path, rng):
    """A table of Q6_K, of random blocks: the package reads this form and does not write it."""
    writer = GGUFWriter(path, "qwen2")
    data = rng.integers(0, 256, (8, 210), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (8, 1)).astype("<f2").view(np.uint8)
    data[:, 208:] = scales
    for key, value in [("context_length", 64), ("embedding_length", 256), ("block_count", 1)]:
        writer.add_uint32(f"qwen2.{key}", value)
    for key, value in [("feed_forward_length", 32), ("attention.head_count", 8)]:
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", data, raw_dtype=Type.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"model.embed_tokens.weight": {"real": digest(quants.dequantize(data, Type.Q6_K), "<f4")}}


# Where in a block of each form halves of floating point are, and those that are minima.
KINDS = {
    Type.Q5_0: ([0], []),
    Type.Q5_1: ([0], [2]),
    Type.Q2_K: ([80], [82]),
    Type.Q3_K: ([108], []),
    Type.Q4_K: ([0], [2]),
    Type.Q5_K: ([0], [2]),
    Type.Q6_K: ([208], []),
    Type.IQ4_NL: ([0], []),
    Type.IQ4_XS: ([0], []),
    Type.MXFP4: ([], []),
    Type.TQ1_0: ([52], []),
    Type.TQ2_0: ([64], []),
    Type.Q1_0: ([0], []),
}


def ones(data):
    """Values of Q1_0 by the layout of `ggml-common.h`, which the package knows only by its size."""
    blocks = data.reshape(len(data), -1, 18)
    scales = blocks[..., :2].copy().view("<f2").astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    return ((2 * signs - 1) * scales).reshape(len(data), -1)


def kinds(path, rng):
    """Matrices of three rows of every form that has no file of its own, of random blocks: the package reads these forms
    and writes few of them. The last row has scales of zero, and minima that are not."""
    writer = GGUFWriter(path, "qwen2")
    expected = {}
    for layer, (kind, (scales, minima)) in enumerate(KINDS.items()):
        elements, size = GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (3, 256 // elements, size), dtype=np.uint8)
        for places, low in [(scales, 0.001), (minima, 0.002)]:
            for at in places:
                drawn = rng.uniform(low, 10 * low, (3, 256 // elements, 1)).astype("<f2")
                drawn *= np.where(rng.integers(0, 2, drawn.shape) == 1, 1, -1).astype("<f2")
                data[..., at : at + 2] = drawn.view(np.uint8)
        if kind == Type.MXFP4:
            data[..., 0] = rng.integers(110, 130, data.shape[:2])
            data[2, :, 0] = np.arange(8)
        for at in scales:
            data[2, :, at : at + 2] = 0
        data = data.reshape(3, -1)
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", data, raw_dtype=kind)
        real = ones(data) if kind == Type.Q1_0 else quants.dequantize(data, kind)
        expected[f"model.layers.{layer}.mlp.up_proj.weight"] = {"form": kind.name, "real": digest(real, "<f4")}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def groups_of(weight, symmetric):
    """Scales and zero points `[outputs, groups]` of rounding to the nearest of 16 values, and the rounded weight."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, inputs // GROUP, GROUP)
    if symmetric:
        scales = (2 * np.abs(grouped).max(2) / 15).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, 15).astype(np.int64)
    wide = scales.astype(np.float32)[..., None]
    integers = np.clip(np.round(grouped / wide) + zeros[..., None], 0, 15)
    return scales, zeros, ((integers - zeros[..., None]) * wide).reshape(outputs, inputs).astype(np.float32)


def write_safetensors(path, tensors):
    types = {"float16": "F16", "float32": "F32", "int32": "I32"}
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": types[str(array.dtype)], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values()))


def write_config(path, quantization):
    """`config.json` of the Llama with a `quantization_config`."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": quantization,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main(out):
    out.mkdir(exist_ok=True)
    weights = tensors(np.random.default_rng(7))
    expected = {}
    expected["mixed.gguf"] = gguf(out / "mixed.gguf", weights)
    expected["q6_k.gguf"] = sixes(out / "q6_k.gguf", np.random.default_rng(8))
    expected["kinds.gguf"] = kinds(out / "kinds.gguf", np.random.default_rng(9))
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
