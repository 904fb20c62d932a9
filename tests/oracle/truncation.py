"""What `tokenizers` leaves of texts that are too long, for post-processors of every sort. See README.md."""

import json
from pathlib import Path

from tokenizers import Tokenizer

FIXTURES = Path(__file__).parent.parent / "fixtures"
TEXTS = [
    "",
    "word",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
    "SELECT * FROM users WHERE age > 30;   naïve 🍕🍕",
]


def template(pieces):
    single = [{"Sequence": {"id": "A", "type_id": 0}} if p == "A" else {"SpecialToken": {"id": p, "type_id": 0}} for p in pieces]
    special = {t: {"id": t, "ids": [i], "tokens": [t]} for i, t in [(1, "<s>"), (2, "</s>")] if t in pieces}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


PROCESSORS = {
    "none": None,
    "first": template(["<s>", "A"]),
    "last": template(["A", "</s>"]),
    "around": template(["<s>", "A", "</s>", "</s>"]),
    "bert": {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]},
    "sequence": {"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, template(["A", "</s>"])]},
}


def main():
    document = json.loads((FIXTURES / "embed-mistral-tiny/tokenizer.json").read_text())
    groups = []
    for name, processor in PROCESSORS.items():
        for direction in ["right", "left"]:
            document["post_processor"] = processor
            tokenizer = Tokenizer.from_str(json.dumps(document))
            added = tokenizer.num_special_tokens_to_add(False)
            cases = []
            for text in TEXTS:
                for most in [added + 1, added + 2, 7, 16, 200]:
                    tokenizer.enable_truncation(most, direction=direction)
                    cases.append({"text": text, "max": most, "ids": tokenizer.encode(text).ids})
            groups.append({"name": name, "direction": direction, "post_processor": processor, "cases": cases})
    (FIXTURES / "embed-mistral-tiny/truncation.json").write_text(json.dumps(groups, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
