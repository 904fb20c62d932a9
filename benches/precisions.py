#!/usr/bin/env python3
"""What narrow weights cost the tiny models of the tests: answers, divergence and perplexity in each precision.

    cargo build -p qhx-cli --features builtin-ops
    python3 benches/precisions.py [--qhx target/debug/qhx] [--folder DIR] [--json FILE]
        [--cpu-activations int16|int8] [TINY ...]

Each tiny model is made for the CPU, whose graphs have the integers of the NPU's. `qhx verify` counts the cases of its
`suite.json` that are answered as `transformers` answered them in full precision. `qhx forge --calibrate` compares the
next tokens with those of f16 weights on the texts of these cases, prompts and answers. Of an encoder the least cosine
of a text's vector to the reference's is given. Nothing is timed, and every run gives the same figures.
"""

import argparse
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures"
#: Options for each column.
FORMS = {
    "w8a16": ["--precision", "w8a16"],
    "w8a16, head f16": ["--precision", "w8a16", "--head", "fp16"],
    "w4a16": ["--precision", "w4a16"],
    "w4a16, head w4": ["--precision", "w4a16", "--head", "w4a16"],
}
#: What the recipes of tiny models that see need to be told.
OPTIONS = {
    "qwen3vl-tiny": ["--image-size", "48"],
    "qwen35-vision": ["--image-patches", "24,32,48"],
}
ENCODERS = ["embed-mistral-tiny"]
#: Tensors of the decoder's layers, and those of them that have no precision or one of their own.
LAYERS = re.compile(r"(?<!visual\.)\blayers\.\d+\.")
KEPT = re.compile(r"tower|visual|audio|expert|router|\.gate\.weight|in_proj_[ab]\.|norm|conv\.conv")


class TinyModel:
    """A checkpoint, and the programs that know its family."""

    def __init__(self, name, qhx, folder, activations):
        self.name, self.qhx, self.folder = name, qhx, folder / name
        self.checkpoint = FIXTURES / name
        self.activations = ["--cpu-activations", activations]
        self.forge = [qhx, "forge", *self.activations]
        self.folder.mkdir(parents=True, exist_ok=True)

    def make(self, label, *options):
        """The bundle of a precision, and what the forge says of it."""
        out = self.folder / label.replace(", ", "-").replace(" ", "-")
        options = [*OPTIONS.get(self.name, []), *options]
        command = [*self.forge, self.checkpoint, "--out", out, "--cpu-only", "--overwrite", "--json"]
        return out, run([*command, *options])

    def answers(self, bundle):
        """Cases of the suite whose tokens are the reference's, and all cases."""
        suite = self.checkpoint / "suite.json"
        command = [self.qhx, "verify", bundle, suite, "--backend", "cpu", "--json", *self.activations]
        cases = run(command, allowed=(0, 1))["cases"]
        return sum(case["exact"] for case in cases), len(cases)

    def texts(self):
        """A file with the prompts of the suite and their answers; what begins with an image is left out."""
        vocab = self.goldens("tokenizer.json")["model"]["vocab"]
        spaces = {number for token, number in vocab.items() if token.startswith("▁")}
        answers = {}
        for case in self.goldens("goldens.json")["cases"]:
            # Some decoders drop the space before the first word of a text.
            dropped = case["output_ids"][0] in spaces and not case["text"].startswith(" ")
            answers[case["id"]] = " " * dropped + case["text"]
        cases = json.loads((self.checkpoint / "suite.json").read_text())["cases"]
        path = self.folder / "texts.jsonl"
        with path.open("w") as file:
            for case in cases:
                if not case.get("images"):
                    file.write(json.dumps(case["prompt"] + answers[case["id"]]) + "\n")
        return path

    def goldens(self, name):
        return json.loads((self.checkpoint / name).read_text())

    def four_bits(self, report):
        """Parts of the layers' weights that have 4 bits in blocks of 32, and with a scale for each row."""
        short = lambda name: name.replace("language_model.", "")
        wider = [weight for context in report["contexts"] for weight in context["wider_weights"]]
        wider = {short(weight["name"]): weight["storage"] for weight in wider}
        sizes = {"blocks": 0, "rows": 0, "int8": 0}
        for path in self.checkpoint.glob("model*.safetensors"):
            for name, tensor in header(path)[0].items():
                if len(tensor["shape"]) == 2 and LAYERS.search(name) and not KEPT.search(name):
                    stored = wider.get(short(name), "blocks")
                    kind = "rows" if "int4" in stored else "blocks" if stored == "blocks" else "int8"
                    sizes[kind] += math.prod(tensor["shape"])
        return {kind: size / sum(sizes.values()) for kind, size in sizes.items()}

    def generator(self):
        """Figures for each form."""
        limits = ["--max-ctx", "200"]
        bundle, _ = self.make("fp16", *limits)
        exact, cases = self.answers(bundle)
        found = {"cases": cases, "fp16": {"exact": exact}}
        for form, options in FORMS.items():
            bundle, report = self.make(form, *limits, *options)
            found[form] = {"exact": self.answers(bundle)[0]}
        found["four"] = self.four_bits(report)
        if self.name in OUTSIDE:
            return found
        # Beside f16 every precision is measured as a whole, and nothing layer by layer.
        texts = ["--calibrate", self.texts(), "--calibrate-tokens", "100000"]
        for head in [], ["--head", "fp16"], ["--head", "w4a16"]:
            measured = self.make("calibrated", *limits, *texts, *head)[1]["calibration"]
            found["tokens"], found["fp16"]["perplexity"] = measured["tokens"], measured["perplexity"]
            for form, options in FORMS.items():
                if options[2:] == head:
                    found[form] |= measured["precisions"][options[1]]
        return found

    def encoder(self):
        """The least cosine to the reference's vectors for each form."""
        goldens = self.goldens("goldens_embed.json")
        path = self.folder / "texts.jsonl"
        with path.open("w") as file:
            for text in goldens["texts"]:
                role = "query" if text["role"] == "query" else "document"
                file.write(json.dumps({"text": text["text"], "role": role}) + "\n")
        expected = tensors(self.checkpoint / "goldens_embed.safetensors")
        found = {}
        for form, options in {"fp16": [], **{form: FORMS[form] for form in ("w8a16", "w4a16")}}.items():
            bundle, _ = self.make(form, "--task", "embed", *options)
            command = [self.qhx, "embed", bundle, "--backend", "cpu", "--json", "--input", path, *self.activations]
            vectors = [json.loads(line)["embedding"] for line in run_text(command).splitlines()]
            pairs = zip(vectors, goldens["texts"], strict=True)
            found[form] = min(cosine(vector, expected[text["id"]]) for vector, text in pairs)
        return found


def run_text(command, allowed=(0,)):
    command = [os.fspath(part) for part in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode not in allowed:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def run(command, allowed=(0,)):
    return json.loads(run_text(command, allowed))


def header(path):
    """Entries of a safetensors file, its bytes, and where data begin in them."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    return entries, data, 8 + length


def tensors(path):
    """Vectors of f32 in a safetensors file."""
    entries, data, start = header(path)
    found = {}
    for name, tensor in entries.items():
        if tensor["dtype"] == "F32":
            first, end = (start + at for at in tensor["data_offsets"])
            found[name] = struct.unpack(f"<{(end - first) // 4}f", data[first:end])
    return found


def cosine(a, b):
    dot = lambda a, b: math.fsum(x * y for x, y in zip(a, b))
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def cell(found):
    """Cases that are equal, KL, perplexity: what is known of them."""
    shown = [str(found["exact"])]
    shown += [f"{found['kl']:.1e}".replace("e-0", "e-")] if "kl" in found else []
    return ", ".join(shown + ([f"{found['perplexity']:.3f}"] if "perplexity" in found else []))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiny_models", nargs="*", metavar="TINY", help="folders of tests/fixtures [default: all trained ones]")
    parser.add_argument("--qhx", type=pathlib.Path, default=ROOT / "target/debug/qhx")
    parser.add_argument("--folder", help="where bundles are made, and kept")
    parser.add_argument("--cpu-activations", choices=["int16", "int8"], default="int16", help="[default: int16]")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    wanted = parser.parse_args()
    trained = [path.parent.name for path in FIXTURES.glob("*/suite.json")]
    tiny_models = wanted.tiny_models or sorted(trained, key=lambda name: ("blocks" not in name, name)) + ENCODERS
    everything = {}
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(wanted.folder or made)
        forms = ["fp16", *FORMS]
        print("| tiny | cases | 4 bits: in blocks, rows | " + " | ".join(forms) + " |")
        print("|---" * (3 + len(forms)) + "|")
        for name in (name for name in tiny_models if name not in ENCODERS):
            found = everything[name] = TinyModel(name, wanted.qhx, folder, wanted.cpu_activations).generator()
            four = found["four"]
            cells = [f"`{name}`", str(found["cases"]), f"{four['blocks']:.0%}, {four['rows']:.0%}".replace("%", " %")]
            cells += [cell(found[form]) for form in forms]
            print("| " + " | ".join(cells) + " |", flush=True)
        for name in filter(ENCODERS.__contains__, tiny_models):
            found = everything[name] = TinyModel(name, wanted.qhx, folder, wanted.cpu_activations).encoder()
            said = ", ".join(f"{form} {least:.6f}" for form, least in found.items())
            print(f"\n`{name}`, least cosine of a vector to the reference's: {said}.")
    if wanted.json:
        wanted.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
