"""The Parakeet tiny models: trains checkpoints with a CTC head and with a transducer on words that are chords, draws one of
other shapes, and records goldens by `transformers`.

    python parakeet.py FIXTURES [--seed N] [--steps N] [--record]

The clips are those of `whisper-tiny`, see `whisper.py`.
"""

import argparse
import random
import shutil
import wave
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig, ParakeetCTCConfig, ParakeetEncoderConfig, ParakeetFeatureExtractor, ParakeetForCTC, ParakeetForRNNT,
    ParakeetForTDT, ParakeetRNNTConfig, ParakeetTDTConfig,
)

import goldens
import training
from whisper import RATE, WORDS, talk

# Seconds of a row.
ROW = 0.08
# Windows of long audio, in rows: the whole, and what on either side only gives context.
WINDOW, CONTEXT = 25, 2
KINDS = {
    "parakeet-ctc-tiny": (ParakeetCTCConfig, ParakeetForCTC),
    "parakeet-tdt-tiny": (ParakeetTDTConfig, ParakeetForTDT),
    "parakeet-unseen": (ParakeetRNNTConfig, ParakeetForRNNT),
}


def tokenizer():
    """Pieces of words, `▁` before a word, and the blank last."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    words = [w for some in WORDS.values() for w in some]
    trainer = trainers.BpeTrainer(vocab_size=100, show_progress=False, special_tokens=["<unk>", "<pad>"])
    tok.train_from_iterator([" ".join(random.Random(i).sample(words, 6)) for i in range(200)], trainer)
    tok.add_special_tokens(["<blank>"])
    return tok


def example(tok, seed):
    """Samples of up to 2.4 s, and the tokens of the words, each with the row at which it is said."""
    rng = random.Random(seed)
    language = rng.choice(["en", "de"])
    if rng.random() < 0.05:
        return 0.003 * np.random.default_rng(seed).standard_normal(rng.randint(4000, 32000)).astype(np.float32), []
    samples, parts = talk(rng.uniform(0.6, 2.4), seed, language)
    tokens = []
    for start, end, words in parts:
        each = (end - start) / len(words)
        for place, word in enumerate(words):
            ids = tok.encode(word).ids
            for index, token in enumerate(ids):
                row = int((start + each * (place + index / len(ids)) + 0.04) / ROW)
                tokens.append((token, max(row, tokens[-1][1] + 1 if tokens else 0)))
    rows = -(-(len(samples) // 160) // 8)
    return samples, [t for t in tokens if t[1] < rows]


def path(tokens, rows, blank):
    """Steps of a transducer along the rows: the row, tokens before, the token, and how many rows it lasts."""
    steps, at = [], 0
    for count, (token, row) in enumerate(tokens + [(None, rows)]):
        while at < row:
            lasts = min(4, row - at)
            steps.append((at, count, blank, lasts))
            at += lasts
        if token is not None:
            following = tokens[count + 1][1] if count + 1 < len(tokens) else rows
            lasts = min(2, following - row)
            steps.append((at, count, token, lasts))
            at += lasts
    return steps


def build(kind, tok, seed):
    torch.manual_seed(seed)
    vocab, blank = tok.get_vocab_size(), tok.token_to_id("<blank>")
    encoder = dict(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, conv_kernel_size=5,
        subsampling_conv_channels=12, num_mel_bins=80, max_position_embeddings=500, dropout=0.0, layerdrop=0.0,
        activation_dropout=0.0, attention_dropout=0.0,
    )
    if kind == "parakeet-unseen":
        encoder |= dict(
            hidden_size=40, num_hidden_layers=3, num_attention_heads=2, intermediate_size=56, conv_kernel_size=7,
            subsampling_factor=4, subsampling_conv_channels=6, num_mel_bins=36, attention_bias=False, convolution_bias=False,
            scale_input=False,
        )
    encoder = ParakeetEncoderConfig(**encoder)
    config, model = KINDS[kind]
    extra = {}
    if kind == "parakeet-ctc-tiny":
        extra = dict(pad_token_id=blank)
    elif kind == "parakeet-tdt-tiny":
        extra = dict(decoder_hidden_size=32, num_decoder_layers=2, durations=[0, 1, 2, 3, 4], blank_token_id=blank, pad_token_id=1)
    else:
        extra = dict(decoder_hidden_size=28, num_decoder_layers=1, max_symbols_per_step=3, blank_token_id=blank, pad_token_id=1)
    config = config(vocab_size=vocab, encoder_config=encoder, **extra)
    config._attn_implementation = "eager"
    made = model(config)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.add_(0.1 * torch.randn_like(p))
            elif "bias" in name:
                p.normal_(0, 0.1)
            elif kind == "parakeet-unseen" and p.dim() > 1:
                p.normal_(0, 1.5 / p[0].numel() ** 0.5)
        for name, buffer in made.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        if kind == "parakeet-unseen":
            # Several tokens and blanks, which depend on the tokens before.
            made.decoder.embedding.weight.mul_(3)
            made.decoder.decoder_projector.weight.mul_(4)
            made.joint.head.bias[blank] += 4.0
    return made.eval()


def extractor(kind):
    if kind == "parakeet-unseen":
        return ParakeetFeatureExtractor(feature_size=36, hop_length=128, n_fft=320, win_length=300, preemphasis=0.9)
    return ParakeetFeatureExtractor()


def fit(model, kind, tok, seed, steps, lr, size=16):
    features, blank = extractor(kind), tok.token_to_id("<blank>")
    pool = [example(tok, seed * 1_000_000 + i) for i in range(min(1500, steps * size))]
    rng = random.Random(seed)

    def learn(step):
        rows = rng.sample(pool, size)
        batch = features([np.asarray(r[0]) for r in rows], sampling_rate=RATE, return_tensors="pt")
        lengths = model._get_subsampling_output_length(batch["attention_mask"].sum(-1)).tolist()
        if kind == "parakeet-ctc-tiny":
            logits = model(**batch).logits
            labels = torch.full(logits.shape[:2], training.IGNORE)
            for one, (_, tokens), length in zip(labels, rows, lengths):
                one[:length] = blank
                for (token, row), following in zip(tokens, [t[1] for t in tokens[1:]] + [length]):
                    one[row : row + (2 if following - row > 2 else 1)] = token
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=training.IGNORE)
        else:
            encoded = model.get_audio_features(**batch).pooler_output
            width = max(len(r[1]) for r in rows)
            inputs = torch.tensor([[blank] + [t for t, _ in r[1]] + [0] * (width - len(r[1])) for r in rows])
            predicted = model.decoder(inputs)
            steps = [(i, *step) for i, (r, length) in enumerate(zip(rows, lengths)) for step in path(r[1], length, blank)]
            one, row, count, token, lasts = torch.tensor(steps).T
            logits = model.joint(predicted[one, count], encoded[one, row])
            vocab = model.config.vocab_size
            loss = torch.nn.functional.cross_entropy(logits[:, :vocab], token)
            loss = loss + torch.nn.functional.cross_entropy(logits[:, vocab:], lasts)
        loss.backward()
        return f"{loss.item():.4f}"

    training.fit(model, learn, steps, lr, every=50)


def save(model, kind, tok, out):
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stored = KINDS[kind][1](model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.float16)
    stored.config.dtype = torch.float16
    if kind != "parakeet-ctc-tiny":
        # Durations stand behind the tokens among the logits.
        vocab, durations = model.config.vocab_size, len(getattr(model.config, "durations", []))
        stored.generation_config = GenerationConfig(
            decoder_start_token_id=model.config.blank_token_id, pad_token_id=1,
            suppress_tokens=list(range(vocab, vocab + durations)) or None,
        )
    stored.save_pretrained(out)
    tok.save(str(out / "tokenizer.json"))
    extractor(kind).save_pretrained(out)


class Exact(ParakeetFeatureExtractor):
    """The features in f64: a transform in f32 moves mels of bands that hold next to nothing, and the model's rows by 1e-3."""

    def _torch_extract_fbank_features(self, waveform, device="cpu"):
        torch.set_default_dtype(torch.float64)
        self.mel_filters = self.mel_filters.double()
        found = super()._torch_extract_fbank_features(waveform.double(), device)
        torch.set_default_dtype(torch.float32)
        return found


def clip(fixtures, name):
    with wave.open(str(fixtures / "whisper-tiny" / f"{name}.wav")) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768.0


def margin(rows):
    best = rows.topk(2).values
    return float((best[..., 0] - best[..., 1]).min())


@torch.no_grad()
def ctc(model, batch):
    """Rows of logits of the clip, tokens with the rows where they begin and end."""
    rows = int(model._get_subsampling_output_length(batch["attention_mask"].sum(-1))[0])
    logits = model(**batch).logits[0, :rows]
    best, blank = logits.argmax(-1).tolist(), model.config.pad_token_id
    said = model.generate(**batch)[0, :rows].tolist()
    assert said == best
    tokens, last = [], blank
    for at, token in enumerate(best):
        if token != blank:
            if token == last:
                tokens[-1][2] = at + 1
            else:
                tokens.append([token, at, at + 1])
        last = token
    return {"logits": logits}, tokens, margin(logits)


@torch.no_grad()
def transducer(model, batch):
    """The same of `generate`, with the encoder's rows, the state behind the first token's, and the logits of each step."""
    steps, before = [], model.forward

    def forward(*args, **kwargs):
        out = before(*args, **kwargs)
        steps.append(out.logits[0, -1].clone())
        return out

    encoded = model.get_audio_features(**batch)
    rows = int(encoded.attention_mask.sum())
    model.forward = forward
    made = model.generate(**batch)
    model.forward = before
    logits = torch.stack(steps)
    vocab, blank = model.config.vocab_size, model.config.blank_token_id
    timed = hasattr(model.config, "durations")
    ids, durations = made.sequences[0].tolist()[1:], made.durations[0].tolist()[1:]
    tokens, at = [], 0
    for token, lasts in zip(ids, durations):
        if token != blank:
            tokens.append([token, at, at + (lasts if timed else 1)])
        at += lasts
    worst = margin(logits[:, :vocab])
    if timed:
        worst = min(worst, margin(logits[:, vocab:]))
    return {"encoder": encoded.pooler_output[0, :rows], "logits": logits}, tokens, worst


@torch.no_grad()
def record(fixtures, kind, tok, seed):
    out = fixtures / kind
    model = KINDS[kind][1].from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    features, steps = extractor(kind), ctc if kind == "parakeet-ctc-tiny" else transducer
    exact = Exact(**{k: v for k, v in features.to_dict().items() if not k.startswith("feature_extractor") and k != "processor_class"})

    def batch(samples):
        made = exact(samples, sampling_rate=RATE, return_tensors="pt")
        return {"input_features": made["input_features"].float(), "attention_mask": made["attention_mask"]}

    row = features.hop_length * model.config.encoder_config.subsampling_factor
    tensors, cases, worst = {}, [], 9.0
    for name in ("one", "two") if kind != "parakeet-unseen" else ("one",):
        made = batch(clip(fixtures, name))
        found, tokens, least = steps(model, made)
        worst = min(worst, least)
        if name == "one":
            plain = features(clip(fixtures, name), sampling_rate=RATE, return_tensors="pt")
            tensors["one.mel"] = plain["input_features"][0, :-1].contiguous()
            print("  mels in f32 are off by", float((plain["input_features"] - made["input_features"]).abs().max()))
        tensors |= {f"{name}.{part}": values.float().contiguous() for part, values in found.items()}
        cases.append({"clip": f"{name}.wav", "tokens": tokens, "text": tok.decode([t[0] for t in tokens]), "min_margin": round(least, 4)})
    value = {
        "schema": "qhx-goldens/1", "model": out.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "min_margin": round(worst, 4), "row_seconds": row / RATE, "cases": cases,
    }
    if kind != "parakeet-unseen":
        # Windows that overlap; each gives what begins in its own part.
        samples, tokens, start = clip(fixtures, "long"), [], 0
        while True:
            window = samples[start * row : (start + WINDOW) * row]
            last = (start + WINDOW) * row >= len(samples)
            low, high = start + CONTEXT if start else 0, 10**9 if last else start + WINDOW - CONTEXT
            for token, begin, end in steps(model, batch(window))[1]:
                if low <= start + begin < high:
                    tokens.append([token, start + begin, start + end])
            if last:
                break
            start += WINDOW - 2 * CONTEXT
        value["long"] = {"clip": "long.wav", "tokens": tokens, "text": tok.decode([t[0] for t in tokens])}
    goldens.dump(out / "goldens.json", value)
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)
    print(kind, [(c["text"], c["min_margin"], c["tokens"]) for c in cases], value.get("long", {}).get("text"))
    print(f"  least margin {worst:.4f}; {sum(f.stat().st_size for f in out.iterdir())} bytes", flush=True)
    return worst, cases[0]["tokens"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--record", action="store_true", help="goldens of the checkpoints that are there")
    args = parser.parse_args()
    tok = tokenizer()
    for kind in [args.only] if args.only else KINDS:
        if not args.record:
            model = build(kind, tok, args.seed)
            if kind == "parakeet-tdt-tiny":
                # The encoder goes on from that of the other.
                trained = ParakeetForCTC.from_pretrained(args.fixtures / "parakeet-ctc-tiny", dtype=torch.float32)
                model.encoder.load_state_dict(trained.encoder.state_dict())
            if kind != "parakeet-unseen":
                print(f"{kind}: {sum(p.numel() for p in model.parameters())} parameters, {tok.get_vocab_size()} tokens", flush=True)
                fit(model, kind, tok, args.seed, args.steps, args.lr)
            save(model, kind, tok, args.fixtures / kind)
        worst, tokens = record(args.fixtures, kind, tok, args.seed)
        for seed in range(2, 200):
            if kind != "parakeet-unseen" or args.record or (worst > 0.03 and len({t for t, *_ in tokens}) > 4):
                break
            save(build(kind, tok, seed), kind, tok, args.fixtures / kind)
            worst, tokens = record(args.fixtures, kind, tok, seed)


if __name__ == "__main__":
    main()
