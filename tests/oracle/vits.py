"""Makes tiny VITS checkpoints with drawn weights, and their goldens.

    python tests/oracle/vits.py tests/fixtures
    python tests/oracle/vits.py FOLDER --seed 77        # other shapes, for a test by hand

`vits-tiny` is a `VitsModel` of `transformers` in the layout of facebook/mms-tts-* (safetensors with weight norm, letters
as symbols); its goldens are that class's. `piper-tiny` is a voice of Piper with three speakers: an ONNX file that
`piper.train`, of the package `piper-tts`, exports as published ones were, with the file beside it; its goldens are
onnxruntime's.

Needs torch, transformers, onnx, onnxruntime, and `pip install --no-deps piper-tts==1.8.0` (or its folder in PYTHONPATH).
Each has cases without noise, and one with noise that the seeded generator of the host-op draws.
"""

import argparse
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

torch.set_num_threads(1)

LETTERS = "k'zyuä bcflnpqstvmxaeio-rdghjw"
PHONEMES = " !'(),-.:;?abdefhijklmnoprstuvwzæðŋɑɐɔəɚɛɜɡɪɹɾʃʊʌʒθˈˌː̩"
TEXTS = {"one": "hello there", "long": "the quick brown fox jumps over the lazy dog and then it sleeps"}
SPOKEN = {"one": "həlˈoʊ wˈɜːld.", "long": "ðə kwˈɪk bɹˈaʊn fˈɑːks dʒˈʌmps ˌoʊvɚ ðə lˈeɪzi dˈɑːɡ, ænd ðɛn ɪt slˈiːps!"}


def noise(shape, seed):
    """Normal numbers, each of its place: SplitMix64, and the cosine of Box and Muller."""
    place = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + place * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    first = ((z >> np.uint64(32)).astype(np.float64) + 1) / 2**32
    second = (z & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    values = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def draw(model, scales):
    """Weights as large as those of a trained model, so that each part shows in the audio."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            fresh = torch.randn_like(value)
            if name.endswith(("original0", "weight_g")):
                value.copy_(value * (1 + 0.2 * fresh))
            elif "norm" in name and value.dim() == 1:
                value.copy_((1 if name.endswith(("weight", "gamma")) else 0) + 0.1 * fresh)
            elif value.dim() == 1:
                value.copy_(0.1 * fresh)
            elif any(part in name for part in ("embed_tokens", "emb.weight")):
                value.copy_(fresh / value.shape[-1] ** 0.5)
            elif any(part in name for part in ("embed_speaker", "emb_g")):
                value.copy_(fresh)
            elif "emb_rel" in name:
                value.copy_(0.6 * fresh)
            elif name.endswith((".logs", "log_scale")):
                value.copy_(0.6 + 0.2 * fresh)
            elif name.endswith((".m", "translate")):
                value.copy_(0.3 * fresh)
            else:
                value.copy_(fresh / value[0].numel() ** 0.5)
            for part, scale in scales.items():
                if part in name and value.dim() > 1 and not name.endswith(("original1", "weight_v")):
                    value.mul_(scale)


def distinct(durations):
    """The least distance of a duration from the next whole number, which rounding must not reach."""
    return float((durations - durations.round()).abs().min())


def transformers_voice(out, seed, unseen):
    from transformers import VitsConfig, VitsModel

    torch.manual_seed(seed)
    config = VitsConfig(
        vocab_size=len(LETTERS), hidden_size=20, num_hidden_layers=2, num_attention_heads=2 if unseen else 1,
        window_size=3,
        ffn_dim=28, ffn_kernel_size=3 if not unseen else 5, flow_size=12 if not unseen else 10,
        spectrogram_bins=9, posterior_encoder_num_wavenet_layers=1,
        upsample_initial_channel=16, upsample_rates=[4, 2, 2], upsample_kernel_sizes=[8, 4, 4],
        resblock_kernel_sizes=[3, 5], resblock_dilation_sizes=[[1, 3], [1, 2, 3]],
        duration_predictor_flow_bins=6, duration_predictor_num_flows=3, depth_separable_num_layers=2,
        duration_predictor_filter_channels=22, duration_predictor_kernel_size=3,
        use_stochastic_duration_prediction=not unseen, num_speakers=2 if unseen else 1,
        speaker_embedding_size=6 if unseen else 0, prior_encoder_num_flows=4 if not unseen else 3,
        prior_encoder_num_wavenet_layers=2, wavenet_dilation_rate=1 if not unseen else 2,
        sampling_rate=800, speaking_rate=1.25, noise_scale=0.5, noise_scale_duration=0.7,
    )
    model = VitsModel(config).eval()
    model.decoder.apply_weight_norm()
    draw(model, {"conv_proj": 3.0, "project": 2.0, "conv_post": 0.15})
    for conv in (m for m in model.modules() if isinstance(m, (torch.nn.Conv1d, torch.nn.ConvTranspose1d))):
        conv.weight  # computes weight norm once
    out.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    # The names that published checkpoints have.
    names = {".parametrizations.weight.original0": ".weight_g", ".parametrizations.weight.original1": ".weight_v"}
    renamed = {}
    for name, value in state.items():
        for new, old in names.items():
            name = name.replace(new, old)
        renamed[name] = value.contiguous()
    save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"architectures": ["VitsModel"]}
    written = {k: v for k, v in written.items() if k not in ("id2label", "label2id", "dtype")}
    (out / "config.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    (out / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(LETTERS)}, ensure_ascii=False) + "\n")
    settings = {
        "add_blank": True, "is_uroman": False, "language": "eng", "normalize": True, "pad_token": "k", "phonemize": False,
        "tokenizer_class": "VitsTokenizer", "unk_token": "<unk>",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    cases, tensors = [], {}
    for name, text, scales, speaker, given in [
        ("one", TEXTS["one"], (0.0, 0.0), 0, 0),
        ("long", TEXTS["long"], (0.0, 0.0), 1, 0),
        ("noisy", TEXTS["one"], (0.5, 0.7), 1, 9),
    ]:
        speaker = speaker if unseen else 0
        ids = [0]
        for letter in text:
            ids += [LETTERS.index(letter), 0]
        model.noise_scale, model.noise_scale_duration = scales
        randn, randn_like = torch.randn, torch.randn_like
        torch.randn = lambda *shape, **_: noise(shape, 2 * given)
        torch.randn_like = lambda like, **_: noise(like.shape, 2 * given + 1)
        logs = []
        hook = model.duration_predictor.register_forward_hook(lambda _, __, output: logs.append(output))
        with torch.no_grad():
            made = model(torch.tensor([ids]), speaker_id=speaker if unseen else None)
        hook.remove()
        torch.randn, torch.randn_like = randn, randn_like
        durations = logs[-1].exp().flatten() / config.speaking_rate
        wave = made.waveform[0]
        margin = distinct(durations)
        print(out.name, name, len(ids), "symbols", len(wave) // 16, "frames; margin", margin, "audio", float(wave.std()))
        cases.append({
            "name": name, "text": text, "ids": ids, "voice": str(speaker) if unseen else "default", "seed": given,
            "noise": list(scales), "frames": durations.ceil().int().tolist(), "margin": distinct(durations),
        })
        tensors |= {f"{name}.logs": logs[-1].flatten(), f"{name}.audio": wave}
    return finish(out, cases, tensors)


def piper_voice(out, seed, unseen):
    # Training imports lightning; the network does not.
    for missing in ("lightning", "librosa"):
        sys.modules.setdefault(missing, types.ModuleType(missing))
    import importlib.util

    import onnxruntime

    spec = importlib.util.find_spec("piper")
    package = types.ModuleType("piper.train")
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "train")]
    vits = types.ModuleType("piper.train.vits")
    vits.__path__ = [str(Path(package.__path__[0]) / "vits")]
    sys.modules |= {"piper.train": package, "piper.train.vits": vits}
    from piper.train.vits.models import SynthesizerTrn

    torch.manual_seed(seed)
    speakers = 1 if unseen else 3
    symbols = "_^$" + PHONEMES
    model = SynthesizerTrn(
        n_vocab=len(symbols) + 3, spec_channels=9, segment_size=8, inter_channels=12, hidden_channels=12, filter_channels=20,
        n_heads=2, n_layers=2, kernel_size=3, p_dropout=0.1, resblock="1" if unseen else "2",
        resblock_kernel_sizes=(3, 5), resblock_dilation_sizes=((1, 2, 3), (2, 6, 3)) if unseen else ((1, 2), (2, 6)),
        upsample_rates=(4, 4), upsample_initial_channel=16, upsample_kernel_sizes=(8, 8),
        n_speakers=speakers, gin_channels=7 if speakers > 1 else 0,
    ).eval()
    draw(model, {"dp.flows": 1.0, "enc_p.proj": 2.0, "conv_post": 0.3})
    with torch.no_grad():
        model.dec.remove_weight_norm()

    def infer(text, lengths, scales, sid=None):
        return model.infer(
            text, lengths, noise_scale=scales[0], length_scale=scales[1], noise_scale_w=scales[2], sid=sid
        )[0].unsqueeze(1)

    model.forward = infer
    out.mkdir(parents=True, exist_ok=True)
    path = out / "en_US-tiny-medium.onnx"
    sid = torch.LongTensor([0]) if speakers > 1 else None
    torch.onnx.export(
        model,
        (torch.randint(0, len(symbols), (1, 50)), torch.LongTensor([50]), torch.FloatTensor([0.667, 1.0, 0.8]), sid),
        str(path), opset_version=15, dynamo=False,
        input_names=["input", "input_lengths", "scales", "sid"], output_names=["output"],
        dynamic_axes={
            "input": {0: "batch_size", 1: "phonemes"}, "input_lengths": {0: "batch_size"},
            "output": {0: "batch_size", 2: "time"},
        },
    )
    slim(path)
    config = {
        "audio": {"sample_rate": 800, "quality": "medium"}, "espeak": {"voice": "en-us"},
        "inference": {"noise_scale": 0.667, "length_scale": 1.1, "noise_w": 0.8}, "phoneme_type": "espeak", "phoneme_map": {},
        "phoneme_id_map": {symbol: [at] for at, symbol in enumerate(symbols)}, "num_symbols": len(symbols) + 3,
        "num_speakers": speakers, "speaker_id_map": {"ann": 0, "bob": 2, "cy": 1} if speakers > 1 else {},
        "piper_version": "1.0.0", "language": {"code": "en_US", "family": "en"}, "dataset": "tiny",
    }
    Path(f"{path}.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")
    session = onnxruntime.InferenceSession(str(path))
    cases, tensors = [], {}
    for name, speaker in [("one", 0), ("long", 2 if speakers > 1 else 0)]:
        ids = [1, 0]
        for phoneme in SPOKEN[name]:
            ids += [symbols.index(phoneme), 0]
        ids.append(2)
        scales = np.array([0, 1.1, 0], dtype=np.float32)
        given = {"input": np.array([ids]), "input_lengths": np.array([len(ids)]), "scales": scales}
        if speakers > 1:
            given["sid"] = np.array([speaker])
        wave = torch.from_numpy(session.run(None, given)[0].flatten())
        with torch.no_grad():
            x, _, _, mask = model.enc_p(torch.tensor([ids]), torch.tensor([len(ids)]))
            style = model.emb_g(torch.tensor([speaker])).unsqueeze(-1) if speakers > 1 else None
            logs = model.dp(x, mask, g=style, reverse=True, noise_scale=0).flatten()
        durations = logs.exp() * 1.1
        margin = distinct(durations)
        print(out.name, name, len(ids), "symbols", len(wave) // 16, "frames; margin", margin, "audio", float(wave.std()))
        assert len(wave) == 16 * int(durations.ceil().sum())
        cases.append({
            "name": name, "text": SPOKEN[name], "ids": ids, "voice": ["ann", "cy", "bob"][speaker] if speakers > 1 else "tiny",
            "seed": 0, "noise": [0.0, 0.0], "frames": durations.ceil().int().tolist(), "margin": distinct(durations),
        })
        tensors |= {f"{name}.logs": logs, f"{name}.audio": wave}
    return finish(out, cases, tensors)


def slim(path):
    """Shorter names of what only nodes write and read, which are half of so small a file."""
    import onnx

    file = onnx.load(path)
    graph = file.graph
    kept = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    short = {}
    for node in graph.node:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                if name and name not in kept:
                    names[at] = short.setdefault(name, f"v{len(short)}")
        node.doc_string = ""
        if not any(name in kept for name in node.input):
            node.name = ""
    del graph.value_info[:]
    onnx.save(file, path)


def finish(out, cases, tensors):
    value = {"schema": "qhx-goldens/1", "model": out.name, "torch": torch.__version__.split("+")[0], "cases": cases}
    (out / "goldens.json").write_text(json.dumps(value, ensure_ascii=False) + "\n")
    save_file({k: v.float().contiguous() for k, v in tensors.items()}, out / "goldens.safetensors", metadata={"format": "pt"})
    return min(case["margin"] for case in cases)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=5, help="another one draws other shapes, too")
    parser.add_argument("--only", choices=["vits", "piper"])
    args = parser.parse_args()
    makers = {"vits": transformers_voice, "piper": piper_voice}
    for kind in [args.only] if args.only else makers:
        # No duration may be so near to a whole number that rounding chooses.
        tries = range(args.seed, args.seed + 4000, 100)
        next(seed for seed in tries if makers[kind](args.out / f"{kind}-tiny", seed, args.seed != 5) > 0.004)


if __name__ == "__main__":
    main()
