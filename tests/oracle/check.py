"""Compares a fixture's goldens with numpy: QWEN35.md token by token here, LLAMA.md in check_llama.py. `--mutants` shows that known mistakes are noticed."""

import argparse
import json
from pathlib import Path

import numpy as np

import check_llama

MUTANTS = {
    "gate_halves": "q_proj split in two halves of the row instead of per head",
    "no_gate": "attention output gate left out",
    "plain_norm": "norm weight used as w instead of 1 + w",
    "gated_plus_one": "linear_attn.norm used as 1 + w",
    "full_rope": "rope over the whole head",
    "interleaved_rope": "neighbouring pairs turned instead of halves",
    "no_rope": "no rope",
    "no_qk_norm": "no q_norm and k_norm",
    "tile_keys": "key heads tiled over value heads instead of repeated",
    "tile_kv": "kv heads tiled over query heads instead of repeated",
    "read_before_decay": "delta computed from the state before the decay",
    "read_old_state": "output read from the state before the update",
    "no_l2": "q and k not normalised in the delta rule",
    "no_scale": "q not divided by sqrt(dk)",
    "conv_reversed": "conv taps in reversed order",
    "conv_no_silu": "no SiLU after the conv",
    "gate_before_norm": "z gate applied before the gated norm",
    "z_sigmoid": "z gate is a sigmoid instead of SiLU",
    "no_decay": "state never decays",
    "no_dt_bias": "dt_bias left out",
    "swap_ab": "in_proj_a and in_proj_b exchanged",
    "lost_conv": "conv FIFO lost at the end of the prompt",
    "lost_state": "delta-rule state lost at the end of the prompt",
    "lost_kv": "kv cache lost at the end of the prompt",
    "stuck_rope": "rope position stuck at the end of the prompt",
}


def harmless(c):
    """Mistakes that are none, given the shapes of a configuration."""
    rope = c["rope_parameters"].get("partial_rotary_factor", 0.25)
    kv, keys = c["num_key_value_heads"], c["linear_num_key_heads"]
    return {
        "full_rope": rope == 1,
        "interleaved_rope": int(c["head_dim"] * rope) == 2,
        "gate_halves": c["num_attention_heads"] == 1,
        "tile_kv": kv in (1, c["num_attention_heads"]),
        "tile_keys": keys in (1, c["linear_num_value_heads"]),
    }


def read_safetensors(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    out = {}
    for name, t in header.items():
        if name == "__metadata__":
            continue
        a, b = (8 + size + o for o in t["data_offsets"])
        if t["dtype"] == "BF16":
            v = (np.frombuffer(raw[a:b], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            v = np.frombuffer(raw[a:b], {"F16": "<f2", "F32": "<f4"}[t["dtype"]]).astype(np.float32)
        out[name] = v.reshape(t["shape"])
    return out


def load(folder):
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights = {}
    for file in files:
        for name, value in read_safetensors(folder / file).items():
            for prefix in ("model.language_model.", "model."):
                if name.startswith(prefix):
                    name = name[len(prefix) :]
                    break
            weights[name] = value
    return config, weights


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def silu(a):
    return a * sigmoid(a)


class Decoder:
    def __init__(self, config, weights, mutant=None):
        self.c, self.w, self.mutant = config, weights, mutant
        self.eps = config["rms_norm_eps"]
        rope = config["rope_parameters"]
        d = config["head_dim"]
        self.rot = d if self.is_("full_rope") else int(d * rope.get("partial_rotary_factor", 0.25))
        self.inv_freq = rope.get("rope_theta", 1e4) ** (-np.arange(0, self.rot, 2, dtype=np.float32) / np.float32(self.rot))
        self.position, self.state, self.stuck = 0, {}, None

    def is_(self, name):
        return self.mutant == name

    def lose(self):
        """What some mutants forget between prompt and answer."""
        kinds = {"lost_conv": "conv", "lost_state": "ssm", "lost_kv": "kv"}
        if self.mutant in kinds:
            self.state = {k: v for k, v in self.state.items() if k[0] != kinds[self.mutant]}
        if self.is_("stuck_rope"):
            self.stuck = self.position

    def rms(self, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)

    def norm(self, x, name):
        w = self.w[name]
        return self.rms(x) * (w if self.is_("plain_norm") else 1 + w)

    def rope(self, x):
        if self.is_("no_rope"):
            return x
        at = self.position if self.stuck is None else self.stuck
        cos, sin = np.cos(at * self.inv_freq), np.sin(at * self.inv_freq)
        out = x.copy()
        if self.is_("interleaved_rope"):
            a, b = x[:, : self.rot : 2], x[:, 1 : self.rot : 2]
            out[:, : self.rot : 2], out[:, 1 : self.rot : 2] = a * cos - b * sin, b * cos + a * sin
        else:
            h = self.rot // 2
            a, b = x[:, :h], x[:, h : self.rot]
            out[:, :h], out[:, h : self.rot] = a * cos - b * sin, b * cos + a * sin
        return out

    def share(self, x, heads, tiled):
        return np.tile(x, (heads // len(x), 1)) if self.is_(tiled) else np.repeat(x, heads // len(x), axis=0)

    def attention(self, x, n):
        w, p = self.w, f"layers.{n}.self_attn."
        heads, groups, d = self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        qg = w[p + "q_proj.weight"] @ x
        if self.is_("gate_halves"):
            q, gate = qg.reshape(2, heads, d)
        else:
            q, gate = np.split(qg.reshape(heads, 2 * d), 2, axis=1)
        k = (w[p + "k_proj.weight"] @ x).reshape(groups, d)
        v = (w[p + "v_proj.weight"] @ x).reshape(groups, d)
        if not self.is_("no_qk_norm"):
            q, k = self.norm(q, p + "q_norm.weight"), self.norm(k, p + "k_norm.weight")
        keys, values = self.state.setdefault(("kv", n), ([], []))
        keys.append(self.share(self.rope(k), heads, "tile_kv"))
        values.append(self.share(v, heads, "tile_kv"))
        s = np.einsum("hd,thd->ht", self.rope(q), np.stack(keys)) / np.sqrt(d)
        s = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("ht,thd->hd", s / s.sum(-1, keepdims=True), np.stack(values))
        return w[p + "o_proj.weight"] @ (o if self.is_("no_gate") else o * sigmoid(gate)).reshape(-1)

    def delta_net(self, x, n):
        w, p, c = self.w, f"layers.{n}.linear_attn.", self.c
        K, V = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv, kc = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        m = w[p + "in_proj_qkv.weight"] @ x
        fifo = self.state.get(("conv", n), np.zeros((len(m), kc - 1), np.float32))
        window = np.concatenate([fifo, m[:, None]], axis=1)
        self.state["conv", n] = window[:, 1:]
        taps = w[p + "conv1d.weight"][:, 0]
        m = (window * (taps[:, ::-1] if self.is_("conv_reversed") else taps)).sum(1)
        if not self.is_("conv_no_silu"):
            m = silu(m)
        q, k, v = np.split(m, [K * dk, 2 * K * dk])
        q, k, v = q.reshape(K, dk), k.reshape(K, dk), v.reshape(V, dv)
        z = (w[p + "in_proj_z.weight"] @ x).reshape(V, dv)
        b, a = w[p + "in_proj_b.weight"] @ x, w[p + "in_proj_a.weight"] @ x
        if self.is_("swap_ab"):
            a, b = b, a
        beta = sigmoid(b)[:, None]
        g = -np.exp(w[p + "A_log"]) * np.logaddexp(0, a + (0 if self.is_("no_dt_bias") else w[p + "dt_bias"]))
        decay = np.ones((V, 1, 1)) if self.is_("no_decay") else np.exp(g)[:, None, None]
        if not self.is_("no_l2"):
            q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
        if not self.is_("no_scale"):
            q = q / np.sqrt(dk)
        q, k = self.share(q, V, "tile_keys"), self.share(k, V, "tile_keys")
        old = self.state.get(("ssm", n), np.zeros((V, dk, dv), np.float32))
        s = old * decay
        seen = np.einsum("hkv,hk->hv", old if self.is_("read_before_decay") else s, k)
        new = s + k[:, :, None] * (beta * (v - seen))[:, None, :]
        self.state["ssm", n] = new.astype(np.float32)
        o = np.einsum("hkv,hk->hv", s if self.is_("read_old_state") else new, q)
        weight, gate = w[p + "norm.weight"], sigmoid(z) if self.is_("z_sigmoid") else silu(z)
        weight = 1 + weight if self.is_("gated_plus_one") else weight
        o = weight * self.rms(o * gate) if self.is_("gate_before_norm") else weight * self.rms(o) * gate
        return w[p + "out_proj.weight"] @ o.reshape(-1)

    def step(self, token):
        w = self.w
        h = w["embed_tokens.weight"][token]
        for n, kind in enumerate(self.c["layer_types"]):
            p = f"layers.{n}."
            mixer = self.delta_net if kind == "linear_attention" else self.attention
            h = h + mixer(self.norm(h, p + "input_layernorm.weight"), n)
            x = self.norm(h, p + "post_attention_layernorm.weight")
            h = h + w[p + "mlp.down_proj.weight"] @ (silu(w[p + "mlp.gate_proj.weight"] @ x) * (w[p + "mlp.up_proj.weight"] @ x))
        self.position += 1
        head = w["embed_tokens.weight"] if self.c["tie_word_embeddings"] else w["lm_head.weight"]
        return head @ self.norm(h, "norm.weight")


def forced_qwen35(config, weights, prompt, out, mutant=None):
    """Logits of every golden step, the golden tokens being fed."""
    decoder = Decoder(config, weights, mutant)
    rows = [decoder.step(t) for t in prompt][-1:]
    decoder.lose()
    return np.stack(rows + [decoder.step(t) for t in out[:-1]])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixture", type=Path)
    parser.add_argument("--mutants", action="store_true")
    args = parser.parse_args()
    config, weights = load(args.fixture)
    if (args.fixture / "goldens_embed.json").exists():
        tensors = read_safetensors(args.fixture / "goldens_embed.safetensors")
        return check_llama.check_embed(args.fixture, config, weights, tensors, args.mutants)
    qwen35 = config["model_type"].startswith("qwen3_5")
    forced = forced_qwen35 if qwen35 else check_llama.forced
    mutants = MUTANTS if qwen35 else check_llama.MUTANTS
    goldens = json.loads((args.fixture / "goldens.json").read_text(encoding="utf-8"))
    logits = read_safetensors(args.fixture / "goldens.safetensors")
    worst = 0.0
    everything = [(c["id"], c["prompt_ids"], c["output_ids"]) for c in goldens["cases"]]
    everything += [(f"{c['id']}.{i}", t["prompt_ids"], t["output_ids"]) for c in goldens["chat"] for i, t in enumerate(c["turns"])]
    for id, prompt, out in everything:
        assert forced(config, weights, prompt, out).argmax(-1).tolist() == out, f"{id}: greedy tokens differ"
    for c in goldens["cases"]:
        rows = forced(config, weights, c["prompt_ids"], c["output_ids"])[c["logits_steps"]]
        worst = max(worst, np.abs(rows - logits[c["id"] + ".logits"]).max())
    assert worst < 1e-3, worst
    print(f"{goldens['model']}: {len(everything)} greedy outputs equal, logits within {worst:.1e}, least margin {goldens['min_margin']}")
    if not args.mutants:
        return
    print("mutant                largest logit error   cases with other greedy tokens")
    recorded = [c for c in goldens["cases"] if len(c["logits_steps"]) > 1]
    for name in mutants:
        off, other = 0.0, 0
        for c in recorded:
            rows = forced(config, weights, c["prompt_ids"], c["output_ids"], name)
            off = max(off, np.abs(rows - logits[c["id"] + ".logits"]).max())
            other += rows.argmax(-1).tolist() != c["output_ids"]
        same = harmless(config).get(name, False) if qwen35 else check_llama.harmless(config, name, weights)
        print(f"{name:20s}  {off:19.3f}   {other}/{len(recorded)}{'   (the same thing here, or nearly)' if same else ''}")
        assert same or off > 0.02, f"{name} would go unnoticed: {mutants[name]}"


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
