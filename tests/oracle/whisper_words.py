"""Times of words: what `transformers` finds of the clips of the Whisper tiny model, and how it puts tokens together to words.

    python whisper_words.py ../fixtures/whisper-tiny

Writes `alignment_heads` into generation_config.json, and words.json.
"""

import json
import sys
import wave
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer, pipeline
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from goldens import dump
from whisper import LIMIT, RATE, Speech, Windows

# [layer, head]; those of the last layer that follow the audio best, and one of the first.
HEADS = [[0, 0], [1, 0], [1, 2]]
TEXTS = [
    ("english", " It isn't twenty-one, is it? \"Yes\" (no) – “maybe”... ¿Qué?"),
    ("english", " naïve café 🚤 ends."),
    ("japanese", "東京は夜、雨。"),
]


@torch.no_grad()
def main():
    out = Path(sys.argv[1])
    path = out / "generation_config.json"
    config = json.loads(path.read_text())
    config["alignment_heads"] = HEADS
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    tok = WhisperTokenizer.from_pretrained(out)
    model = WhisperForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    features = WhisperFeatureExtractor.from_pretrained(out)
    speech = Speech(tok, model.config.num_mel_bins)
    hear = pipeline("automatic-speech-recognition", model=model, tokenizer=tok, feature_extractor=features)
    cases = []
    for name, language in (("two", "en"), ("one", "de"), ("long", "en")):
        with wave.open(str(out / f"{name}.wav")) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768.0
        asked = {"language": language, "task": "transcribe", "max_new_tokens": LIMIT, "num_beams": 1}
        with Windows(model, speech, samples):
            heard = hear({"raw": samples, "sampling_rate": RATE}, return_timestamps="word", generate_kwargs=asked)
        words = [[word["text"].strip(), *word["timestamp"]] for word in heard["chunks"]]
        print(name, words)
        cases.append({"clip": f"{name}.wav", "language": language, "words": words})
    merged = []
    for language, text in TEXTS:
        ids = tok(text, add_special_tokens=False).input_ids
        words, _, places = _combine_tokens_into_words(tok, ids, language)
        merged.append({"spaces": language == "english", "ids": ids, "words": [[w, len(p)] for w, p in zip(words, places)]})
        print([w for w in words])
    dump(out / "words.json", {"transformers": transformers.__version__, "cases": cases, "merged": merged})
    (out / "words.json").chmod(0o644)


if __name__ == "__main__":
    main()
