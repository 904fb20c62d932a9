"""Trains a toy checkpoint until greedy decoding is unambiguous, and writes it with its goldens. See README.md."""

import argparse
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import chatml
import corpus
import goldens

transformers.utils.logging.disable_progress_bar()

# One line per family: the config class and the causal-LM class of `transformers`.
FAMILIES = {"qwen35": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM)}
IGNORE = -100


def sequences(tok, seed):
    """(ids, labels) of everything to learn. User text is context, not a target."""
    end = tok.token_to_id("<|endoftext|>")
    out = []
    for text in corpus.paragraphs(seed):
        ids = tok.encode(text).ids + [end]
        out.append((ids, ids))
    for chat in corpus.CHATS:
        for thinking in (None, False):
            for turns in range(1, len(chat["turns"]) + 1):
                prompt = chatml.render(chatml.conversation(chat, turns, last_answer=False), thinking=thinking)
                head = tok.encode(prompt).ids
                answer = tok.encode(chat["turns"][turns - 1][1] + "<|im_end|>").ids
                out.append((head + answer, [IGNORE] * len(head) + answer))
    return out


def batches(seqs, rng, size):
    """Random batches of similar length, for ever."""
    order = sorted(range(len(seqs)), key=lambda i: len(seqs[i][0]))
    groups = [order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]]
    while True:
        epoch = []
        for group in groups:
            group = rng.sample(group, len(group))
            epoch += [group[i : i + size] for i in range(0, len(group), size)]
        rng.shuffle(epoch)
        for rows in epoch:
            width = max(len(seqs[i][0]) for i in rows)
            ids = torch.tensor([seqs[i][0] + [0] * (width - len(seqs[i][0])) for i in rows])
            labels = torch.tensor([seqs[i][1] + [IGNORE] * (width - len(seqs[i][1])) for i in rows])
            yield ids, labels


@torch.no_grad()
def scatter(model):
    """Starts the scalars of each layer apart from their defaults, and the decays slow, so that mistakes with them show."""
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.uniform_(math.log(0.02), math.log(2.0))
        elif name.endswith("dt_bias"):
            p.uniform_(-2.0, 0.5)
        elif name.endswith("norm.weight"):
            p.add_(0.15 * torch.randn_like(p))


def fit(model, seqs, seed, steps, lr, batch=16, warmup=20):
    """AdamW, cosine learning rate, f32, no cache: the chunked delta rule. Padding is on the right, so causality hides it."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.98))
    feed = batches(seqs, random.Random(seed), batch)
    model.train()
    start = time.time()
    for step in range(steps):
        scale = min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in opt.param_groups:
            group["lr"] = lr * max(scale, 0.01)
        ids, labels = next(feed)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=IGNORE)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 50 == 0 or step + 1 == steps:
            print(f"  step {step:4d}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)
    model.eval()


def save(model, tok, spec, out):
    """Writes the checkpoint as `transformers` does, rounded to its storage type."""
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    dtype = getattr(torch, spec["dtype"])
    stored = type(model)(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(dtype)
    for name, p in stored.named_parameters():
        if any(name.endswith(k) for k in spec["keep_f32"]):
            p.data = dict(model.named_parameters())[name].data.clone()
    stored.config.dtype = dtype
    ends = [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]
    stored.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    stored.save_pretrained(out, max_shard_size=spec["max_shard_size"])
    if spec.get("layout") == "published":
        publish(out, dtype)
    chatml.write_tokenizer(tok, out, spec["model"]["max_position_embeddings"])


def publish(out, dtype):
    """Rewrites a text checkpoint in the layout of the multimodal ones, with a few tensors that a text reader must skip."""
    text = json.loads((out / "config.json").read_text())
    extra = {"model.visual.pos_embed.weight": torch.zeros(4, 8, dtype=dtype), "mtp.norm.weight": torch.zeros(8, dtype=dtype)}
    rename = lambda n: "model.language_model." + n.removeprefix("model.") if n.startswith("model.") else n
    for file in sorted(out.glob("model*.safetensors")):
        save_file({rename(n): t for n, t in load_file(file).items()} | extra, file, metadata={"format": "pt"})
        extra = {}
    index = out / "model.safetensors.index.json"
    if index.exists():
        value = json.loads(index.read_text())
        value["weight_map"] = {rename(n): f for n, f in value["weight_map"].items()}
        first = min(value["weight_map"].values())
        value["weight_map"] |= {"model.visual.pos_embed.weight": first, "mtp.norm.weight": first}
        index.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    version = text.pop("transformers_version")
    text.pop("architectures")
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"], "transformers_version": version,
    }
    (out / "config.json").write_text(json.dumps(nested, indent=2) + "\n")


def produce(family, spec, seed, steps, out, margin, lr):
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    started = time.time()
    texts = corpus.paragraphs(seed) + [m for c in corpus.CHATS for t in c["turns"] for m in t]
    tok = chatml.train_tokenizer(texts, spec["tokenizer_size"], spec["split"])
    config_class, model_class = FAMILIES[family]
    end = tok.token_to_id("<|endoftext|>")
    config = config_class(**spec["model"], eos_token_id=end, pad_token_id=end)
    config._attn_implementation = "eager"
    model = model_class(config)
    scatter(model)
    count = sum(p.numel() for p in model.parameters())
    seqs = sequences(tok, seed)
    print(f"{spec['name']}: {count} parameters, {len(seqs)} sequences, longest {max(len(s[0]) for s in seqs)} tokens", flush=True)
    for attempt in range(3):
        fit(model, seqs, seed + attempt, steps if attempt == 0 else steps // 2, lr if attempt == 0 else lr / 3)
        save(model, tok, spec, out)
        found = goldens.write(spec["name"], out, seed)
        print(f"  least margin {found['margin']:.3f} logits in case {found['where']}, {time.time() - started:.0f} s", flush=True)
        if found["margin"] >= margin and found["learned"]:
            break
    else:
        raise SystemExit(f"{spec['name']}: least margin {found['margin']:.3f} < {margin}, or text not learned: {found['missed']}")
    for f in out.iterdir():
        f.chmod(0o644)
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"  {out.name}: {size} bytes; cached, stepped and uncached logits differ by at most {found['drift']:.2e}")


def draw(seed):
    """A random valid configuration, with at least one layer of each kind."""
    rng = random.Random(seed)
    layers = rng.randint(3, 7)
    while True:
        kinds = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
        if len(set(kinds)) == 2:
            break
    kv = rng.choice([1, 2, 3])
    keys = rng.choice([1, 2, 3, 4])
    key_dim, value_dim = rng.sample([12, 16, 20, 24, 28, 32], 2)
    while True:
        head_dim, fraction = rng.choice([16, 24, 32, 40, 48]), rng.choice([0.25, 0.5, 0.75, 1.0])
        rotary = int(head_dim * fraction)
        if rotary % 2 == 0 and rotary >= 4:
            break
    half = rotary // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    size = rng.randint(401, 499)
    dtype = rng.choice(["bfloat16", "float16", "float32"])
    return {
        "name": f"qwen35-unseen-{seed}",
        "tokenizer_size": size,
        "split": rng.choice(sorted(chatml.SPLIT)),
        "dtype": dtype,
        "keep_f32": ["linear_attn.A_log", "linear_attn.norm.weight"] if dtype == "bfloat16" and rng.random() < 0.5 else [],
        "layout": rng.choice(["text", "published"]),
        "max_shard_size": rng.choice(["10MB", "700KB"]),
        "model": {
            "vocab_size": size + rng.choice([0, 0, 3, 10]),
            "hidden_size": rng.choice([112, 128, 136, 144, 160]),
            "intermediate_size": rng.choice([152, 192, 232, 264]),
            "num_hidden_layers": layers,
            "layer_types": kinds,
            "num_attention_heads": kv * rng.choice([1, 2, 3]),
            "num_key_value_heads": kv,
            "head_dim": head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rng.choice([10000.0, 1000000.0, 10000000.0]),
                "partial_rotary_factor": fraction,
                "mrope_interleaved": True,
                "mrope_section": section,
            },
            "linear_num_key_heads": keys,
            "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim,
            "linear_conv_kernel_dim": rng.choice([3, 4, 4]),
            "max_position_embeddings": rng.choice([256, 288, 384]),
            "tie_word_embeddings": rng.random() < 0.5,
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    for family in FAMILIES:
        p = sub.add_parser(family, help=f"train {family} from a configuration file")
        p.add_argument("--config", type=Path, required=True)
    sub.add_parser("unseen", help="train qwen35 from a configuration drawn from the seed")
    for p in sub.choices.values():
        p.add_argument("--out", type=Path, required=True)
        p.add_argument("--seed", type=int, required=True)
        p.add_argument("--steps", type=int, default=200)
        p.add_argument("--lr", type=float, default=4e-3)
        p.add_argument("--margin", type=float, default=2.0, help="least top-1 margin over all golden steps, in logits")
        p.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.command == "unseen":
        family, spec = "qwen35", draw(args.seed)
        print(json.dumps(spec, indent=1))
    else:
        family, spec = args.command, json.loads(args.config.read_text())
    produce(family, spec, args.seed, args.steps, args.out, args.margin, args.lr)


if __name__ == "__main__":
    main()
