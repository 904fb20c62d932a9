"""Makes the tiny Kokoro checkpoint as published ones are laid out (config.json, kokoro-v1_0.pth, voices/*.pt) with drawn
weights, and its goldens by the package `kokoro` (0.9.4, its `KModel`).

    python tests/oracle/kokoro_speak.py tests/fixtures/kokoro-tiny
    python tests/oracle/kokoro_speak.py FOLDER --published

With --published the sizes are those of Kokoro-82M, and one text of some 10 s is said, three times over: it prints how
long the package takes for a second of audio.

Needs torch, transformers, and `pip install --no-deps kokoro==0.9.4 loguru attrs`. The package draws other noise for
its source at each call; here it is that of the seeded generator which the host-op has (`noise`). So are angles that its
rounding chooses (`transform`).
"""

import argparse
import json
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

# The pipeline from text to phonemes has requirements of its own, and is not needed.
pipeline = types.ModuleType("kokoro.pipeline")
pipeline.KPipeline = None
sys.modules["kokoro.pipeline"] = pipeline
import kokoro.model as package  # noqa: E402
from kokoro.istftnet import AdainResBlk1d, Decoder, TorchSTFT  # noqa: E402
from torch.nn.utils import weight_norm  # noqa: E402

SYMBOLS = ' ;:,.!?—…"()“”' + "abdefhijklmnopstuvwzæðŋɑɔəɛɜɡɪɹʃʊʌʒθˈˌːʧʤAIOWY"
CONFIG = {
    "istftnet": {
        "upsample_kernel_sizes": [20, 12], "upsample_rates": [10, 6], "gen_istft_hop_size": 5, "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5]] * 3, "resblock_kernel_sizes": [3, 7, 11], "upsample_initial_channel": 16,
    },
    "dim_in": 4, "dropout": 0.2, "hidden_dim": 16, "max_conv_dim": 12, "max_dur": 12, "multispeaker": True, "n_layer": 2,
    "n_mels": 80, "n_token": 80, "style_dim": 128, "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32, "max_position_embeddings": 64,
        "num_hidden_layers": 3, "dropout": 0.1, "embedding_size": 8,
    },
    "vocab": {symbol: at + 1 for at, symbol in enumerate(SYMBOLS)},
}
# What Kokoro-82M has otherwise.
PUBLISHED = {
    "dim_in": 64, "hidden_dim": 512, "max_conv_dim": 512, "max_dur": 50, "n_layer": 3, "n_token": 178,
    "istftnet": CONFIG["istftnet"] | {"upsample_initial_channel": 512},
    "plbert": {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048, "max_position_embeddings": 512,
        "num_hidden_layers": 12, "dropout": 0.1, "embedding_size": 128,
    },
}
LONG = "ðə kwˈɪk bɹˈWn fˈɑks ʤˈʌmps ˌOvəɹ ðə lˈAzi dˈɔɡ, ænd ðə dˈɔɡ slˈips ˌɑn: "
CASES = [("one", "həlˈO wˈɜɹld.", 1.0), ("two", "ðə kwˈɪk fˈɑks!", 1.25)]


class Tiny(Decoder):
    """The decoder, whose class has widths of its own: 1024 = 2 · max_conv_dim, 64 = dim_in, 512 = hidden_dim."""

    def __init__(self, config):
        super().__init__(dim_in=config["hidden_dim"], style_dim=config["style_dim"], dim_out=80, **config["istftnet"])
        wide, narrow, hidden, style = 2 * config["max_conv_dim"], config["dim_in"], config["hidden_dim"], config["style_dim"]
        inner = wide + 2 + narrow
        self.encode = AdainResBlk1d(hidden + 2, wide, style)
        last = AdainResBlk1d(inner, config["istftnet"]["upsample_initial_channel"], style, upsample=True)
        self.decode = torch.nn.ModuleList([AdainResBlk1d(inner, wide, style) for _ in range(3)] + [last])
        self.asr_res = torch.nn.Sequential(weight_norm(torch.nn.Conv1d(hidden, narrow, kernel_size=1)))


def noise(shape, seed=0):
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


def transform(self, samples):
    """`TorchSTFT.transform`, where rounding does not choose between the angles π and −π of a mirrored frame."""
    window = self.window.to(samples.device)
    arguments = (self.filter_length, self.hop_length, self.win_length)
    spectrum = torch.stft(samples, *arguments, window=window, return_complex=True)
    sums = torch.nn.functional.pad(samples[:, None], [self.filter_length // 2] * 2, mode="reflect")[:, 0]
    sums = (sums.unfold(-1, self.filter_length, self.hop_length) * window).abs().sum(-1)
    imaginary = torch.where(spectrum.imag.abs() <= 1e-6 * sums[:, None], 0.0, spectrum.imag)
    return spectrum.abs(), torch.atan2(imaginary, spectrum.real)


def build(seed):
    torch.manual_seed(seed)
    package.Decoder = lambda **_: Tiny(CONFIG)
    package.torch.load, load = (lambda *_, **__: {}), package.torch.load
    model = package.KModel(repo_id="tiny", config=CONFIG, model="none").eval()
    package.torch.load = load
    with torch.no_grad():
        for name, value in model.named_parameters():
            draw = torch.randn_like(value)
            if ".norm.weight" in name:
                value.fill_(1.0)  # Published checkpoints have none.
            elif ".norm.bias" in name:
                value.zero_()
            elif "alpha" in name:
                value.copy_(0.6 + 0.3 * draw.abs())
            elif name.endswith("weight_g"):
                value.copy_(1.0 + 0.2 * draw)
            elif "embedding" in name and value.dim() == 2:
                value.copy_(draw)
            elif "lstm" in name or "shared" in name:
                value.copy_(0.5 * draw)
            elif "LayerNorm.weight" in name or "layer_norm.weight" in name or name.endswith("gamma"):
                value.copy_(1 + 0.1 * draw)
            elif value.dim() > 1:
                value.copy_(draw / value[0].numel() ** 0.5)
            else:
                value.copy_(0.1 * draw)
        model.predictor.duration_proj.linear_layer.bias.copy_(-1 + 0.3 * torch.randn(CONFIG["max_dur"]))
        model.predictor.duration_proj.linear_layer.weight.mul_(4)
        model.predictor.F0_proj.weight.mul_(80)
        model.predictor.F0_proj.bias.fill_(110)
        model.decoder.generator.m_source.l_linear.weight.mul_(3)
        model.decoder.generator.conv_post.weight_g.mul_(0.06)
        for value in model.parameters():
            value.copy_(value.half().float())
    return model


def save(model, out):
    out.mkdir(parents=True, exist_ok=True)
    (out / "voices").mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG, ensure_ascii=False) + "\n")
    parts = {}
    for part in ("bert", "bert_encoder", "predictor", "decoder", "text_encoder"):
        state = getattr(model, part).state_dict()
        kept = {k: v for k, v in state.items() if not (k.endswith((".norm.weight", ".norm.bias"))) and "position_ids" not in k}
        # bfloat16 would lose bits: f16, as which the weights were drawn.
        parts[part] = {f"module.{k}": v.half() if v.is_floating_point() else v for k, v in kept.items()}
    torch.save(parts, out / "kokoro-v1_0.pth")
    torch.manual_seed(7)
    for name in ("af_one", "bm_two"):
        rows = CONFIG["plbert"]["max_position_embeddings"] - 2
        torch.save((0.5 * torch.randn(rows, 1, 256)).half().float(), out / "voices" / f"{name}.pt")


def whisper(model, out):
    """Moves the second voice's styles until F0 is nowhere a voice's: its source is noise alone, which no F0 moves.

    The phase of a sine is the sum of all F0 before it: of F0 that is 1e-5 off, which f32 is, the package itself gives a
    spectrum that is 0.3 off. Without sines the rest can be compared closely.
    """
    (_, phonemes, speed), path = CASES[1], out / "voices" / "bm_two.pt"
    table = torch.load(path, weights_only=True)
    curve = []
    hook = model.predictor.F0_proj.register_forward_hook(lambda _, __, output: curve.append(output))
    tokens = torch.tensor([[0, *(CONFIG["vocab"][symbol] for symbol in phonemes), 0]])
    change = torch.zeros(1, 128, requires_grad=True)
    adam = torch.optim.Adam([change], lr=0.05)
    for _ in range(100):
        style = table[len(phonemes) - 1] + torch.cat([torch.zeros(1, 128), change], 1)
        package.KModel.forward_with_tokens.__wrapped__(model, tokens, style, speed)
        excess = torch.relu(curve[-1] + 10)
        if excess.sum() == 0:
            break
        adam.zero_grad()
        excess.square().mean().backward()
        adam.step()
    hook.remove()
    table[:, :, 128:] += change.detach()
    torch.save(table.half().float(), path)


@torch.no_grad()
def record(model, out):
    found, tensors = [], {}
    caught = {}

    def keep(name):
        def hook(_, __, output):
            caught[name] = output
        return hook

    model.decoder.generator.conv_post.register_forward_hook(keep("post"))
    model.predictor.F0_proj.register_forward_hook(keep("f0"))
    model.predictor.N_proj.register_forward_hook(keep("n"))
    model.bert_encoder.register_forward_hook(keep("bert"))
    torch.randn_like = lambda like, **_: noise(like.shape)
    TorchSTFT.transform = transform
    for at, (name, phonemes, speed) in enumerate(CASES):
        voice = ("af_one", "bm_two")[at]
        table = torch.load(out / "voices" / f"{voice}.pt", weights_only=True)
        made = model(phonemes, table[len(phonemes) - 1], speed, return_output=True)
        post = caught["post"][0]
        f0 = caught["f0"].flatten()
        print(name, made.pred_dur.tolist(), int(made.pred_dur.sum()), "frames; f0", float(f0.min()), float(f0.max()),
              "post", float(post[:11].min()), float(post[:11].max()), "audio", float(made.audio.std()), float(made.audio.abs().max()))
        found.append({"name": name, "phonemes": phonemes, "voice": voice, "speed": speed, "durations": made.pred_dur.tolist()})
        tensors |= {
            f"{name}.bert": caught["bert"][0], f"{name}.f0": f0, f"{name}.n": caught["n"].flatten(),
            # Every eighth frame.
            f"{name}.post": post.T[::8], f"{name}.audio": made.audio,
        }
    value = {"schema": "qhx-goldens/1", "model": out.name, "kokoro": "0.9.4", "torch": torch.__version__.split("+")[0], "cases": found}
    (out / "goldens.json").write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")
    save_file({k: v.float().contiguous() for k, v in tensors.items()}, out / "goldens.safetensors", metadata={"format": "pt"})


def time_package(model, out):
    """The package's real-time factor, the best of three."""
    table = torch.load(out / "voices" / "af_one.pt", weights_only=True)
    phonemes = LONG[:15].strip()
    taken = []
    with torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            audio = model(phonemes, table[len(phonemes) - 1], 1.0)
            taken.append(time.perf_counter() - start)
    (out / "phonemes.txt").write_text(phonemes)
    seconds = len(audio) / 24000
    np.save(out / "audio.npy", audio.numpy())
    print(f"{seconds:.1f} s of audio in {min(taken):.2f} s: {min(taken) / seconds:.3f} with {torch.get_num_threads()} threads")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--published", action="store_true", help="the sizes of Kokoro-82M")
    args = parser.parse_args()
    if args.published:
        CONFIG.update(PUBLISHED)
    model = build(args.seed)
    save(model, args.out)
    if args.published:
        torch.randn_like = lambda like, **_: noise(like.shape)
        TorchSTFT.transform = transform
        time_package(model, args.out)
        return
    whisper(model, args.out)
    record(model, args.out)


if __name__ == "__main__":
    main()
