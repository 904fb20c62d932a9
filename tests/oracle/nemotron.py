"""The Nemotron streaming tiny models: draws checkpoints, and records goldens by `transformers`: frames, rows of the encoder,
logits and tokens of a clip that is there as a whole. Checks that `generate` says the same of chunk after chunk.

    python nemotron.py FIXTURES [--only NAME] [--out FOLDER]

The clip is that of `silero.py`. `nemotron-unseen` has other shapes.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    GenerationConfig, NemotronAsrStreamingConfig, NemotronAsrStreamingEncoderConfig, NemotronAsrStreamingFeatureExtractor,
    NemotronAsrStreamingForRNNT, NemotronAsrStreamingProcessor, PreTrainedTokenizerFast,
)
from transformers.models.nemotron3_5_asr import Nemotron3_5AsrConfig, Nemotron3_5AsrForRNNT, Nemotron3_5AsrProcessor

import goldens
from parakeet import margin, tokenizer

RATE = 16_000
# Samples of the clip: no whole number of frames or chunks.
SAMPLES = 55_777
KINDS = {
    "nemotron-tiny": (
        dict(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=80, conv_kernel_size=5,
            subsampling_conv_channels=10, num_mel_bins=40, sliding_window=9, default_num_lookahead_tokens=2,
        ),
        dict(decoder_hidden_size=32, num_decoder_layers=2, max_symbols_per_step=4),
        dict(feature_size=40),
    ),
    # Asked for a language, of which the checkpoint has another one than the goldens.
    "nemotron35-tiny": (
        dict(
            hidden_size=36, num_hidden_layers=2, num_attention_heads=2, intermediate_size=60, conv_kernel_size=3,
            subsampling_conv_channels=8, num_mel_bins=40, sliding_window=8, default_num_lookahead_tokens=1,
        ),
        dict(
            decoder_hidden_size=32, num_decoder_layers=1, max_symbols_per_step=3, num_prompts=5, prompt_intermediate_size=44,
            default_prompt_id=3,
        ),
        dict(feature_size=40),
    ),
    # One row at a time, and no bias.
    "nemotron-unseen": (
        dict(
            hidden_size=40, num_hidden_layers=3, num_attention_heads=2, intermediate_size=56, conv_kernel_size=7,
            subsampling_factor=4, subsampling_conv_channels=6, num_mel_bins=36, attention_bias=False, convolution_bias=False,
            scale_input=False, sliding_window=6, default_num_lookahead_tokens=0,
        ),
        dict(decoder_hidden_size=28, num_decoder_layers=1, max_symbols_per_step=2),
        dict(feature_size=36, hop_length=128, n_fft=320, win_length=300, preemphasis=0.9),
    ),
}


LANGUAGES = {"en-US": 0, "de-DE": 2, "auto": 3}


def classes(kind):
    if "35" in kind:
        return Nemotron3_5AsrConfig, Nemotron3_5AsrForRNNT
    return NemotronAsrStreamingConfig, NemotronAsrStreamingForRNNT


def build(kind, tok, seed):
    torch.manual_seed(seed)
    encoder, decoder, _ = KINDS[kind]
    still = dict(dropout=0.0, layerdrop=0.0, activation_dropout=0.0, attention_dropout=0.0)
    encoder = NemotronAsrStreamingEncoderConfig(**encoder, **still, max_position_embeddings=500)
    blank = tok.token_to_id("<blank>")
    config = classes(kind)[0](
        vocab_size=tok.get_vocab_size(), encoder_config=encoder, blank_token_id=blank, pad_token_id=1, **decoder
    )
    config._attn_implementation = "sdpa"
    made = classes(kind)[1](config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.add_(0.1 * torch.randn_like(p))
            elif "bias" in name:
                p.normal_(0, 0.3 if "bias_" in name else 0.1)
            elif p.dim() > 1:
                p.normal_(0, 1.5 / p[0].numel() ** 0.5)
        # Several tokens and blanks, which depend on the tokens before.
        made.decoder.embedding.weight.mul_(3)
        made.decoder.decoder_projector.weight.mul_(2)
        made.joint.head.weight.mul_(4)
    made.generation_config = GenerationConfig(decoder_start_token_id=blank, pad_token_id=1)
    return made.eval()


@torch.no_grad()
def balance(model, batch, share=0.6):
    """Sets the bias of the blank so that it is the likeliest at a share of the rows, behind no token and behind each."""
    rows = model.get_audio_features(**batch).pooler_output[0]
    blank = model.config.blank_token_id
    tokens = torch.arange(model.config.vocab_size)[:, None]
    predicted = model.decoder(torch.cat([torch.full_like(tokens, blank), tokens], 1))[:, -1]
    logits = model.joint(predicted[:, None], rows[None]).flatten(0, 1)
    others = logits.clone()
    others[:, blank] = -torch.inf
    gap = others.max(-1).values - logits[:, blank]
    model.joint.head.bias[blank] += gap.quantile(share)
    # As it is stored.
    model.half().float()


def processor(kind, tok):
    encoder, _, features = KINDS[kind]
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, unk_token="<unk>", pad_token="<pad>")
    lookahead = encoder["default_num_lookahead_tokens"]
    made, more = NemotronAsrStreamingProcessor, {}
    if "35" in kind:
        made, more = Nemotron3_5AsrProcessor, dict(prompt_dictionary=LANGUAGES, num_prompts=5)
    return made(
        NemotronAsrStreamingFeatureExtractor(**features), fast, supported_num_lookahead_tokens=[lookahead],
        default_num_lookahead_tokens=lookahead, **more,
    )


def save(model, kind, tok, out):
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stored = classes(kind)[1](model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.float16)
    stored.config.dtype = torch.float16
    stored.generation_config = model.generation_config
    stored.save_pretrained(out)
    processor(kind, tok).save_pretrained(out)
    tok.save(str(out / "tokenizer.json"))


class Exact(NemotronAsrStreamingFeatureExtractor):
    """The features in f64: a transform in f32 moves mels of bands that hold next to nothing."""

    def _torch_extract_fbank_features(self, waveform, device="cpu", center=True):
        torch.set_default_dtype(torch.float64)
        self.mel_filters = self.mel_filters.double()
        window = torch.hann_window(self.win_length, periodic=False)
        found = torch.stft(
            waveform.double(), self.n_fft, hop_length=self.hop_length, win_length=self.win_length, window=window,
            return_complex=True, pad_mode="constant", center=center,
        )
        found = torch.log(self.mel_filters @ found.abs().pow(2) + 2**-24).permute(0, 2, 1)
        torch.set_default_dtype(torch.float32)
        return found


@torch.no_grad()
def steps(model, generate):
    """Tokens of `generate` with the rows that they begin at, and the logits of each step."""
    logits, before = [], model.forward

    def forward(*args, **kwargs):
        out = before(*args, **kwargs)
        logits.append(out.logits[0, -1].clone())
        return out

    model.forward = forward
    made = generate()
    model.forward = before
    ids, durations = made.sequences[0].tolist()[1:], made.durations[0].tolist()[1:]
    tokens, at = [], 0
    for token, lasts in zip(ids, durations):
        if token != model.config.blank_token_id:
            tokens.append([token, at])
        at += lasts
    return tokens, torch.stack(logits)


def exact(kind, samples):
    made = Exact(**KINDS[kind][2])(samples, sampling_rate=RATE, return_tensors="pt")
    batch = {"input_features": made["input_features"].float(), "attention_mask": made["attention_mask"]}
    if "35" in kind:
        batch["prompt_ids"] = torch.tensor([LANGUAGES["de-DE"]])
    return batch


@torch.no_grad()
def record(out, kind, tok, seed, samples):
    # With another implementation of attention, 5.24 takes the mask the wrong way round.
    model = classes(kind)[1].from_pretrained(out, dtype=torch.float32, attn_implementation="sdpa").eval()
    features, batch = Exact(**KINDS[kind][2]), exact(kind, samples)
    encoded = model.get_audio_features(**batch)
    rows = int(encoded.attention_mask.sum())
    tokens, logits = steps(model, lambda: model.generate(**batch))

    # The same chunk by chunk, as far as chunks are whole.
    encoder = model.config.encoder_config
    factor, right = encoder.subsampling_factor, encoder.default_num_lookahead_tokens
    frames, parts = batch["input_features"], []
    frames = frames[:, : int(batch["attention_mask"].sum())]
    first, step = 1 + factor * right, factor * (right + 1)
    parts.append(frames[:, :first])
    parts += [frames[:, at : at + step] for at in range(first, frames.shape[1] - step + 1, step)]
    more = {key: value for key, value in batch.items() if key == "prompt_ids"}
    streamed, _ = steps(model, lambda: model.generate(input_features=(p for p in parts), num_lookahead_tokens=right, **more))
    whole = len(parts) * (right + 1)
    assert streamed == [t for t in tokens if t[1] < whole], (streamed, tokens)

    plain = NemotronAsrStreamingFeatureExtractor(**KINDS[kind][2])(samples, sampling_rate=RATE, return_tensors="pt")
    print("  mels in f32 are off by", float((plain["input_features"] - batch["input_features"]).abs().max()))
    least, distinct = margin(logits), len({t for t, _ in tokens})
    row = features.hop_length * factor / RATE
    value = {
        "schema": "qhx-goldens/1", "model": kind, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "min_margin": round(least, 4), "row_seconds": row,
        "samples": len(samples), "rows": rows, "tokens": tokens, "text": tok.decode([t for t, _ in tokens]),
    }
    goldens.dump(out / "goldens.json", value)
    tensors = {
        "mel": plain["input_features"][0, : frames.shape[1]].contiguous().half(),
        "encoder": encoded.pooler_output[0, :rows].float().contiguous(),
    }
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)
    print(f"{kind} seed {seed}: least margin {least:.4f}, {len(tokens)} tokens, {distinct} of them distinct, {len(logits)} steps;",
          sum(f.stat().st_size for f in out.iterdir()), "bytes", flush=True)


@torch.no_grad()
def clear(model, batch):
    """The least margin of a model, 0 where it says too little."""
    tokens, logits = steps(model, lambda: model.generate(**batch))
    rows = int(model._get_subsampling_output_length(batch["attention_mask"].sum(-1))[0])
    enough = len({t for t, _ in tokens}) > 6 and rows / 5 < len(tokens) < 1.2 * rows
    # From the beginning to the end.
    enough = enough and all(any(rows * n <= 4 * at < rows * (n + 1) for _, at in tokens) for n in range(4))
    return margin(logits) if enough else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--draws", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tok = tokenizer()
    samples = soundfile.read(args.fixtures / "silero" / "clip.flac", dtype="float32")[0][:SAMPLES]
    for kind in [args.only] if args.only else KINDS:
        out, batch, best = (args.out or args.fixtures) / kind, exact(kind, samples), (0.0, 0)
        for seed in range(args.first, args.first + args.draws):
            model = build(kind, tok, seed)
            balance(model, batch)
            best = max(best, (clear(model, batch), seed))
        model = build(kind, tok, best[1])
        balance(model, batch)
        save(model, kind, tok, out)
        record(out, kind, tok, best[1], samples)


if __name__ == "__main__":
    main()
