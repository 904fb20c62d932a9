"""Trains a tiny checkpoint until greedy decoding is unambiguous, and writes it with its goldens. See README.md."""

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
import transformers
from safetensors.torch import load_file, save_file

import chatml
import corpus
import draws
import embed
import goldens
import phimoe
import training
from styles import STYLES
from training import IGNORE

transformers.utils.logging.disable_progress_bar()

# One line per family: the config class and the causal-LM class of `transformers`.
FAMILIES = {
    "qwen35": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "llama3": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "phimoe": (transformers.PhimoeConfig, transformers.PhimoeForCausalLM),
    "embed": (transformers.MistralConfig, transformers.MistralModel),
}

def sequences(tok, seed, style):
    """(ids, labels) of everything to learn. User text is context, not a target."""
    end = tok.token_to_id(style.end_text)
    out = []
    for text in corpus.paragraphs(seed):
        ids = style.encode(tok, text) + [end]
        out.append((ids, ids))
    for chat in corpus.CHATS:
        for thinking in style.thinking:
            for turns in range(1, len(chat["turns"]) + 1):
                prompt = style.render(chatml.conversation(chat, turns, last_answer=False), thinking=thinking)
                head = style.encode_chat(tok, prompt)
                whole = style.encode_chat(tok, prompt + style.answer(chat["turns"][turns - 1][1]))
                assert whole[: len(head)] == head, prompt
                out.append((whole, [IGNORE] * len(head) + whole[len(head) :]))
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
        elif name.endswith(".bias"):
            p.normal_(0, 0.3)


def fit(model, seqs, seed, steps, lr, batch=16, first=True):
    """f32, no cache: the chunked delta rule. Padding is on the right, so causality hides it."""
    feed = batches(seqs, random.Random(seed), batch)

    def learn(step):
        ids, labels = next(feed)
        with phimoe.Margins(model) as margins:
            logits = model(input_ids=ids, use_cache=False).logits
        loss, note = training.next_token_loss(logits, labels), ""
        if margins.scores:
            apart = margins.loss(ids.reshape(-1) != 0, step / steps if first else 1.0)
            note = f"  routing {apart.item():.4f}"
            loss = loss + apart
        loss.backward()
        return f"{loss.item():.4f}{note}"

    training.fit(model, learn, steps, lr)


def save(model, tok, spec, style, out):
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
    ends = style.ends(tok)
    extra = {"bos_token_id": tok.token_to_id(style.bos)} if style.bos else {}
    extra |= {"pad_token_id": ends[-1]} if style.pads else {}
    stored.generation_config = transformers.GenerationConfig(eos_token_id=ends, do_sample=False, **extra)
    stored.save_pretrained(out, max_shard_size=spec["max_shard_size"])
    if spec.get("layout") == "published":
        publish(out, dtype)
    if spec.get("config_keys") == "old":
        old_keys(out, **spec.get("config_extra", {}))
    style.write(tok, out, spec["model"]["max_position_embeddings"])


def old_keys(out, **extra):
    """Rewrites `config.json` with the older key names that most published checkpoints have."""
    value = json.loads((out / "config.json").read_text())
    rope = dict(value.pop("rope_parameters"))
    if "sliding_attention" in rope:
        value["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        value["sliding_window_pattern"] = 1 + value["layer_types"].index("full_attention")
        value.pop("_sliding_window_pattern", None)
        rope = rope["full_attention"]
    value["rope_theta"] = rope.pop("rope_theta")
    value["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    value["torch_dtype"] = value.pop("dtype")
    value.pop("layer_types", None)
    if value["model_type"] != "qwen3" and value.get("head_dim") == value["hidden_size"] // value["num_attention_heads"]:
        del value["head_dim"]
    value |= extra
    (out / "config.json").write_text(json.dumps(dict(sorted(value.items())), indent=2) + "\n")


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
    style = STYLES[spec.get("style", "qwen")]
    texts = corpus.paragraphs(seed) + [m for c in corpus.CHATS for t in c["turns"] for m in t]
    tok = style.train(embed.texts(spec, seed) if family == "embed" else texts, spec["tokenizer_size"], spec.get("split"))
    config_class, model_class = FAMILIES[family]
    ids = {"eos_token_id": tok.token_to_id(style.end_text), "pad_token_id": tok.token_to_id(style.end_text) if style.pads else None}
    if style.bos:
        ids["bos_token_id"] = tok.token_to_id(style.bos)
    config = config_class(**spec["model"], **ids)
    config._attn_implementation = "eager"
    model = model_class(config)
    scatter(model)
    if family == "embed":
        embed.sharpen(model)
    if family == "phimoe":
        phimoe.prepare(model)
    count = sum(p.numel() for p in model.parameters())
    seqs = embed.sequences(tok, spec, seed) if family == "embed" else sequences(tok, seed, style)
    longest = max(len(s[-1] if family == "embed" else s[0]) for s in seqs)
    print(f"{spec['name']}: {count} parameters, {len(seqs)} sequences, longest {longest} tokens", flush=True)
    assert longest <= spec.get("max_seq", spec["model"]["max_position_embeddings"]), longest
    learn = embed.fit if family == "embed" else fit
    for attempt in range(3):
        more = {} if family == "embed" else {"first": attempt == 0}
        learn(model, seqs, seed + attempt, steps if attempt == 0 else steps // 2, lr if attempt == 0 else lr / 3, **more)
        if spec.get("snap"):
            phimoe.snap(model)
        save(model, tok, spec, style, out)
        if family == "embed":
            found = embed.write(spec, out, seed)
        else:
            found = goldens.write(spec["name"], out, seed, style)
        print(f"  least margin {found['margin']:.3f} in case {found['where']}, {time.time() - started:.0f} s", flush=True)
        if "routing" in found:
            print(f"  least distance of a routing decision {found['routing']:.4f}", flush=True)
        if found["margin"] >= margin and found["learned"]:
            break
    else:
        raise SystemExit(f"{spec['name']}: least margin {found['margin']:.3f} < {margin}, or text not learned: {found['missed']}")
    files = [f for f in out.rglob("*") if f.is_file()]
    for f in files:
        f.chmod(0o644)
    size = sum(f.stat().st_size for f in files)
    print(f"  {out.name}: {size} bytes; ways to the same result differ by at most {found['drift']:.2e}")


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
    sub.add_parser("unseen-phimoe", help="train phimoe from a configuration drawn from the seed")
    p = sub.add_parser("unseen-llama", help="train one of LLAMA.md's families from a configuration drawn from the seed")
    p.add_argument("--family", choices=draws.FAMILIES, required=True)
    sub.add_parser("unseen-gemma4", help="gemma4 without training, configuration and weights drawn from the seed")
    p = sub.add_parser("gemma4", help="train gemma4 with its images and clips from a configuration file")
    p.add_argument("--config", type=Path, required=True)
    for p in sub.choices.values():
        p.add_argument("--out", type=Path, required=True)
        p.add_argument("--seed", type=int, required=True)
        p.add_argument("--steps", type=int, help="200; embed: 120")
        p.add_argument("--lr", type=float, default=4e-3)
        p.add_argument("--margin", type=float, help="least top-1 margin over all golden steps, in logits (2); embed: in cosine (0.15)")
        p.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.command == "unseen":
        family, spec = "qwen35", draw(args.seed)
        print(json.dumps(spec, indent=1))
    elif args.command == "unseen-phimoe":
        family, spec = "phimoe", phimoe.draw(args.seed)
        print(json.dumps(spec, indent=1))
    elif args.command == "unseen-llama":
        family, spec = args.family, draws.draw(args.family, args.seed)
        print(json.dumps(spec, indent=1))
    elif args.command == "unseen-gemma4":
        import gemma4_unseen

        spec = gemma4_unseen.draw(args.seed)
        print(json.dumps(spec, indent=1))
        return gemma4_unseen.produce(spec, args.seed, args.out)
    else:
        family, spec = args.command, json.loads(args.config.read_text())
    steps = args.steps if args.steps is not None else (120 if family == "embed" else 200)
    margin = args.margin if args.margin is not None else (0.15 if family == "embed" else 2.0)
    if family == "gemma4":
        import gemma4

        return gemma4.produce(spec, args.seed, steps, args.out, margin, args.lr)
    produce(family, spec, args.seed, steps, args.out, margin, args.lr)


if __name__ == "__main__":
    main()
