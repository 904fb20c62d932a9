"""Goldens of published checkpoints, which are not committed: greedy answers with the gap between the two best logits at
each step, some logits of the first step and of a model of the first layers, and vectors of texts.

    real.py text FILE.gguf OUT.json      a language model; with a chat template conversations, too
    real.py vectors FOLDER OUT.json      a text encoder with mean pooling
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

TOKENS = 48
"""Tokens of an answer."""
STRIDE = 997
"""Every so many logits of a first step are recorded, beside the best ones."""

LAYERS = 2
"""Layers of the model that an emulator runs in time."""
SHORT = 3
"""Tokens that it reads."""

TEXTS = {
    "river": "The river rises in the mountains, and on its way to the sea it passes",
    "code": "def fibonacci(n: int) -> int:\n    ",
    "list": "Ingredients for a simple tomato soup:\n- ",
    "french": "La bibliothèque de la ville est ouverte le samedi, mais",
    "numbers": "The squares of the first ten numbers are 1, 4, 9,",
    "letter": "Dear Ms. Okafor,\n\nThank you for your letter of 12 March. We are sorry to hear that",
    "long": "Bees live in colonies. " * 12 + "In winter, the bees",
}

CHATS = {
    "capital": ["What is the capital of France?", "And of Italy?"],
    "haiku": ["Write a haiku about a lighthouse."],
    "sum": ["I have 17 apples and give away 5. How many are left?"],
    "python": ["How do I reverse a list in Python?", "Without changing the list, please."],
}

SENTENCES = [
    "A cat sleeps on the warm stones.",
    "SELECT name FROM users WHERE age > 30;",
    "How do I reset my password?",
    "Der Zug nach München fährt um acht Uhr ab.",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Prices rose by 3.5 % in 2023 — the highest rate in years 📈",
]


def answer(model, ids, ends):
    """Greedy tokens behind a prompt with the gap at each step and the second best at ties, and the first logits."""
    tokens, gaps, first, seconds, past = [], [], None, {}, None
    feed = torch.tensor([ids])
    with torch.no_grad():
        for step in range(TOKENS):
            out = model(feed, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1].float()
            best = logits.topk(2)
            gap = (best.values[0] - best.values[1]).item()
            if first is None:
                first = some(logits)
            tokens.append(best.indices[0].item())
            gaps.append(round(gap, 5))
            if gap < 1e-3:
                seconds[str(step)] = best.indices[1].item()
            if tokens[-1] in ends:
                break
            feed = best.indices[:1][None]
    return {"prompt_ids": ids, "output_ids": tokens, "gaps": gaps, "seconds": seconds, "logits": first}


def some(logits):
    """The best logits, and every so many, by token."""
    chosen = sorted(set(logits.topk(8).indices.tolist()) | set(range(0, len(logits), STRIDE)))
    return {str(token): round(logits[token].item(), 5) for token in chosen}


def first_layers(model, ids):
    """Logits behind each token where the model has its first layers alone."""
    model.model.layers = model.model.layers[:LAYERS]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].float()
    return {"layers": LAYERS, "ids": ids, "logits": [some(row) for row in rows]}


def text(file, out):
    load = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **load)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, attn_implementation="eager", **load)
    model.eval()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    goldens = {"texts": [], "chats": []}
    for name, prompt in TEXTS.items():
        found = answer(model, tokenizer(prompt).input_ids, ends)
        goldens["texts"].append({"id": name, "prompt": prompt, "answer": found})
    for name, questions in (CHATS if tokenizer.chat_template else {}).items():
        messages, turns = [], []
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
            found = answer(model, ids, ends)
            reply = tokenizer.decode(found["output_ids"], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": reply})
            turns.append({"user": question, "text": reply, "answer": found})
        goldens["chats"].append({"id": name, "turns": turns})
    goldens["first_layers"] = first_layers(model, tokenizer(TEXTS["river"]).input_ids[:SHORT])
    write(out, goldens)


def vectors(folder, out):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    goldens = []
    for sentence in SENTENCES:
        # As long as sentence_bert_config.json says.
        longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        inputs = tokenizer(sentence, return_tensors="pt", truncation=True, max_length=longest)
        with torch.no_grad():
            rows = model(**inputs).last_hidden_state[0]
        vector = torch.nn.functional.normalize(rows.mean(0), dim=0)
        ids = inputs.input_ids[0].tolist()
        goldens.append({"text": sentence, "ids": ids, "vector": [round(value, 7) for value in vector.tolist()]})
    write(out, goldens)


def write(out, goldens):
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(goldens, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["text", "vectors"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    {"text": text, "vectors": vectors}[arguments.kind](arguments.checkpoint, arguments.out)


if __name__ == "__main__":
    main()
