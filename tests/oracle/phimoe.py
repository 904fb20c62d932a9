"""What the PhiMoE tiny models add to training and goldens: routing with clear margins, experts on an int8 grid, routing records.

The reference is `transformers`, `models/phimoe/modeling_phimoe.py`: `sparsemixer` in evaluation mode."""

import random

import torch

import corpus

# Relative distances of router scores below this could be decided otherwise by rounding.
CLEAR = 0.06


def prepare(model):
    """Routers that differ from token to token from the start; routing as in evaluation while the tiny model learns."""
    model.config._experts_implementation = "eager"
    hidden = model.config.hidden_size
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("router.weight"):
                p.normal_(0, 2.0 * hidden**-0.5)
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.train = lambda mode=True, m=module: m  # Gumbel sampling and jitter are for training the real model.
            module.training = False


def distances(scores, jitter):
    """How far each decision of sparsemixer is from being another one, relative: [tokens, decisions].

    First against second, second against third, and the scores behind the first and the second against the threshold."""
    order = scores.argsort(dim=-1, descending=True)
    ranked = scores.gather(-1, order)
    gap = lambda a, b: (a - b) / torch.maximum(a.abs(), b.abs())
    parts = [gap(ranked[:, i : i + 1], ranked[:, i + 1 : i + 2]) for i in range(min(2, scores.shape[-1] - 1))]
    for i in range(2):
        best, rest = ranked[:, i : i + 1], ranked[:, i + 1 :]
        parts.append(((best - rest) / torch.maximum(rest.abs(), best) - 2 * jitter).abs())
    return torch.cat(parts, dim=-1)


def balance(scores):
    """0 when all experts are first and second equally often, more otherwise (Fedus et al. 2021, arXiv 2101.03961)."""
    count = scores.shape[-1]
    used = torch.nn.functional.one_hot(scores.topk(2, dim=-1).indices, count).float().mean((0, 1))
    return count * (used * torch.softmax(scores, dim=-1).mean(0)).sum() - 1


class Margins:
    """Collects router scores of a forward pass; their loss pushes decisions apart."""

    def __init__(self, model):
        self.model, self.scores, self.hooks = model, [], []

    def __enter__(self):
        for module in self.model.modules():
            if type(module).__name__ == "PhimoeTopKRouter":
                self.hooks.append(module.register_forward_hook(lambda m, i, o: self.scores.append(o[0])))
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def loss(self, real, done):
        """Experts used evenly; and in the second half (`done` in 0..1) a hinge over all decisions, which alone would make
        every token choose alike. `real` `[tokens]` marks the tokens that count."""
        jitter = self.model.config.router_jitter_noise
        short = [(2 * CLEAR - distances(s[real], jitter)).clamp(min=0) for s in self.scores]
        even = [balance(s[real]) for s in self.scores]
        self.scores.clear()
        clear = sum(x.sum(-1).mean() for x in short) / len(short)
        return 8 * max(0.0, 2 * done - 1) * clear + 0.2 * sum(even) / len(even)


@torch.no_grad()
def snap(model):
    """Rounds every row of an expert's matrices to 255 levels of its own, so that int8 with one scale a row is exact."""
    for name, p in model.named_parameters():
        if ".experts." in name:
            scale = p.abs().amax(-1, keepdim=True) / 127
            p.copy_((p / scale).round() * scale)


@torch.no_grad()
def routing(model, ids):
    """Experts `[tokens, layers, 2]` and multipliers of every token, by one forward; and the least distance."""
    found, hooks = [], []
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            hooks.append(module.register_forward_hook(lambda m, i, o: found.append(o)))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    least = min(distances(scores, model.config.router_jitter_noise).min().item() for scores, _, _ in found)
    experts = torch.stack([e for _, _, e in found], dim=1).to(torch.uint8)
    return experts.contiguous(), torch.stack([w for _, w, _ in found], dim=1).float().contiguous(), least


def cases(tok, style, seed):
    """Prompts of exactly 3 and 30 tokens: beginnings of learnt texts, up to the end of a word."""
    out = []
    for id, count in (("three", 3), ("thirty", 30)):
        for text in corpus.paragraphs(seed)[::-1]:
            ends = [i for i in range(1, len(text) - 60) if text[i] == " " and len(style.encode(tok, text[:i])) == count]
            if ends:
                out.append((id, text[: ends[0]], 32))
                break
        else:
            raise SystemExit(f"no beginning of a text has {count} tokens")
    return out


def draw(seed):
    """A random valid configuration."""
    rng = random.Random(f"phimoe {seed}")
    while True:
        kv, group, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4]), rng.choice([12, 16, 20, 24, 28])
        if 64 <= kv * group * dim <= 176:
            break
    experts = rng.choice([4, 5, 6, 8, 11, 16])
    size = rng.randint(460, 500)
    snapped = rng.random() < 0.5
    return {
        "name": f"phimoe-unseen-{seed}",
        "style": "phi3",
        "tokenizer_size": size,
        "dtype": rng.choice(["bfloat16", "float16", "float32"]),
        "keep_f32": ["experts.gate_up_proj", "experts.down_proj"] if snapped else [],
        "snap": snapped,
        "max_shard_size": rng.choice(["10MB", "500KB"]),
        "config_keys": rng.choice(["old", "new"]),
        "model": {
            "vocab_size": size + rng.choice([0, 0, 3, 12]),
            "hidden_size": rng.choice([84, 92, 100, 108]),
            "intermediate_size": rng.choice([28, 36, 44, 52]) if experts > 8 else rng.choice([52, 60, 76]),
            "num_hidden_layers": rng.randint(3, 5),
            "num_attention_heads": kv * group,
            "num_key_value_heads": kv,
            "head_dim": dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([10000.0, 50000.0, 1000000.0])},
            "max_position_embeddings": rng.choice([320, 352, 384]),
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
            "router_jitter_noise": rng.choice([0.01, 0.2, 0.35]),
            "input_jitter_noise": rng.choice([0.0, 0.01]),
            "attention_bias": rng.random() < 0.7,
            "lm_head_bias": rng.random() < 0.7,
            "sliding_window": rng.choice([None, 4096]),
        },
    }
