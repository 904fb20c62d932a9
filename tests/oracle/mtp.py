"""Trains a drafting head (MTP) for a Qwen3.5 fixture, alone, on what the fixture has learnt, and writes its tensors and goldens. See README.md."""

import argparse
import copy
import json
import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

import train
import training
from styles import STYLES

# As published checkpoints name the parts of `MtpLayer`.
NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "mtp_block.": "mtp.layers.0.",
    "post_norm.": "mtp.norm.",
}
# The positions of a case whose drafts are goldens, and how many draft tokens each.
STEPS, DRAFTS = 6, 2


class Head(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        config._attn_implementation = "eager"
        self.layer = MtpLayer(config, Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 0)
        self.shared = [model]

    def forward(self, hidden, tokens):
        """Hidden states, and the token behind each: hidden states of the tokens after."""
        model, (batch, width) = self.shared[0], tokens.shape
        embeds = model.get_input_embeddings()(tokens)
        positions = torch.arange(1, width + 1)[None].expand(batch, -1)
        mask = torch.full((width, width), float("-inf")).triu(1)[None, None]
        rope = model.model.rotary_emb(embeds, position_ids=positions)
        return self.layer(embeds, hidden, rope, mask, positions, None)

    def logits(self, hidden):
        return self.shared[0].lm_head(hidden)


def fit(model, head, seqs, seed, steps, lr):
    # The model does not change: its hidden states are made once.
    texts = [ids for ids, _ in seqs if len(ids) > 4]
    with torch.no_grad():
        states = [model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in texts]
    rng = random.Random(seed)

    def learn(_):
        rows = rng.sample(range(len(texts)), 8)
        pad = lambda values, fill: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
        ids = pad([torch.tensor(texts[row]) for row in rows], 0)
        labels = pad([torch.tensor(texts[row]) for row in rows], training.IGNORE)
        hidden = pad([states[row] for row in rows], 0.0)
        loss, total = 0, []
        for draft in range(DRAFTS):
            # Of pair i: the hidden state of i and the token at i + 1 predict the one at i + 2.
            hidden = head(hidden[:, :-1], ids[:, 1 + draft :])
            target = F.pad(labels, (0, 1), value=training.IGNORE)[:, 2 + draft :]
            logits = head.logits(hidden)
            part = F.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=training.IGNORE
            )
            loss, total = loss + part, total + [f"{part.item():.3f}"]
        loss.backward()
        return " ".join(total)

    training.fit(head, learn, steps, lr)


@torch.no_grad()
def drafts(model, head, ids, count):
    """Greedy draft tokens behind `ids`, whose last token the model has not consumed, and their logits."""
    hidden = model.model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state
    tokens, out, logits = list(ids[1:]), [], []
    for _ in range(count):
        given = head(hidden, torch.tensor([tokens]))
        logits.append(head.logits(given[0, -1]))
        out.append(int(logits[-1].argmax()))
        tokens.append(out[-1])
        # The head's own state goes on; those of the text stay.
        hidden = torch.cat([hidden, given[:, -1:]], dim=1)
    return out, torch.stack(logits)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().requires_grad_(False)
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    goldens = json.loads((args.model / "goldens.json").read_text())
    head = Head(model)
    for name, p in head.named_parameters():
        torch.nn.init.zeros_(p) if "norm" in name else torch.nn.init.normal_(p, std=0.05)
    fit(model, head, train.sequences(tok, goldens["seed"], STYLES["qwen"]), args.seed, args.steps, 4e-3)

    state = {name: value.to(torch.bfloat16).contiguous() for name, value in head.layer.state_dict().items()}
    head.layer.load_state_dict({name: value.float() for name, value in state.items()})
    head.eval()
    renamed = {new + name[len(old) :]: v for name, v in state.items() for old, new in NAMES.items() if name.startswith(old)}
    assert len(renamed) == len(state), sorted(state)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(renamed, args.out / "mtp.safetensors", metadata={"format": "pt"})

    cases, tensors, right, tried = [], {}, [0] * DRAFTS, 0
    for case in goldens["cases"][:4]:
        ids = case["prompt_ids"] + case["output_ids"]
        first, found = len(case["prompt_ids"]), []
        for step in range(len(case["output_ids"]) - DRAFTS):
            # Behind output token `step`, which the model has chosen and not consumed.
            tokens, logits = drafts(model, head, ids[: first + step + 1], DRAFTS)
            after = case["output_ids"][step + 1 :]
            tried += 1
            for n in range(DRAFTS):
                right[n] += tokens[: n + 1] == after[: n + 1]
            if step < STEPS:
                found.append(tokens)
                tensors.setdefault(case["id"], []).append(logits)
        cases.append({"id": case["id"], "drafts": found})
    tensors = {name: torch.stack(value) for name, value in tensors.items()}
    save_file(tensors, args.out / "goldens.safetensors")
    value = {
        "schema": "qhx-goldens-mtp/1",
        "model": goldens["model"],
        "transformers": transformers.__version__,
        "seed": args.seed,
        "accepted": [round(n / tried, 4) for n in right],
        "cases": cases,
    }
    (args.out / "goldens.json").write_text(json.dumps(value, indent=1) + "\n")
    print("right", right, "of", tried)


if __name__ == "__main__":
    main()
