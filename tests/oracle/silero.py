"""Speech by espeak-ng among silence, clicks and noise, what Silero VAD 6.2.3 says of each 512 samples of it, and the speech
that its `get_speech_timestamps` finds by several rules. Writes the weights, too, which `qhx-media` links in: those of the
package's `silero_vad.jit` for 16 kHz. Those of its `silero_vad_16k.safetensors` are others, by which its probabilities differ
by up to 0.34.

    pip install silero-vad==6.2.3 --no-deps; apt-get install espeak-ng
    python silero.py FIXTURES WEIGHTS
"""

import argparse
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import soundfile
import torch
from safetensors.torch import save_file
from silero_vad.utils_vad import OnnxWrapper, get_speech_timestamps, init_jit_model
import silero_vad

RATE = 16_000
RULES = [
    {},
    {"threshold": 0.3, "speech_pad_ms": 120},
    {"threshold": 0.7, "neg_threshold": 0.2, "min_silence_duration_ms": 400},
    {"min_speech_duration_ms": 900, "min_silence_duration_ms": 60, "speech_pad_ms": 200},
    {"min_silence_duration_ms": 500, "speech_pad_ms": 200},
]


PARTS = {
    "_model.decoder.rnn.": "lstm_cell.",
    "_model.decoder.decoder.2.": "final_conv.",
    **{f"_model.encoder.{n}.reparam_conv.": f"conv{n + 1}." for n in range(4)},
}


def weights(model):
    """The tensors under the names that they have in the package's `TinySileroVAD`. The transform is computed."""
    found = {}
    for name, values in model.state_dict().items():
        for prefix, part in PARTS.items():
            if name.startswith(prefix):
                found[part + name.removeprefix(prefix)] = values.contiguous()
    assert len(found) == 14, list(found)
    return found


def say(text, voice="en", speed=160):
    wave = subprocess.run(["espeak-ng", "-v", voice, "-s", str(speed), "--stdout", text], check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(wave), dtype="float32")
    places = np.arange(int(len(samples) * RATE / rate)) * rate / RATE
    return np.interp(places, np.arange(len(samples)), samples).astype(np.float32)


def clip():
    random = np.random.default_rng(5)
    silence = lambda seconds: np.zeros(int(seconds * RATE), np.float32)
    noise = lambda seconds, level: (level * random.standard_normal(int(seconds * RATE))).astype(np.float32)
    click = silence(0.02)
    click[:8] = 0.9
    parts = [
        silence(0.7), say("The boat leaves at noon."), silence(0.35), say("Yes.", speed=220), silence(1.3), click, silence(0.4),
        noise(0.8, 0.05), say("Rain comes before the night, and wind behind it.", "en+f3"), noise(0.6, 0.02), silence(0.9),
        say("Stop", speed=300), silence(0.15), say("now", speed=300),
    ]
    samples = np.concatenate(parts)
    # A remainder of no whole chunk at the end.
    return samples[: len(samples) // 512 * 512 + 77]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("weights", type=Path)
    args = parser.parse_args()
    out = args.fixtures / "silero"
    out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    soundfile.write(out / "clip.flac", clip(), RATE, subtype="PCM_16")
    samples = torch.from_numpy(soundfile.read(out / "clip.flac", dtype="float32")[0])
    data = Path(silero_vad.__file__).parent / "data"
    model = init_jit_model(data / "silero_vad.jit")
    save_file(weights(model), args.weights, metadata={"format": "pt"})
    model.reset_states()
    padded = torch.nn.functional.pad(samples, (0, -len(samples) % 512))
    with torch.no_grad():
        found = [model(chunk, RATE).item() for chunk in padded.split(512)]
    other = OnnxWrapper(str(data / "silero_vad_16k_op15.onnx"), force_onnx_cpu=True).audio_forward(samples[None], RATE)[0]
    print("largest difference of jit and onnx:", float((torch.tensor(found) - other).abs().max()))
    cases = []
    for rules in RULES:
        spans = get_speech_timestamps(samples, model, sampling_rate=RATE, **rules)
        cases.append({"rules": rules, "speech": [[span["start"], span["end"]] for span in spans]})
        print(rules, cases[-1]["speech"])
    goldens = {"silero_vad": "6.2.3", "samples": len(samples), "probabilities": [round(one, 6) for one in found], "cases": cases}
    text = json.dumps(goldens, indent=1)
    lines = text.split('"probabilities": [')
    head, rest = lines[1].split("]", 1)
    numbers = " ".join(head.split())
    (out / "goldens.json").write_text(f'{lines[0]}"probabilities": [{numbers}]{rest}\n')
    print(len(samples) / RATE, "s")


if __name__ == "__main__":
    main()
