"""Trains a drafting head (`gemma4_assistant`) for the Gemma 4 tiny model, alone, and writes both forms of its head and goldens. See README.md."""

import argparse
import json
import os
import random
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

import train
import training
from styles import STYLES

# The positions of a case whose drafts are goldens, and how many draft tokens each.
STEPS, DRAFTS = 6, 2
HIDDEN, MLP, HEADS, CLUSTERS, TOP = 44, 92, 4, 70, 24


def assistant(target, ordered):
    text = target.config.text_config
    sliding, full = (
        text.per_layer_config[text.layer_types.index(kind)].head_dim for kind in ("sliding_attention", "full_attention")
    )
    own = transformers.Gemma4TextConfig(
        vocab_size=text.vocab_size, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"], num_attention_heads=HEADS,
        num_key_value_heads=text.num_key_value_heads, head_dim=sliding, global_head_dim=full,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2, use_double_wide_mlp=False,
        sliding_window=text.sliding_window, rope_parameters=text.rope_parameters, rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings, pad_token_id=text.pad_token_id,
        eos_token_id=text.eos_token_id, bos_token_id=text.bos_token_id, final_logit_softcapping=None,
    )
    config = Gemma4AssistantConfig(
        text_config=own, backbone_hidden_size=text.hidden_size, use_ordered_embeddings=ordered, num_centroids=CLUSTERS,
        centroid_intermediate_top_k=TOP,
    )
    config._attn_implementation = "eager"
    return Gemma4AssistantForCausalLM(config)


@torch.no_grad()
def states(target, ids):
    """Hidden states after the final norm, and keys and values of the last layer of each kind that has some."""
    found = target(input_ids=torch.tensor([ids]), use_cache=False, return_shared_kv_states=True, output_hidden_states=True)
    return found.hidden_states[-1], found.shared_kv_states


def seen(count, window):
    """Masks of the query at each position from 1 on: the positions before it, all of them or the last of a window."""
    query, key = torch.arange(1, count)[:, None], torch.arange(count)[None]
    masks = {"full_attention": key < query, "sliding_attention": (key < query) & (key >= query - window)}
    lowest = torch.finfo(torch.float32).min
    return {kind: torch.where(mask, 0.0, lowest)[None, None] for kind, mask in masks.items()}


def fit(target, head, seqs, seed, steps, lr):
    texts = [ids for ids, _ in seqs if len(ids) > 4]
    known = [states(target, ids) for ids in texts]
    embed, window = target.get_input_embeddings(), target.config.text_config.sliding_window
    rng = random.Random(seed)

    def learn(_):
        loss, total = 0, [0.0] * DRAFTS
        for row in rng.sample(range(len(texts)), 6):
            ids, (hidden, shared) = torch.tensor([texts[row]]), known[row]
            count, hidden = ids.shape[1], hidden[:, :-1]
            for draft in range(DRAFTS):
                # At position p the token there and the state before it predict token p + 1; then p + 1 takes its place.
                tokens = F.pad(ids[:, 1 + draft :], (0, draft))
                x = head.pre_projection(torch.cat([embed(tokens), hidden], dim=-1))
                out = head.model(
                    inputs_embeds=x, attention_mask=seen(count, window), position_ids=torch.arange(1, count)[None],
                    shared_kv_states=shared, use_cache=False, output_hidden_states=True,  # of all rows, not the last alone
                ).last_hidden_state
                labels = F.pad(ids[:, 2 + draft :], (0, draft + 1), value=training.IGNORE)
                part = F.cross_entropy(head.lm_head(out)[0], labels[0], ignore_index=training.IGNORE)
                loss, total[draft] = loss + part / 6, total[draft] + part.item() / 6
                hidden = head.post_projection(out)
        loss.backward()
        return " ".join(f"{part:.3f}" for part in total)

    training.fit(head, learn, steps, lr)


@torch.no_grad()
def drafts(target, head, ids, count):
    """As `SinglePositionMultiTokenCandidateGenerator`, behind `ids`, whose last token the model has not consumed: with
    the rows that its caches then have, which are those of the window in sliding layers."""
    window = target.config.text_config.sliding_window
    hidden, shared = states(target, ids[:-1])
    shared = {
        kind: tuple(x[:, :, -window:] if kind == "sliding_attention" else x for x in pair)
        for kind, pair in shared.items()
    }
    hidden, token, tokens, logits = hidden[:, -1:], torch.tensor([[ids[-1]]]), [], []
    for _ in range(count):
        pair = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
        out = head(
            inputs_embeds=pair, position_ids=torch.tensor([[len(ids) - 1]]), shared_kv_states=shared, use_cache=False
        )
        token, hidden = out.logits.argmax(dim=-1), out.last_hidden_state
        tokens.append(int(token))
        logits.append(out.logits[0, -1])
    return tokens, torch.stack(logits)


def save(head, folder):
    folder.mkdir(parents=True, exist_ok=True)
    stored = type(head)(head.config)
    stored.load_state_dict(head.state_dict())
    stored = stored.to(torch.bfloat16)
    stored.config.dtype = torch.bfloat16
    stored.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return type(head).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def record(target, head, goldens, folder, seed):
    cases, tensors, right, tried = [], {}, [0] * DRAFTS, 0
    for case in [c for c in goldens["cases"] if c["id"] in ("france", "long", "hello", "drawn")]:
        ids, first, found = case["prompt_ids"] + case["output_ids"], len(case["prompt_ids"]), []
        for step in range(len(case["output_ids"]) - DRAFTS):
            tokens, logits = drafts(target, head, ids[: first + step + 1], DRAFTS)
            after = case["output_ids"][step + 1 :]
            tried += 1
            for n in range(DRAFTS):
                right[n] += tokens[: n + 1] == after[: n + 1]
            if step < STEPS:
                found.append(tokens)
                tensors.setdefault(case["id"], []).append(logits)
        cases.append({"id": case["id"], "drafts": found})
    save_file({name: torch.stack(value) for name, value in tensors.items()}, folder / "goldens.safetensors")
    value = {
        "schema": "qhx-goldens-mtp/1", "model": goldens["model"], "transformers": transformers.__version__, "seed": seed,
        "accepted": [round(n / tried, 4) for n in right], "cases": cases,
    }
    (folder / "goldens.json").write_text(json.dumps(value, indent=1) + "\n")
    print(folder.name, "right", right, "of", tried, flush=True)


@torch.no_grad()
def cluster(head, plain):
    """The same weights with tokens in clusters: drawn from the seed, the centroid of each the mean of its rows."""
    head.load_state_dict(plain.state_dict(), strict=False)
    order = torch.randperm(plain.lm_head.weight.shape[0])
    head.masked_embedding.token_ordering.copy_(order)
    rows = plain.lm_head.weight[order].view(CLUSTERS, -1, HIDDEN)
    head.masked_embedding.centroids.weight.copy_(rows.mean(dim=1))
    return head


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    target = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    ).eval().requires_grad_(False)
    goldens = json.loads((args.model / "goldens.json").read_text())
    hidden, _ = states(target, goldens["cases"][0]["prompt_ids"])
    head = assistant(target, False)
    for name, p in head.named_parameters():
        torch.nn.init.ones_(p) if "norm" in name else torch.nn.init.normal_(p, std=0.05)
    for name, b in head.named_buffers():
        if name.endswith("layer_scalar"):
            b.uniform_(0.75, 1.15)
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    fit(target, head, train.sequences(tok, goldens["seed"], STYLES["gemma4"]), args.seed, args.steps, 4e-3)
    for ordered, name in ((False, "plain"), (True, "ordered")):
        folder = args.out / name
        if folder.exists():
            shutil.rmtree(folder)
        made = cluster(assistant(target, True), head) if ordered else head
        record(target, save(made, folder), goldens, folder, args.seed)
        for file in folder.iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main()
