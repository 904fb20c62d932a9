"""The Whisper tiny model: trains a checkpoint on words that are chords, makes its clips, records goldens by `transformers`.

    python whisper.py OUT [--seed N] [--steps N]
    python whisper.py OUT --unseen     # other shapes, English only, drawn weights; clips of ../fixtures/whisper-tiny
"""

import argparse
import json
import random
import shutil
import wave
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import goldens
import training
from training import IGNORE

RATE, HOP, WINDOW = 16000, 160, 2  # seconds
STEP = 0.02
WORDS = {
    "en": "boat bread rain night house river stone green seven letter winter paper".split(),
    "de": "Boot Brot Regen Nacht Haus Fluss Stein Wiese sieben Brief Winter Blatt".split(),
}
LANGUAGES = ["en", "de", "fr"]
SPECIAL = (
    ["<|endoftext|>", "<|startoftranscript|>"] + [f"<|{code}|>" for code in LANGUAGES]
    + ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
)
TIMES = [f"<|{i * STEP:.2f}|>" for i in range(round(WINDOW / STEP) + 1)]
LIMIT, FEW = 28, 12
# Layers, heads and widths of the two halves differ, as in large-v3-turbo.
UNSEEN = {
    "num_mel_bins": 128, "d_model": 40, "encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 5, "encoder_ffn_dim": 72, "decoder_ffn_dim": 56, "max_target_positions": 40,
}


def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    words = [f" {w}" for some in WORDS.values() for w in some]
    trainer = trainers.BpeTrainer(
        vocab_size=340, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tok.train_from_iterator([" ".join(random.Random(i).sample(words, 6)) for i in range(200)], trainer)
    tok.add_special_tokens(SPECIAL)
    tok.add_tokens([AddedToken(time, normalized=False) for time in TIMES])
    one = tok.token_to_id
    tok.post_processor = processors.TemplateProcessing(
        single="<|startoftranscript|> <|notimestamps|> $A <|endoftext|>",
        special_tokens=[(t, one(t)) for t in ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")],
    )
    return tok


def say(word, samples):
    """A chord that glides, under an envelope."""
    own, t = random.Random(word), np.arange(samples) / RATE
    envelope = np.sin(np.pi * np.arange(samples) / samples) ** 0.5
    out = np.zeros(samples)
    for _ in range(4):
        f0, glide = own.uniform(150, 3400), own.uniform(-900, 900)
        out += own.uniform(0.05, 0.16) * envelope * np.sin(2 * np.pi * (f0 * t + glide * t * t / 2))
    return out


def talk(seconds, seed, language, pauses=()):
    """Samples, and the parts that are said: (start, end, words)."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    total, parts = 0.003 * noise.standard_normal(int(seconds * RATE)), []
    at = rng.uniform(0.02, 0.3)
    while True:
        words = rng.choices(WORDS[language], k=rng.choice([1, 2, 2]))
        lengths = [rng.uniform(0.22, 0.32) for _ in words]
        if at + sum(lengths) >= seconds:
            break
        paused = [end for start, end in pauses if at + sum(lengths) > start and at < end]
        if paused:
            at = paused[0]
            continue
        start = at
        for word, length in zip(words, lengths):
            first, count = int(at * RATE), int(length * 0.94 * RATE)
            total[first : first + count] += say(word, count)
            at += length
        parts.append((start, at, words))
        at += rng.uniform(0.06, 0.4)
    return total.astype(np.float32), parts


def write_clip(path, samples):
    data = np.clip(samples * 32767, -32768, 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(data.tobytes())
    return data.astype(np.float32) / 32768.0


class Speech:
    def __init__(self, tok, mels):
        self.tok = tok
        self.features = WhisperFeatureExtractor(feature_size=mels, chunk_length=WINDOW)

    def mel(self, samples):
        return self.features(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]

    def example(self, seed):
        """Features, prompt and answer of a window: times or none, transcribed or translated, silence now and then."""
        rng = random.Random(seed)
        language = rng.choice(["en", "de"])
        silent = rng.random() < 0.06
        samples, parts = talk(WINDOW + 0.6, seed, language)
        first = rng.uniform(0, 0.6)
        # A part that is cut in front is not said, one that is cut behind has no end.
        parts = [(a - first, b - first, w) for a, b, w in parts if a >= first and a - first < WINDOW - 0.12]
        samples = samples[int(first * RATE) :][: WINDOW * RATE]
        if rng.random() < 0.25:
            # A short clip.
            keep = max((b for _, b, _ in parts[: rng.choice([1, 2])]), default=0.5) + 0.04
            samples, parts = samples[: int(keep * RATE)], [p for p in parts if p[1] <= keep]
        if silent:
            samples, parts = 0.003 * np.random.default_rng(seed).standard_normal(len(samples)).astype(np.float32), []
        translate = rng.random() < 0.3
        one = self.tok.token_to_id
        head = [one("<|startoftranscript|>")]
        if not parts:
            return samples, head, [one("<|nospeech|>"), one("<|endoftext|>")]
        head += [one(f"<|{language}|>"), one("<|translate|>" if translate else "<|transcribe|>")]
        times, answer = rng.random() < 0.7, []
        time = lambda t: one(TIMES[min(round(t / STEP), len(TIMES) - 1)])
        for start, end, words in parts:
            words = [WORDS["en"][WORDS[language].index(w)] if translate else w for w in words]
            whole = end <= WINDOW - 0.02
            text = self.tok.encode("".join(f" {w}" for w in words), add_special_tokens=False).ids
            if not whole:
                text = text if times and end <= WINDOW + 0.1 else []
            if not text:
                continue
            answer += ([time(start)] if times else []) + text + ([time(end)] if times and whole else [])
        if not times:
            head.append(one("<|notimestamps|>"))
        answer.append(one("<|endoftext|>"))
        return samples, head, answer


def build(tok, spec):
    one = tok.token_to_id
    config = WhisperConfig(
        vocab_size=tok.get_vocab_size(), decoder_start_token_id=one("<|startoftranscript|>"), bos_token_id=one("<|endoftext|>"),
        eos_token_id=one("<|endoftext|>"), pad_token_id=one("<|endoftext|>"), max_source_positions=round(WINDOW / STEP),
        begin_suppress_tokens=None, suppress_tokens=None, **spec,
    )
    config._attn_implementation = "eager"
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layer_norm" in name and name.endswith("weight"):
                p.add_(0.1 * torch.randn_like(p))
            elif name.endswith(".bias"):
                p.normal_(0, 0.05)
    return model


def draw(tok, seed):
    """A model for English in other shapes, with drawn weights."""
    torch.manual_seed(seed)
    model = build(tok, UNSEEN)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed_positions" not in name:
                p.normal_(0, (1.2 if "encoder." in name else 2.5) / p[0].numel() ** 0.5)
    return model


def fit(model, speech, seed, steps, lr, size=16):
    count = min(4000, steps * size)
    pool, lengths = [], []
    for i in range(count):
        samples, head, answer = speech.example(seed * 1_000_000 + i)
        pool.append((speech.mel(samples)[0], head + answer, [IGNORE] * len(head) + answer if len(head) > 1 else [IGNORE] + answer))
        lengths.append(len(head + answer))
    # The token behind <|startoftranscript|> is learnt, too: the language, or that nobody speaks.
    pool = [(mel, ids, [IGNORE, ids[1], *labels[2:]]) for mel, ids, labels in pool]
    print(f"  {count} windows, longest {max(lengths)} tokens", flush=True)
    assert max(lengths) <= model.config.max_target_positions
    rng, end = random.Random(seed), model.config.eos_token_id

    def learn(step):
        rows = rng.sample(pool, size)
        width = max(len(ids) for _, ids, _ in rows)
        ids = torch.tensor([r[1] + [end] * (width - len(r[1])) for r in rows])
        labels = torch.tensor([r[2] + [IGNORE] * (width - len(r[2])) for r in rows])
        logits = model(input_features=torch.stack([r[0] for r in rows]), decoder_input_ids=ids, use_cache=False).logits
        loss = training.next_token_loss(logits, labels)
        loss.backward()
        return f"{loss.item():.4f}"

    training.fit(model, learn, steps, lr, every=100)


def save(model, tok, out, mels, multilingual=True):
    out.mkdir(parents=True, exist_ok=True)
    stored = WhisperForConditionalGeneration(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.float16)
    stored.config.dtype = torch.float16
    one = tok.token_to_id
    stored.generation_config = GenerationConfig(
        decoder_start_token_id=one("<|startoftranscript|>"), bos_token_id=one("<|endoftext|>"), eos_token_id=one("<|endoftext|>"),
        pad_token_id=one("<|endoftext|>"), max_length=model.config.max_target_positions, is_multilingual=multilingual,
        no_timestamps_token_id=one("<|notimestamps|>"),
        prev_sot_token_id=one("<|startofprev|>"), max_initial_timestamp_index=50, return_timestamps=False,
        begin_suppress_tokens=[tok.encode(" ", add_special_tokens=False).ids[0], one("<|endoftext|>")],
        suppress_tokens=[one(t) for t in ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>")],
        **(dict(
            lang_to_id={f"<|{c}|>": one(f"<|{c}|>") for c in LANGUAGES},
            task_to_id={t: one(f"<|{t}|>") for t in ("transcribe", "translate")},
        ) if multilingual else {}),
    )
    stored.save_pretrained(out)
    tok.save(str(out / "tokenizer.json"))
    if multilingual:
        # As in repositories of 2022 and in many fine-tunes: ids behind <|notimestamps|> are times that nothing spells.
        whole = json.loads((out / "tokenizer.json").read_text())
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] not in TIMES]
        (out / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, indent=2))
    features = WhisperFeatureExtractor(feature_size=mels, chunk_length=WINDOW)
    features.save_pretrained(out)


def cross(model, encoded, layer):
    """Keys and values of a decoder layer for the encoder's rows, in the order of qhx's graphs."""
    attention = model.model.decoder.layers[layer].encoder_attn
    heads = lambda x: x.view(x.shape[1], model.config.decoder_attention_heads, -1)
    return {
        f"cross_k_{layer}": heads(attention.k_proj(encoded)).permute(1, 2, 0).contiguous(),
        f"cross_v_{layer}": heads(attention.v_proj(encoded)).permute(1, 0, 2).contiguous(),
    }


class Windows:
    """`generate` takes its windows from the features of the whole; here each has those of its own samples."""

    def __init__(self, model, speech, samples):
        self.model, self.speech, self.samples = model, speech, samples

    def __enter__(self):
        self.before = self.model._get_input_segment

        def segment(input_features, seek, seek_num_frames, num_segment_frames, cur_bsz, batch_idx_map):
            first = int(seek[0]) * HOP
            return self.speech.mel(self.samples[first : first + num_segment_frames * HOP])

        self.model._get_input_segment = segment

    def __exit__(self, *_):
        self.model._get_input_segment = self.before


@torch.no_grad()
def record(out, seed, tok, spec):
    model = WhisperForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    speech = Speech(tok, spec["num_mel_bins"])
    one, tensors, cases, worst = tok.token_to_id, {}, [], 9.0
    clips = {}
    for name, seconds, number, language, pauses in [
        ("two", 1.93, 7, "en", ()), ("one", 0.71, 3, "de", ()), ("long", 6.4, 11, "en", ((2.3, 4.4),))
    ]:
        clips[name] = write_clip(out / f"{name}.wav", talk(seconds, number, language, pauses)[0])
    whole = lambda name: speech.features(clips[name], sampling_rate=RATE, return_tensors="pt", truncation=False, padding=False)["input_features"]
    for name in ("two", "one"):
        mel = speech.mel(clips[name])
        encoded = model.model.encoder(mel).last_hidden_state
        if name == "one":
            tensors[f"{name}.mel"] = mel[0].T.contiguous()
        if name == "two":
            tensors |= {f"{name}.{part}": rows for part, rows in cross(model, encoded, spec["decoder_layers"] - 1).items()}
        start = model(input_features=mel, decoder_input_ids=torch.tensor([[one("<|startoftranscript|>")]])).logits[0, -1]
        ids = torch.tensor([one(f"<|{c}|>") for c in LANGUAGES])
        found = LANGUAGES[int(start[ids].argmax())]
        silence = float(start.softmax(-1)[one("<|nospeech|>")])
        for task in ("transcribe", "translate"):
            for times in (False, True):
                if task == "translate" and not times:
                    continue
                made = model.generate(
                    mel, language=found, task=task, return_timestamps=times, return_dict_in_generate=True, output_scores=True,
                    output_logits=True, max_new_tokens=LIMIT,  return_segments=False,
                    **({"force_unique_generate_call": True} if times else {}),
                )
                head = [one("<|startoftranscript|>"), one(f"<|{found}|>"), one(f"<|{task}|>")] + ([] if times else [one("<|notimestamps|>")])
                answer = made.sequences[0].tolist()
                answer = answer[len(head) :] if answer[: len(head)] == head else answer
                rows = torch.stack([row[0] for row in made.logits])
                scores = torch.stack([row[0] for row in made.scores])
                best = scores.topk(2).values
                margin = float((best[:, 0] - best[:, 1]).min())
                worst = min(worst, margin)
                id = f"{name}-{task}-{'times' if times else 'none'}"
                tensors[f"{id}.logits"] = rows[:2].float().contiguous()
                cases.append({
                    "id": id, "clip": f"{name}.wav", "language": found, "task": task, "times": times, "prompt_ids": head,
                    "output_ids": answer, "no_speech": silence, "min_margin": round(margin, 4),
                    "text": tok.decode([i for i in answer if i < one("<|endoftext|>")]),
                })
    longs = []
    for id, limits in [
        ("plain", {}), ("limits", {"temperature": (0.0,), "compression_ratio_threshold": 1.35, "logprob_threshold": -0.4, "no_speech_threshold": 0.3}),
    ]:
        mel = whole("long")
        with Windows(model, speech, clips["long"]):
            made = model.generate(
                mel, attention_mask=torch.ones(1, mel.shape[-1]), language="en", task="transcribe", return_timestamps=True,
                return_segments=True, max_new_tokens=LIMIT, **limits,
            )
        longs.append({"id": id, "limits": {k: v for k, v in limits.items() if k != "temperature"}, "segments": [
            {"start": round(float(s["start"]), 2), "end": round(float(s["end"]), 2), "tokens": s["tokens"].tolist(),
             "text": tok.decode([i for i in s["tokens"].tolist() if i < one("<|endoftext|>")])}
            for s in made["segments"][0]
        ]})
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": out.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "min_margin": round(worst, 4), "cases": cases, "long": longs,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    return worst, cases, longs


@torch.no_grad()
def record_unseen(out, seed, tok, fixtures):
    """Rows, logits and tokens of a drawn model; returns the least margin and how many different tokens there are."""
    model = WhisperForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    features = WhisperFeatureExtractor.from_pretrained(out)
    one, tensors, cases, worst, kinds = tok.token_to_id, {}, [], 9.0, set()
    head = [one("<|startoftranscript|>"), one("<|notimestamps|>")]
    for name in ("two", "one"):
        with wave.open(str(fixtures / "whisper-tiny" / f"{name}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768.0
        mel = features(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        if name == "two":
            encoded = model.model.encoder(mel).last_hidden_state
            tensors |= {f"{name}.{part}": rows for part, rows in cross(model, encoded, UNSEEN["decoder_layers"] - 1).items()}
        first = model(input_features=mel, decoder_input_ids=torch.tensor([head[:1]])).logits[0, -1]
        made = model.generate(mel, return_dict_in_generate=True, output_scores=True, output_logits=True, max_new_tokens=FEW)
        answer = made.sequences[0].tolist()
        answer = answer[len(head) :] if answer[: len(head)] == head else answer
        best = torch.stack([row[0] for row in made.scores]).topk(2).values
        margin = float((best[:, 0] - best[:, 1]).min())
        worst, kinds = min(worst, margin), kinds | set(answer)
        tensors[f"{name}.logits"] = torch.stack([row[0] for row in made.logits])[:2].float().contiguous()
        cases.append({
            "id": name, "clip": f"{name}.wav", "language": "en", "prompt_ids": head, "output_ids": answer, "max_new": FEW,
            "no_speech": float(first.softmax(-1)[one("<|nospeech|>")]), "min_margin": round(margin, 4),
        })
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": out.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "min_margin": round(worst, 4), "cases": cases,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    return worst, len(kinds)


def unseen(out, tok):
    """The first seed whose tokens are many and clear."""
    for seed in range(1, 200):
        save(draw(tok, seed), tok, out, UNSEEN["num_mel_bins"], multilingual=False)
        worst, kinds = record_unseen(out, seed, tok, Path(__file__).parent.parent / "fixtures")
        if worst > 0.03 and kinds > 8:
            break
    for file in out.iterdir():
        file.chmod(0o644)
    print(f"seed {seed}: least margin {worst:.4f}, {kinds} tokens; {sum(f.stat().st_size for f in out.iterdir())} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--unseen", action="store_true", help="other shapes and drawn weights")
    parser.add_argument("--record", action="store_true", help="goldens of the checkpoint that is there")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    spec = {
        "num_mel_bins": 80, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_target_positions": 64,
    }
    tok = tokenizer()
    if args.unseen:
        return unseen(args.out, tok)
    if not args.record:
        model = build(tok, spec)
        print(f"{args.out.name}: {sum(p.numel() for p in model.parameters())} parameters, {tok.get_vocab_size()} tokens", flush=True)
        fit(model, Speech(tok, spec["num_mel_bins"]), args.seed, args.steps, args.lr)
        if args.out.exists():
            shutil.rmtree(args.out)
        save(model, tok, args.out, spec["num_mel_bins"])
    worst, cases, longs = record(args.out, args.seed, tok, spec)
    for case in cases:
        print(f"  {case['id']}: {case['language']} {case['text']!r} no speech {case['no_speech']:.3f} margin {case['min_margin']}")
    for long in longs:
        print(f"  long {long['id']}: " + "; ".join(f"{s['start']}-{s['end']}{s['text']}" for s in long["segments"]))
    for file in args.out.iterdir():
        file.chmod(0o644)
    print(f"  least margin {worst:.4f}; {sum(f.stat().st_size for f in args.out.iterdir())} bytes")


if __name__ == "__main__":
    main()
