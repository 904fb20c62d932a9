"""Whisper on minutes of speech with silence in between: `qhx transcribe` beside `generate(return_timestamps=True)` of
`transformers`, segment by segment.

    apt-get install espeak-ng
    python whisper_long.py ../../target/debug/qhx [--minutes N] [--seed N] [--work DIR]

The speech is espeak-ng's, in several voices and speeds, with pauses of up to 9 s. The checkpoint is the tiny one of the
fixtures, whose windows have two seconds: what it writes of words that it never learnt is nonsense, and what is compared
is where each window begins, what its segments are, and which windows are left out as silence. Nothing is recorded: both
run here. Exit code 1 when a segment differs.
"""

import argparse
import difflib
import json
import random
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration

from whisper import LIMIT, RATE, Speech, Windows, write_clip

CHECKPOINT = Path(__file__).parent / "../fixtures/whisper-tiny"
# Those of `qhx transcribe --temperature 0`.
LIMITS = {
    "temperature": (0.0,), "compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6,
}
SENTENCES = [
    "The boat leaves at noon, and whoever comes late waits for the next one.",
    "Bread is baked of flour, water and salt.",
    "It rained all night, and the river stood at the third step in the morning.",
    "Seven letters came in winter. None of them was signed.",
    "Who lives in the house behind the mill?",
    "Turn left at the bridge, then go on until you see a green door.",
    "Nobody had told her that the station was closed.",
    "Paper burns, stone does not.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "That is all. Good night.",
]
VOICES = ["en", "en-us", "en-gb-scotland", "de", "fr"]


def spoken(text, voice, speed, pitch, folder):
    """Samples at `RATE` of what espeak-ng says at its own rate, resampled by their spectrum."""
    file = Path(folder) / "said.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", file, text], check=True)
    with wave.open(str(file)) as said:
        rate, count = said.getframerate(), said.getnframes()
        samples = np.frombuffer(said.readframes(count), "<i2").astype(np.float64) / 32768.0
    wanted = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: wanted // 2 + 1]
    return np.fft.irfft(spectrum, wanted) * (wanted / len(samples))


def speech(seconds, seed, folder):
    """Sentences and pauses over a little noise."""
    rng, parts, total = random.Random(seed), [], 0
    while total < seconds * RATE:
        said = spoken(
            rng.choice(SENTENCES), rng.choice(VOICES), rng.randint(130, 210), rng.randint(30, 70), folder
        ) * rng.uniform(0.3, 0.9)
        pause = np.zeros(int(rng.choice([0.2, 0.5, 1.3, 4.0, 9.0]) * RATE))
        parts += [said, pause]
        total += len(said) + len(pause)
    samples = np.concatenate(parts)[: int(seconds * RATE)]
    return samples + 0.002 * np.random.default_rng(seed).standard_normal(len(samples))


@torch.no_grad()
def reference(samples):
    """Segments by `transformers`, of windows that have the features of their own samples, as qhx has them."""
    model = WhisperForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32, attn_implementation="eager")
    tok = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ears, end = Speech(tok, model.config.num_mel_bins), tok.token_to_id("<|endoftext|>")
    mel = ears.features(samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding=False)["input_features"]
    with Windows(model.eval(), ears, samples):
        made = model.generate(
            mel, attention_mask=torch.ones(1, mel.shape[-1]), language="en", task="transcribe", return_timestamps=True,
            return_segments=True, max_new_tokens=LIMIT, **LIMITS,
        )
    found = [
        (round(float(s["start"]), 2), round(float(s["end"]), 2), tok.decode([i for i in s["tokens"].tolist() if i < end]).strip())
        for s in made["segments"][0]
    ]
    return [segment for segment in found if segment[2]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("qhx", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        clip = work / "speech.wav"
        samples = write_clip(clip, speech(args.minutes * 60, args.seed, folder))
        bundle = work / "bundle"
        if not bundle.exists():
            forge = [args.qhx, "forge", CHECKPOINT, "--out", bundle, "--name", "tiny", "--cpu-only"]
            subprocess.run(forge, check=True, stdout=subprocess.DEVNULL)
        run = [args.qhx, "transcribe", bundle, clip, "--language", "en", "--temperature", "0", "--max-new", str(LIMIT), "--json"]
        sounds = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
        found = [(round(p["start"], 2), round(p["end"], 2), p["text"]) for p in sounds["sounds"][0]["pieces"]]
        expected = reference(samples)
    matcher = difflib.SequenceMatcher(None, expected, found, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    first = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
    pauses = sum(b[0] - a[1] > 1.0 for a, b in zip(expected, expected[1:]))
    print(
        f"{args.minutes:g} min, {len(expected)} segments of transformers, {len(found)} of qhx, {same} the same in words and "
        f"times; {pauses} pauses of more than 1 s"
    )
    if found != expected:
        for name, segments in (("transformers", expected), ("qhx", found)):
            print(f"{name} from {first} on: {segments[first : first + 3]}")
        sys.exit(1)


if __name__ == "__main__":
    main()
