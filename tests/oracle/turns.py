"""Logits of `transformers` at the turns of a conversation of a fixture: behind each prompt, and behind the first token of its
answer. Each is of one forward over all that came before, without a cache.

    turns.py ../fixtures/phimoe-6 sky

writes `turns.safetensors` there: `<conversation>.<turn>` `[2, vocab]` f32."""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


@torch.no_grad()
def main(folder, id):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"
    goldens = json.loads((folder / "goldens.json").read_text(encoding="utf-8"))
    chat = next(chat for chat in goldens["chat"] if chat["id"] == id)
    tensors = {}
    for index, turn in enumerate(chat["turns"]):
        ids = turn["prompt_ids"] + turn["output_ids"][:1]
        rows = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -2:].float()
        assert [int(row.argmax()) for row in rows] == turn["output_ids"][:2], index
        tensors[f"{id}.{index}"] = rows.contiguous()
    save_file(tensors, folder / "turns.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
