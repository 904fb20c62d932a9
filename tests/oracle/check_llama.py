"""LLAMA.md in numpy, whole sequences at a time: decoders and the bidirectional encoder. Used by check.py."""

import json

import numpy as np

MUTANTS = {
    "plus_one_norm": "norm weight used as 1 + w",
    "no_final_norm": "final norm left out",
    "interleaved_rope": "neighbouring pairs turned instead of halves",
    "no_rope": "no rope",
    "rope_from_one": "positions counted from 1 for keys only",
    "plain_theta": "rope theta 10000 whatever the configuration says",
    "no_rope_scaling": "llama3 scaling ignored",
    "scale_all": "all frequencies divided by the factor",
    "no_smoothing": "the middle band of llama3 scaling left unscaled",
    "no_qk_norm": "no q_norm and k_norm",
    "norm_after_rope": "q_norm and k_norm after rope",
    "whole_qk_norm": "q and k normalised over all heads together",
    "no_qkv_bias": "biases of q, k and v left out",
    "no_v_bias": "bias of v left out",
    "tile_kv": "kv heads tiled over query heads instead of repeated",
    "scale_by_hidden": "scores divided by sqrt(H / A) instead of sqrt(head_dim)",
    "gelu": "GELU instead of SiLU",
    "swap_gate": "gate_proj and up_proj exchanged",
    "loose_eps": "rms_norm_eps 100 times too large",
    "bidirectional": "no causal mask",
    "lost_kv": "kv cache lost at the end of the prompt",
    "lost_first": "first token of the prompt not in the kv cache",
    "stuck_rope": "rope position stuck at the end of the prompt",
}
EMBED_ONLY = {
    "causal": "causal mask",
    "pool_padding": "padded positions pooled too",
    "see_padding": "padded keys not masked",
    "no_bos": "first token dropped",
    "norm_after_pool": "final norm after pooling instead of before",
}
NOT_EMBED = {"lost_kv", "lost_first", "stuck_rope", "bidirectional"}
# Nearly nothing: the norms of the positions differ little.
FAINT_EMBED = {"norm_after_pool"}


def settings(c):
    """Configuration with defaults and both spellings of rope resolved."""
    kind = c["model_type"]
    heads = c["num_attention_heads"]
    rope = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
    return {
        **c,
        "kind": kind,
        "heads": heads,
        "groups": c.get("num_key_value_heads") or heads,
        "dim": c.get("head_dim") or (128 if kind == "qwen3" else c["hidden_size"] // heads),
        "rope": {"rope_type": rope.get("type", "default"), "rope_theta": c.get("rope_theta", 1e4), **rope},
        "tied": c.get("tie_word_embeddings", False),
    }


def frequencies(c, mutant=None):
    rope, d = c["rope"], c["dim"]
    theta = 1e4 if mutant == "plain_theta" else rope["rope_theta"]
    freq = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if rope["rope_type"] == "default" or mutant == "no_rope_scaling":
        return freq.astype(np.float32)
    assert rope["rope_type"] == "llama3", rope
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope.get("original_max_position_embeddings", c["max_position_embeddings"])
    out = []
    for f in freq:
        wave = 2 * np.pi / f
        if mutant == "scale_all" or wave > length / low:
            out.append(f / factor)
        elif wave < length / high or mutant == "no_smoothing":
            out.append(f)
        else:
            s = (length / wave - low) / (high - low)
            out.append((1 - s) * f / factor + s * f)
    return np.array(out, np.float32)


class Model:
    def __init__(self, config, weights, mutant=None):
        self.c, self.w, self.mutant = settings(config), weights, mutant
        self.eps = config["rms_norm_eps"] * (100 if mutant == "loose_eps" else 1)
        self.freq = frequencies(self.c, mutant)

    def is_(self, name):
        return self.mutant == name

    def norm(self, x, name):
        w = self.w[name]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * (1 + w if self.is_("plus_one_norm") else w)

    def linear(self, x, name):
        y = x @ self.w[name + ".weight"].T
        if name + ".bias" in self.w and not (self.is_("no_qkv_bias") and name[-6] in "qkv") and not (self.is_("no_v_bias") and "v_proj" in name):
            y = y + self.w[name + ".bias"]
        return y

    def rope(self, x, at):
        if self.is_("no_rope"):
            return x
        angle = at[:, None, None] * self.freq
        cos, sin = np.cos(angle), np.sin(angle)
        if self.is_("interleaved_rope"):
            a, b = x[..., ::2], x[..., 1::2]
            return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def head_norm(self, x, name):
        if name not in self.w or self.is_("no_qk_norm"):
            return x
        if self.is_("whole_qk_norm"):
            return x / np.sqrt((x * x).mean((-2, -1), keepdims=True) + self.eps) * self.w[name]
        return self.norm(x, name)

    def attention(self, x, n, at, visible):
        c, p, t = self.c, f"layers.{n}.self_attn.", len(x)
        heads, groups, d = c["heads"], c["groups"], c["dim"]
        q, k, v = (self.linear(x, p + m + "_proj").reshape(t, -1, d) for m in "qkv")
        turn = lambda z, m: self.rope(z, at + (m == "k" and self.is_("rope_from_one")))
        if self.is_("norm_after_rope"):
            q, k = (self.head_norm(turn(z, m), p + m + "_norm.weight") for z, m in ((q, "q"), (k, "k")))
        else:
            q, k = (turn(self.head_norm(z, p + m + "_norm.weight"), m) for z, m in ((q, "q"), (k, "k")))
        share = (lambda z: np.tile(z, (1, heads // groups, 1))) if self.is_("tile_kv") else (lambda z: np.repeat(z, heads // groups, axis=1))
        k, v = share(k), share(v)
        width = c["hidden_size"] / heads if self.is_("scale_by_hidden") else d
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
        s = np.where(visible, s, -np.inf)
        s = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("hqk,khd->qhd", s / s.sum(-1, keepdims=True), v)
        return self.linear(o.reshape(t, -1), p + "o_proj")

    def mlp(self, x, n):
        p = f"layers.{n}.mlp."
        gate, up = self.linear(x, p + "gate_proj"), self.linear(x, p + "up_proj")
        if self.is_("swap_gate"):
            gate, up = up, gate
        act = 0.5 * gate * (1 + np.tanh(0.7978845608 * (gate + 0.044715 * gate**3))) if self.is_("gelu") else gate / (1 + np.exp(-gate))
        return self.linear(act * up, p + "down_proj")

    def hidden(self, ids, at, visible):
        h = self.w["embed_tokens.weight"][ids]
        for n in range(self.c["num_hidden_layers"]):
            h = h + self.attention(self.norm(h, f"layers.{n}.input_layernorm.weight"), n, at, visible)
            h = h + self.mlp(self.norm(h, f"layers.{n}.post_attention_layernorm.weight"), n)
        return h

    def last(self, h):
        return h if self.is_("no_final_norm") else self.norm(h, "norm.weight")


def forced(config, weights, prompt, out, mutant=None):
    """Logits of every golden step, the golden tokens being fed."""
    m = Model(config, weights, mutant)
    ids, p = np.array(prompt + out[:-1]), len(prompt)
    t = np.arange(len(ids))
    window = m.c.get("sliding_window") if m.c["kind"] == "mistral" else None
    visible = (t[None] <= t[:, None]) & (t[None] > t[:, None] - (window or 1 << 30))
    if mutant == "bidirectional":
        visible[:] = True
    if mutant == "lost_kv":
        visible[p:, :p] = False
    if mutant == "lost_first":
        visible[p:, 0] = False
    at = np.minimum(t, p) if mutant == "stuck_rope" else t
    head = weights["embed_tokens.weight" if m.c["tied"] else "lm_head.weight"]
    return (m.last(m.hidden(ids, at.astype(np.float32), visible)) @ head.T)[p - 1 :]


def embed(config, weights, ids, pooling, width, mutant=None):
    """Unit vector of one text, padded on the right to `width`."""
    m = Model(config, weights, mutant)
    if mutant == "no_bos" and len(ids) > 1:
        ids = ids[1:]
    n, t = len(ids), np.arange(width)
    padded = np.array(ids + [5] * (width - n))
    visible = np.broadcast_to((t < (width if mutant == "see_padding" else n))[None], (width, width))
    if mutant == "causal":
        visible = visible & (t[None] <= t[:, None])
    h = m.hidden(padded, t.astype(np.float32), visible)
    if mutant != "norm_after_pool":
        h = m.last(h)
    if pooling == "mean":
        v = h[: width if mutant == "pool_padding" else n].mean(0)
    else:
        v = h[{"last": n - 1, "cls": 0}[pooling]]
    if mutant == "norm_after_pool":
        v = m.last(v)
    return v / np.linalg.norm(v)


def harmless(c, mutant, weights, embedding=False):
    """Mistakes that are none, given the shapes and settings of a configuration."""
    c = settings(c)
    scaled = c["rope"]["rope_type"] == "llama3"
    normed = any(n.endswith("q_norm.weight") for n in weights)
    biased = any(n.endswith("v_proj.bias") for n in weights)
    waves = 2 * np.pi / c["rope"]["rope_theta"] ** (-np.arange(0, c["dim"], 2) / c["dim"])
    length = c["rope"].get("original_max_position_embeddings", 0)
    middle = scaled and any(length / c["rope"]["high_freq_factor"] < w < length / c["rope"]["low_freq_factor"] for w in waves)
    return {
        "plain_theta": c["rope"]["rope_theta"] == 1e4,
        "no_rope_scaling": not scaled, "scale_all": not scaled, "no_smoothing": not middle,
        "no_qk_norm": not normed, "norm_after_rope": not normed, "whole_qk_norm": not normed or c["heads"] == 1,
        "no_qkv_bias": not biased, "no_v_bias": not biased,
        "tile_kv": c["groups"] in (1, c["heads"]),
        "scale_by_hidden": c["hidden_size"] == c["heads"] * c["dim"],
        "interleaved_rope": c["dim"] == 2,
    }.get(mutant, False)


def check_embed(fixture, config, weights, tensors, mutants):
    goldens = json.loads((fixture / "goldens_embed.json").read_text(encoding="utf-8"))
    width, how = goldens["max_seq"], goldens["pooling"]
    everything = [(t["id"] if p == how else f"{t['id']}.{p}", t["ids"], p) for t in goldens["texts"] for p in t["poolings"]]
    everything.append(("over", goldens["over"]["ids"], how))
    assert {e[0] for e in everything} == set(tensors), "texts and tensors differ"
    error = lambda name: {id: np.abs(embed(config, weights, ids, p, width, name) - tensors[id]).max() for id, ids, p in everything}
    worst = max(error(None).values())
    assert worst < 2e-5, worst
    for row in goldens["ranking"]:
        cosines = [float(tensors[row["query"]] @ tensors[d]) for d in row["documents"]]
        assert cosines == sorted(cosines, reverse=True) and np.allclose(cosines, row["cosines"], atol=2e-6), row
    print(f"{goldens['model']}: {len(everything)} vectors within {worst:.1e}, {len(goldens['ranking'])} rankings, least gap {goldens['least_gap']}")
    if not mutants:
        return
    print("mutant                lowest cosine   texts with another vector")
    for name in [m for m in MUTANTS if m not in NOT_EMBED] + list(EMBED_ONLY):
        low, other = 1.0, 0
        for id, ids, p in everything:
            cosine = float(embed(config, weights, ids, p, width, name) @ tensors[id])
            low, other = min(low, cosine), other + (cosine < 0.9999)
        same = harmless(config, name, weights, True) or name in FAINT_EMBED
        print(f"{name:20s}  {low:13.4f}   {other}/{len(everything)}{'   (the same thing here, or nearly)' if same else ''}")
        assert same or low < 0.9998, f"{name} would go unnoticed"
