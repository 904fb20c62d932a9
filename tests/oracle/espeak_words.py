"""Words of each recogniser on speech by espeak-ng: `qhx transcribe` beside `transformers`, as word error rates.

    apt-get install espeak-ng
    python espeak_words.py ../../target/debug/qhx [--only NAME …] [--published] [--backends cpu npu] [--work DIR]
    python espeak_words.py ../../target/debug/qhx --record     # ../fixtures/espeak: two clips and their words

`qhx` is built by `cargo build -p qhx-cli -p qhx-ops-speech-plugin`.

Clips have 1 to 60 s, one to nine sentences in seven languages with pauses, at 16, 22.05 and 44.1 kHz, one channel or two.
`qhx` reads the file. The reference gets the mean of its channels at 16 kHz: of the tiny checkpoints resampled as
docs/audio.md has it, of the published ones by soxr, which nothing here has anything to do with.

The tiny checkpoints of the fixtures have drawn weights or know other words, so that only the distance of qhx from the
reference says anything. With `--published`, Whisper tiny.en and base and Moonshine base (`published_speech.py`) are
compared too, and both with the text that was spoken. Canary-Qwen, whose reference is NeMo, is compared with
`--only canary-qwen-tiny` where `nemo_toolkit[asr]`, `peft` and `accelerate` are installed. The backend `npu` is
Qualcomm's emulator (`QHX_QNN_HTP`, see CONTRIBUTING.md), for two short clips. The recording through a pipe has to give
the words of the file in each case.

Exit code 1 where a word differs, unless the two best logits at the first token that differs are closer than 1e-4.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
import wave
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
import transformers
from tokenizers import Tokenizer
from transformers import (
    CanaryForConditionalGeneration, MoonshineForConditionalGeneration, Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration, WhisperFeatureExtractor, WhisperForConditionalGeneration,
)

import canary
import goldens
import nemotron
import parakeet
import published_speech

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
RATE = 16_000
# Distance of two logits that rounding decides.
TIE = 1e-4
LONG = [
    ("en", "The boat leaves at noon, and whoever comes late waits for the next one.", 1.5),
    ("en-us", "Bread is baked of flour, water and salt.", 4.0),
    ("en-gb-scotland", "It rained all night, and the river stood at the third step in the morning.", 0.4),
    ("en", "Seven letters came in winter. None of them was signed.", 9.0),
    ("en-us", "Turn left at the bridge, then go on until you see a green door.", 0.2),
    ("en", "Nobody had told her that the station was closed.", 2.5),
    ("en", "One, two, three, four, five, six, seven, eight, nine, ten.", 1.0),
    ("en-us", "Who lives in the house behind the mill? Nobody has lived there for years.", 6.0),
    ("en", "That is all for today. Good night.", 0.8),
]
# Name, rate, channels, the volume of the second channel, and sentences with the pauses behind them.
CLIPS = [
    ("en-1s", 16_000, 1, 1.0, [("en", "Seven letters.", 0.1)]),
    ("en-3s", 22_050, 1, 1.0, [("en-us", "The old man walked to the river in the morning.", 0.2)]),
    ("de-3s", 44_100, 2, 0.5, [("de", "Morgen früh fährt der Zug nach Hamburg.", 0.3)]),
    ("fr-3s", 22_050, 2, 1.0, [("fr", "Le marché ouvre à huit heures le samedi.", 0.2)]),
    ("es-4s", 16_000, 2, 0.0, [("es", "La casa blanca está cerca del puente de piedra.", 0.7)]),
    ("it-4s", 44_100, 1, 1.0, [("it", "Domani andiamo al mare con tutta la famiglia.", 0.2)]),
    ("pl-4s", 22_050, 1, 1.0, [("pl", "Wieczorem czytamy książki przy oknie.", 0.5)]),
    ("nl-4s", 16_000, 1, 1.0, [("nl", "De winkel op de hoek is vandaag gesloten.", 0.5)]),
    ("en-9s", 44_100, 2, 0.8, LONG[:2]),
    ("en-20s", 22_050, 1, 1.0, LONG[1:4]),
    ("en-60s", 16_000, 2, 0.6, LONG),
]
NPU_CLIPS = ("en-1s", "de-3s")


def said(text, voice, folder):
    """Samples and rate of what espeak-ng says."""
    file = Path(folder) / "said.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", file, text], check=True)
    samples, rate = soundfile.read(file, dtype="float64")
    return samples * 0.7, rate


def by_spectrum(samples, rate, wanted):
    """All that is below half of both rates: what a file of that rate would have been recorded as."""
    count = round(len(samples) * wanted / rate)
    spectrum = np.zeros(count // 2 + 1, complex)
    found = np.fft.rfft(samples)
    both = min(len(found), len(spectrum))
    spectrum[:both] = found[:both]
    return np.fft.irfft(spectrum, count) * (count / len(samples))


def make(clip, folder):
    """Writes a clip. Returns its file, its samples at its rate, one channel, and its text."""
    name, rate, channels, second, sentences = clip
    parts = []
    for voice, text, pause in sentences:
        samples, own = said(text, voice, folder)
        parts += [by_spectrum(samples, own, rate), np.zeros(round(pause * rate))]
    one = np.concatenate([np.zeros(rate // 20), *parts])
    one = (one + 2e-4 * np.random.default_rng(1).standard_normal(len(one))).clip(-0.99, 0.99)
    both = np.stack([one, one * second][:channels], 1)
    stored = np.round(both * 32767).astype("<i2")
    file = Path(folder) / f"{name}.wav"
    with wave.open(str(file), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(stored.tobytes())
    return file, (stored / 32768.0).mean(1), " ".join(text for _, text, _ in sentences)


def as_documented(samples, rate):
    """Samples at 16 kHz by the filter of docs/audio.md, in f64."""
    if rate == RATE:
        return samples.astype(np.float32)
    width = max(rate / RATE, 1.0)
    half = math.ceil(math.ceil(64 * width) / 4) * 4
    count = -(-len(samples) * RATE // rate)
    padded = np.pad(samples, (half, 2 * half))
    out = np.zeros(count)
    for block in range(0, count, 4096):
        place = np.arange(block, min(block + 4096, count)) * rate / RATE
        first = np.floor(place).astype(int) - half + 1
        index = first[:, None] + np.arange(2 * half)[None]
        x = index - place[:, None]
        taps = np.sinc(x * 0.955 / width) * np.i0(9.0 * np.sqrt(np.maximum(0, 1 - (x / half) ** 2)))
        taps /= taps.sum(1, keepdims=True)
        out[block : block + len(place)] = (padded[index + half] * taps).sum(1)
    return out.astype(np.float32)


def errors(reference, found):
    """Words that are to be changed, added or dropped."""
    row = list(range(len(found) + 1))
    for i, a in enumerate(reference, 1):
        before, row = row, [i] + [0] * len(found)
        for j, b in enumerate(found, 1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
    return row[-1]


def bare(text):
    """Words without capitals and punctuation, as word error rates of spoken texts are counted; and no numbers in digits."""
    numbers = dict(zip("1 2 3 4 5 6 7 8 9 10".split(), "one two three four five six seven eight nine ten".split()))
    words = "".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split()
    return [numbers.get(word, word) for word in words]


def gaps(logits):
    best = logits.float().topk(2).values
    return [float(gap) for gap in best[:, 0] - best[:, 1]]


class Tiny:
    """A recogniser of the fixtures: `answer(samples)` gives text and the gap of the two best logits at each step."""

    forge, args, language = [], [], None

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.tok = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def load(self, kind, **more):
        return kind.from_pretrained(self.checkpoint, dtype=torch.float32, **({"attn_implementation": "eager"} | more)).eval()

    def whole(self, samples, pieces, manifest):
        """Of audio that may be longer than a window, in the chunks that qhx made of it."""
        found, steps = [], []
        for piece in pieces:
            first, end = (round(piece[at] * RATE) for at in ("start", "end"))
            text, own = self.answer(samples[first:end])
            found.append(text.strip())
            steps += own
        return " ".join(found), steps

    @staticmethod
    def text(sound):
        return " ".join(piece["text"].strip() for piece in sound["pieces"])


class Moonshine(Tiny):
    args = ["-n", "24"]

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.model = self.load(MoonshineForConditionalGeneration)
        self.most = int(self.args[1]) + 1

    def answer(self, samples):
        most = min(int(len(samples) * 6.5 / RATE), self.most)
        made = self.model.generate(
            torch.tensor(samples)[None], max_length=max(most, 2), return_dict_in_generate=True, output_logits=True, do_sample=False,
        )
        ids = made.sequences[0].tolist()[1:]
        return self.tok.decode(ids), gaps(torch.stack([row[0] for row in made.logits]))


class PublishedMoonshine(Moonshine):
    args, language = ["-n", "192"], "en"


class Canary(Tiny):
    args = ["-n", "12", "--language", "en"]

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.model = self.load(CanaryForConditionalGeneration)
        keys = ("feature_size", "hop_length", "n_fft", "win_length", "preemphasis")
        stored = json.loads((checkpoint / "preprocessor_config.json").read_text())
        self.features = parakeet.Exact(**{key: stored[key] for key in keys})

    def answer(self, samples):
        made = self.features(samples, sampling_rate=RATE, return_tensors="pt")
        head = canary.prompt(self.tok, "en", "en", True)
        made = self.model.generate(
            input_features=made["input_features"].float(), attention_mask=made["attention_mask"], do_sample=False,
            decoder_input_ids=torch.tensor([head]), max_new_tokens=int(self.args[1]), return_dict_in_generate=True, output_logits=True,
        )
        return self.tok.decode(made.sequences[0].tolist()[len(head) :]), gaps(torch.stack([row[0] for row in made.logits]))


class Qwen3Asr(Tiny):
    args = ["-n", "12"]

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.model = self.load(Qwen3ASRForConditionalGeneration)
        self.features = Qwen3ASRFeatureExtractor(feature_size=self.model.config.audio_config.num_mel_bins)

    def answer(self, samples):
        made = self.features(samples, sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True)
        features, mask = made["input_features"], made["attention_mask"]
        rows = self.model.model.get_audio_features(features, mask, return_dict=True).pooler_output
        text = (
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>" + "<|audio_pad|>" * len(rows)
            + "<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
        )
        ids = self.tok.encode(text, add_special_tokens=False).ids
        made = self.model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), input_features=features,
            input_features_mask=mask, max_new_tokens=int(self.args[1]), do_sample=False, return_dict_in_generate=True,
            output_logits=True,
        )
        answer = made.sequences[0].tolist()[len(ids) :]
        head = self.tok.token_to_id("<asr_text>")
        if head in answer:
            answer = answer[answer.index(head) + 1 :]
        vocab = self.tok.get_vocab_size()
        return self.tok.decode(answer), gaps(torch.stack([row[0, :vocab] for row in made.logits]))


class CanaryQwen(Tiny):
    """By NeMo, see `canary_qwen.py`."""

    args = ["-n", "12"]

    def __init__(self, checkpoint):
        import canary_qwen

        super().__init__(checkpoint)
        self.work = tempfile.TemporaryDirectory()
        self.by, self.model = canary_qwen, canary_qwen.loaded(checkpoint, Path(self.work.name) / "model")

    def answer(self, samples):
        limit, known = int(self.args[1]), self.tok.get_vocab_size()
        _, _, ids, logits, _ = self.by.answer(self.model, self.checkpoint.name, samples, limit, known)
        return self.tok.decode(ids), gaps(logits)


class Parakeet(Tiny):
    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.kind = checkpoint.name
        self.model = self.load(parakeet.KINDS[self.kind][1])
        features = parakeet.extractor(self.kind)
        self.features = parakeet.Exact(**{
            k: v for k, v in features.to_dict().items() if not k.startswith("feature_extractor") and k != "processor_class"
        })
        self.row = features.hop_length * self.model.config.encoder_config.subsampling_factor / RATE

    def timed(self, samples):
        """Tokens with their times, and gaps."""
        made = self.features(samples, sampling_rate=RATE, return_tensors="pt")
        batch = {"input_features": made["input_features"].float(), "attention_mask": made["attention_mask"]}
        steps = parakeet.ctc if self.kind == "parakeet-ctc-tiny" else parakeet.transducer
        found, tokens, _ = steps(self.model, batch)
        return [(token, at * self.row) for token, at, _ in tokens], gaps(found["logits"][:, : self.model.config.vocab_size])

    def whole(self, samples, pieces, manifest):
        asked = manifest["params"]["transcription"]
        window, (left, right) = (asked[key] for key in ("window", "context"))
        window, left, right = (round(seconds * RATE) for seconds in (window, left, right))
        start, ids, steps = 0, [], []
        while True:
            last = len(samples) <= start + window
            tokens, own = self.timed(samples[start : start + window])
            low = start + left if start else -math.inf
            high = math.inf if last else start + window - right
            # Times are compared in the middle of what they are rounded to.
            ids += [token for token, at in tokens if low <= start + (at + 0.005) * RATE < high]
            steps += own
            if last:
                return self.tok.decode(ids).strip(), steps
            start += window - left - right

    @staticmethod
    def text(sound):
        return sound["text"]


class Nemotron(Parakeet):
    def __init__(self, checkpoint):
        Tiny.__init__(self, checkpoint)
        self.kind = checkpoint.name
        self.model = self.load(nemotron.classes(self.kind)[1], attn_implementation="sdpa")
        # Positions are computed, not looked up: a longer clip needs no other weights.
        for module in self.model.modules():
            if hasattr(module, "max_position_embeddings"):
                module.max_position_embeddings = 10**6
        self.forge = ["--recipe-option", "language=de-DE"] if "35" in self.kind else []

    def whole(self, samples, pieces, manifest):
        batch = nemotron.exact(self.kind, samples)
        tokens, logits = nemotron.steps(self.model, lambda: self.model.generate(**batch))
        return self.tok.decode([token for token, _ in tokens]).strip(), gaps(logits)


class Whisper(Tiny):
    """Windows of the samples' own features, see `whisper.Windows`."""

    args = ["-n", "28", "--temperature", "0"]
    several = True

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.model = self.load(WhisperForConditionalGeneration)
        self.ears = WhisperFeatureExtractor.from_pretrained(checkpoint)
        self.end = self.tok.token_to_id("<|endoftext|>")

    def whole(self, samples, pieces, manifest):
        mel = self.ears(samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding=False)["input_features"]
        steps, before = [], self.model._get_input_segment

        def segment(input_features, seek, seek_num_frames, num_segment_frames, cur_bsz, batch_idx_map):
            first = int(seek[0]) * 160
            return self.ears(samples[first : first + num_segment_frames * 160], sampling_rate=RATE, return_tensors="pt")["input_features"]

        self.model._get_input_segment = segment
        asked = {}
        if self.several:
            # Of the first window, with silence behind the clip.
            first = self.ears(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
            heard = int(self.model.detect_language(first)[0])
            asked = dict(language=self.tok.id_to_token(heard).strip("<|>"), task="transcribe")
        made = self.model.generate(
            mel, attention_mask=torch.ones(1, mel.shape[-1]), return_timestamps=True, return_segments=True,
            max_new_tokens=int(self.args[1]), temperature=(0.0,), compression_ratio_threshold=1.35, logprob_threshold=-1.0,
            no_speech_threshold=0.6, return_dict_in_generate=True, output_scores=True, **asked,
        )
        self.model._get_input_segment = before
        for result in {id(s["result"]): s["result"] for s in made["segments"][0]}.values():
            steps += gaps(torch.stack([row.flatten() for row in result["scores"]]))
        texts = [self.tok.decode([i for i in s["tokens"].tolist() if i < self.end]).strip() for s in made["segments"][0]]
        return " ".join(text for text in texts if text), steps


class UnseenWhisper(Whisper):
    several = False


class PublishedWhisper(Whisper):
    args = ["-n", "224", "--temperature", "0"]


class EnglishWhisper(PublishedWhisper):
    several, language = False, "en"


RECOGNISERS = {
    "whisper-tiny": Whisper, "whisper-unseen": UnseenWhisper, "parakeet-ctc-tiny": Parakeet, "parakeet-tdt-tiny": Parakeet,
    "parakeet-unseen": Parakeet, "moonshine-tiny": Moonshine, "canary-tiny": Canary, "qwen3asr-tiny": Qwen3Asr,
    "nemotron-tiny": Nemotron, "nemotron35-tiny": Nemotron, "nemotron-unseen": Nemotron,
}
# Only when asked for: NeMo has to be installed.
NEMO = {"canary-qwen-tiny": CanaryQwen}
PUBLISHED = {"whisper-tiny.en": EnglishWhisper, "whisper-base": PublishedWhisper, "moonshine-base": PublishedMoonshine}


def transcribed(qhx, bundle, args, file=None, samples=None):
    """Text and report of a file, or of samples through a pipe."""
    raw = None if samples is None else np.round(samples * 32768).clip(-32768, 32767).astype("<i2").tobytes()
    command = [qhx, "transcribe", bundle, file or "-", "--format", "json", *args]
    made = subprocess.run(command, input=raw, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if made.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {made.stderr.decode()}")
    return json.loads(made.stdout)["sounds"][0]


def forged(qhx, kind, checkpoint, out, npu):
    if not out.exists():
        target = ["--target", "v81", "--for-emulator", "--no-measure"] if npu else ["--cpu-only"]
        run = [qhx, "forge", checkpoint, "--out", out, "--name", "model", "--no-golden", *target, *kind.forge]
        made = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if made.returncode:
            sys.exit(f"{run}: {made.stdout.decode()}")
    return json.loads((out / "model.json").read_text())


# Clips of the goldens, of which the test makes a long one.
GOLDEN = [
    ("en", 22_050, 1, 1.0, [("en-us", "Seven letters came in winter.", 0.1)]),
    ("de", 44_100, 2, 0.5, [("de", "Guten Morgen, alle.", 0.1)]),
]
# Times that the first clip is in the long one, each time by another volume and with another pause behind it.
REPEATS = 24


def repeated(stored, rate):
    """Whole numbers of the long clip."""
    parts = []
    for k in range(REPEATS):
        parts += [stored >> (k % 3), np.zeros((3 + 10 * (k % 3)) * rate // 10, "int16")]
    return np.concatenate(parts)


@torch.no_grad()
def record(qhx, work):
    out = FIXTURES / "espeak"
    out.mkdir(exist_ok=True)
    clips = {}
    for clip in GOLDEN:
        stored, rate = soundfile.read(make(clip, work / "clips")[0], dtype="int16", always_2d=True)
        # 12 bits of volume are enough, and the file is smaller.
        stored = (stored >> 4) << 4
        soundfile.write(out / f"{clip[0]}.flac", stored, rate, subtype="PCM_16", compression_level=1.0)
        clips[clip[0]] = (out / f"{clip[0]}.flac", (stored / 32768.0).mean(1), rate)
        if clip[0] == "en":
            long = repeated(stored[:, 0], rate)
            soundfile.write(work / "long.wav", long, rate, subtype="PCM_16")
            clips["long"] = (work / "long.wav", long / 32768.0, rate)
    found = []
    for name, kind in RECOGNISERS.items():
        model, cases = kind(FIXTURES / name), []
        bundle = work / "bundles" / f"{name}-cpu"
        manifest = forged(qhx, model, FIXTURES / name, bundle, False)
        for clip, (file, samples, rate) in clips.items():
            sound = transcribed(qhx, bundle, model.args, file)
            text, steps = model.whole(as_documented(samples, rate), sound["pieces"], manifest)
            cases.append({"clip": clip, "text": text, "min_margin": round(min(steps, default=0.0), 5)})
            print(name, clip, f"{len(text)} characters, {len(steps)} steps, least gap {min(steps, default=0):.1e}", text == model.text(sound))
        options = dict(zip(model.args[::2], model.args[1::2]))
        found.append({
            "model": name, "max_new": int(options.get("-n", 256)), "language": options.get("--language"),
            "recipe_options": dict(option.split("=") for option in model.forge[1::2]), "by_chunk": kind.text is Tiny.text,
            "cases": cases,
        })
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
        "repeats": REPEATS, "recognisers": found,
    })
    for file in out.iterdir():
        file.chmod(0o644)
    print(sum(file.stat().st_size for file in out.iterdir()), "bytes")


@torch.no_grad()
def compare(name, kind, clips, args, work, published):
    """Rows of the table for one recogniser. Returns True where nothing differs."""
    checkpoint = FIXTURES / name if not published else published_speech.checkpoint(name, work / name)
    model, fine = kind(checkpoint), True
    totals = {"cpu": [0, 0, 0, 0, 0], "npu": [0, 0, 0, 0, 0]}
    for backend in args.backends:
        bundle = work / "bundles" / f"{name}-{backend}"
        manifest = forged(args.qhx, model, checkpoint, bundle, backend == "npu")
        total = totals[backend]
        for (clip, rate, *_), (file, samples, spoken) in clips.items():
            if backend == "npu" and clip not in NPU_CLIPS:
                continue
            at_16 = soxr.resample(samples, rate, RATE, "VHQ").astype(np.float32) if published else as_documented(samples, rate)
            sound = transcribed(args.qhx, bundle, model.args, file)
            found = model.text(sound)
            expected, steps = model.whole(at_16, sound["pieces"], manifest)
            wrong, words = errors(expected.split(), found.split()), len(expected.split())
            total[0] += wrong
            total[1] += words
            note = ""
            if published and (model.language is None or clip.startswith("en")):
                text = bare(spoken)
                ours, theirs = (errors(text, bare(words)) for words in (found, expected))
                total[2], total[3], total[4] = total[2] + ours, total[3] + theirs, total[4] + len(text)
                note = f", of the text: qhx {ours} and reference {theirs} of {len(text)}"
            if wrong:
                least = min(steps, default=math.inf)
                note += f"; least gap {least:.1e}\n    qhx:       {found}\n    reference: {expected}"
                fine &= least < TIE
            if backend == "cpu":
                # Both read whole numbers at 16 kHz.
                exact = np.round(at_16 * 32767).clip(-32767, 32767) / 32768.0
                whole = work / "whole.wav"
                soundfile.write(whole, np.round(exact * 32768).astype("int16"), RATE, subtype="PCM_16")
                file_text = transcribed(args.qhx, bundle, model.args, whole)["text"]
                piped = transcribed(args.qhx, bundle, model.args, samples=exact)["text"]
                if piped != file_text:
                    fine = False
                    note += f"\n    file: {file_text}\n    pipe: {piped}"
            print(f"{name:18} {backend} {clip:7} {len(samples) / rate:5.1f} s at {rate}: {wrong} of {words} words differ{note}", flush=True)
        print(f"= {name:18} {backend}: WER of qhx by the reference {wer(total[0], total[1])} ({total[0]} of {total[1]} words)" + (
            f"; by the text: qhx {wer(total[2], total[4])}, reference {wer(total[3], total[4])}" if total[4] else ""
        ), flush=True)
    return fine


def wer(wrong, words):
    return f"{100 * wrong / max(words, 1):.1f} %"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("--only", nargs="+", choices=[*RECOGNISERS, *NEMO, *PUBLISHED])
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--backends", nargs="+", choices=["cpu", "npu"], default=["cpu"])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    args.qhx = args.qhx.resolve()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = (args.work or Path(folder)).resolve()
        (work / "clips").mkdir(parents=True, exist_ok=True)
        if args.record:
            return record(args.qhx, work)
        clips = {clip[:4]: make(clip, work / "clips") for clip in CLIPS}
        fine = True
        for name, kind in (RECOGNISERS | NEMO | PUBLISHED).items():
            published = name in PUBLISHED
            usual = name in RECOGNISERS or published and args.published
            if name in (args.only or ()) or not args.only and usual:
                fine &= compare(name, kind, clips, args, work, published)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
