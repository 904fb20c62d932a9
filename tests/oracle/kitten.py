"""Makes tiny checkpoints of KittenTTS as published ones are laid out (config.json, an ONNX file, voices.npz) with drawn
weights, and their goldens by the package `kokoro` (0.9.4, its `KModel` with `disable_complex`, which KittenTTS exported).

    python tests/oracle/kitten.py tests/fixtures
    python tests/oracle/kitten.py FOLDER --seed 77        # other shapes, for a test by hand

`kitten-tiny` is in f32, as kitten-tts-nano-0.8-fp32 is. `kitten-int8` was quantized by onnxruntime
(`quantize_dynamic`), as mini, micro and nano-0.8-int8 are; its goldens are those of the class with the values that its
numbers of 8 bits stand for. Durations are also compared with those that onnxruntime gives for the files.

Needs what `kokoro_speak.py` needs, and onnx, onnxruntime and onnxscript.
"""

import argparse
import json
import logging
from pathlib import Path

import kokoro_speak
import numpy as np
import onnx
import onnxruntime
import torch
from kokoro.istftnet import AdainResBlk1d, Decoder
from kokoro.model import KModelForONNX
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from safetensors.torch import save_file
from torch.nn.utils import parametrize, remove_weight_norm, weight_norm

torch.set_num_threads(1)
logging.disable(logging.WARNING)

SYMBOLS = (
    '$;:,.!?¡¿—…"«»"" ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'
    "ɑɐɒæɓʙβɔɕçɗɖðʤəɘɚɛɜɝɞɟʄɡɠɢʛɦɧħɥʜɨɪʝɭɬɫɮʟɱɯɰŋɳɲɴøɵɸθœɶʘɹɺɾɻʀʁɽʂʃʈʧʉʊʋⱱʌɣɤʍχʎʏʑʐʒʔʡʕʢǀǁǂǃˈˌːˑʼʴʰʱʲʷˠˤ˞↓↑→↗↘'̩'ᵻ"
)
NUMBERS = {symbol: at for at, symbol in enumerate(SYMBOLS)}
CONFIG = kokoro_speak.CONFIG | {
    # `asr_res_dim` and the width of the decoder are no keys: here they stand for them.
    "dim_in": 6, "max_conv_dim": 12, "n_token": len(SYMBOLS), "vocab": NUMBERS,
    "istftnet": kokoro_speak.CONFIG["istftnet"] | {"upsample_initial_channel": 8},
    "plbert": kokoro_speak.CONFIG["plbert"] | {"num_hidden_layers": 2, "num_attention_heads": 4},
}
PUBLISHED = {
    "name": "Kitten TTS Tiny", "version": "0.8", "type": "ONNX2", "model": "kitten-tts-tiny", "voices": "voices.npz",
    "model_file": "kitten_tts_tiny.onnx", "speed_priors": {"expr-voice-2-m": 0.8},
    "voice_aliases": {"Bella": "expr-voice-2-f", "Jasper": "expr-voice-2-m"},
}
VOICES = ["expr-voice-2-m", "expr-voice-2-f"]
ROWS = 40
TRIM = 5000
# Text length, phonemes as they are put to the model, and the speed that is asked for. The second has noise alone.
CASES = [
    ("one", "expr-voice-2-m", 13, "həlˈoʊ , wˈɜːld !", 1.0),
    ("two", "expr-voice-2-f", 500, "fˈɑːks ,", 2.25),
]


class Tiny(Decoder):
    """The decoder, whose class has the width 1024."""

    def __init__(self, config):
        hidden, style = config["hidden_dim"], config["style_dim"]
        super().__init__(dim_in=hidden, style_dim=style, dim_out=80, disable_complex=True, **config["istftnet"])
        wide, narrow = config["max_conv_dim"], config["dim_in"]
        inner = wide + 2 + narrow
        self.encode = AdainResBlk1d(hidden + 2, wide, style)
        last = AdainResBlk1d(inner, config["istftnet"]["upsample_initial_channel"], style, upsample=True)
        self.decode = torch.nn.ModuleList([AdainResBlk1d(inner, wide, style) for _ in range(3)] + [last])
        self.asr_res = torch.nn.Sequential(weight_norm(torch.nn.Conv1d(hidden, narrow, kernel_size=1)))


def build(config, seed):
    kokoro_speak.CONFIG.clear()
    kokoro_speak.CONFIG.update(config)
    kokoro_speak.Tiny = Tiny
    model = kokoro_speak.build(seed)
    lasting = model.predictor.duration_proj.linear_layer.weight.data
    lasting.copy_((3 * lasting).half())
    model.predictor.F0_proj.weight.data.mul_(0.5)
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
        elif hasattr(module, "weight_g"):
            remove_weight_norm(module)
    return model


def voices(model, seed):
    """Styles; those of the second voice are moved until F0 is nowhere a voice's."""
    torch.manual_seed(seed + 4)
    # Small beside the symbols, which would decide nothing else.
    tables = {name: (0.05 * torch.randn(ROWS, 256)).half().float() for name in VOICES}
    _, voice, length, phonemes, speed = CASES[1]
    curve = []
    hook = model.predictor.F0_proj.register_forward_hook(lambda _, __, output: curve.append(output))
    change = torch.zeros(1, 128, requires_grad=True)
    adam = torch.optim.Adam([change], lr=0.05)
    for _ in range(500):
        style = tables[voice][min(length, ROWS - 1)][None] + torch.cat([torch.zeros(1, 128), change], 1)
        type(model).forward_with_tokens.__wrapped__(model, tokens(phonemes), style, speed)
        excess = torch.relu(curve[-1] + 40)
        if excess.sum() == 0:
            break
        adam.zero_grad()
        excess.square().mean().backward()
        adam.step()
    hook.remove()
    tables[voice][:, 128:] += change.detach()
    return {name: table.half().float() for name, table in tables.items()}


def tokens(phonemes):
    return torch.tensor([[0, *(NUMBERS[symbol] for symbol in phonemes), NUMBERS["…"], 0]])


def export(model, path):
    inputs = (tokens(CASES[0][3]), torch.zeros(1, 256), torch.ones(1))
    torch.onnx.export(
        KModelForONNX(model).eval(), inputs, path, input_names=["input_ids", "style", "speed"],
        output_names=["waveform", "duration"], opset_version=20, dynamo=False,
        dynamic_axes={"input_ids": {1: "sequence_length"}, "waveform": {0: "num_samples"}, "duration": {0: "n"}},
    )


def dequantize(model, plain, quantized):
    """Loads what the numbers of 8 bits stand for: which parameter they are of is seen by the values in f32."""
    before = {i.name: numpy_helper.to_array(i) for i in onnx.load(plain).graph.initializer}
    after = {i.name: numpy_helper.to_array(i) for i in onnx.load(quantized).graph.initializer}
    # Gates of LSTMs as ONNX has them: input, output, forget, cell.
    ours = [0, 3, 1, 2]
    parameters = dict(model.named_parameters())
    left = {name for name in parameters if parameters[name].dim() > 1}
    for name, stored in after.items():
        if not name.endswith("_quantized"):
            continue
        base = name.removesuffix("_quantized")
        scale, zero = after[f"{base}_scale"], after[f"{base}_zero_point"]
        if "LSTM" in base:
            scale, zero = scale[:, None, None], zero[:, None, None]
        value = (stored.astype(np.float32) - zero.astype(np.float32)) * scale
        base = base.removesuffix("_Transposed")
        value = torch.from_numpy(value.transpose(0, 2, 1) if "LSTM" in base else value)
        first = torch.from_numpy(before[base])
        for key in sorted(left):
            parameter = parameters[key]
            if "LSTM" in base:
                if "lstm" not in key and "shared" not in key or "_ih" not in key and "_hh" not in key:
                    continue
                end = int("_reverse" in key)
                if parameter.shape == first[end].shape:
                    gates = lambda of: of.unflatten(0, (4, -1))[ours].flatten(0, 1)
                    if torch.equal(gates(parameter), first[end]):
                        back = value[end].unflatten(0, (4, -1))[np.argsort(ours)].flatten(0, 1)
                        parameter.data.copy_(back)
                        left.discard(key)
                        continue
            elif base in (f"kmodel.{key}", key):
                parameter.data.copy_(value if value.shape == parameter.shape else value.T)
                left.discard(key)
            elif "::" in base and parameter.dim() == 2 and torch.equal(parameter.T, first):
                parameter.data.copy_(value.T)
                left.discard(key)
    print("not quantized:", sorted(key for key in left if "alpha" not in key))


@torch.no_grad()
def record(model, tables, folder, onnx_file):
    caught, cases, tensors = {}, [], {}
    aliases = {voice: alias for alias, voice in PUBLISHED["voice_aliases"].items()}

    def keep(name):
        def hook(_, __, output):
            caught[name] = output
        return hook

    hooks = [
        module.register_forward_hook(keep(name)) for name, module in {
            "post": model.decoder.generator.conv_post, "f0": model.predictor.F0_proj, "n": model.predictor.N_proj,
            "bert": model.bert_encoder,
        }.items()
    ]
    session = onnxruntime.InferenceSession(str(onnx_file))
    drawn, torch.randn_like = torch.randn_like, lambda like, **_: kokoro_speak.noise(like.shape)
    for name, voice, length, phonemes, asked in CASES:
        style = tables[voice][min(length, ROWS - 1)][None]
        speed = asked * PUBLISHED["speed_priors"].get(voice, 1.0)
        audio, durations = model.forward_with_tokens(tokens(phonemes), style, speed)
        inputs = {"input_ids": tokens(phonemes).numpy(), "style": style.numpy(), "speed": np.array([speed], np.float32)}
        made, found = session.run(None, inputs)
        same = found.tolist() == durations.tolist() and len(made) == len(audio)
        f0, post = caught["f0"].flatten(), caught["post"][0]
        print(folder.name, name, durations.tolist(), "onnxruntime's:", same, "f0", float(f0.min()), float(f0.max()),
              "post", float(post[:11].min()), float(post[:11].max()), "audio", float(audio.std()), float(np.std(made)))
        cases.append({
            "name": name, "voice": aliases[voice], "length": length, "phonemes": phonemes, "speed": asked,
            "durations": durations.tolist(),
        })
        tensors |= {
            f"{name}.bert": caught["bert"][0], f"{name}.f0": f0, f"{name}.n": caught["n"].flatten(),
            f"{name}.post": post.T[::8], f"{name}.audio": audio[:-TRIM],
        }
    torch.randn_like = drawn
    for hook in hooks:
        hook.remove()
    value = {"schema": "qhx-goldens/1", "model": folder.name, "kokoro": "0.9.4",
             "torch": torch.__version__.split("+")[0], "cases": cases}
    (folder / "goldens.json").write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
    tensors = {key: value.float().contiguous() for key, value in tensors.items()}
    save_file(tensors, folder / "goldens.safetensors", metadata={"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    config = dict(CONFIG)
    if args.seed != 3:
        config |= {
            "dim_in": 10, "max_conv_dim": 20, "hidden_dim": 24, "n_layer": 3, "max_dur": 9, "text_encoder_kernel_size": 3,
            "istftnet": config["istftnet"] | {"upsample_initial_channel": 24, "resblock_kernel_sizes": [3, 5],
                                              "resblock_dilation_sizes": [[1, 2, 4]] * 2},
            "plbert": config["plbert"] | {"hidden_size": 40, "num_attention_heads": 5, "num_hidden_layers": 3},
        }
    model = build(config, args.seed)
    tables = voices(model, args.seed)
    for name in ("kitten-tiny", "kitten-int8"):
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(PUBLISHED, indent=2) + "\n")
        np.savez(folder / "voices.npz", **{name: table.numpy() for name, table in tables.items()})
        file = folder / PUBLISHED["model_file"]
        if name == "kitten-tiny":
            export(model, file)
            plain = file
        else:
            quantize_dynamic(plain, file, weight_type=QuantType.QInt8)
            dequantize(model, plain, file)
        record(model, tables, folder, file)


if __name__ == "__main__":
    main()
