"""Tiny checkpoints with experts of Qwen3-MoE, Qwen3.5-MoE, LFM2-MoE and gpt-oss: weights are drawn, nothing is trained.

    experts.py qwen3 ../fixtures/qwen3-moe
    experts.py qwen35 ../fixtures/qwen35-moe
    experts.py lfm2 ../fixtures/lfm2-moe
    experts.py gpt_oss ../fixtures/gpt-oss             # and ../fixtures/gguf/gpt-oss.gguf, which needs gguf==0.19.0
    experts.py gpt_oss_plain ../fixtures/gpt-oss-plain

Rows of the experts' matrices are on a grid that int8 with one scale a row holds exactly. Draws are repeated until
greedy tokens and choices of experts have clear margins. Qwen3-MoE and LFM2-MoE are written expert by expert, as they are
published, Qwen3.5-MoE in stacks. Those of gpt-oss are MXFP4 as published, and the goldens are computed with what int8
with one scale a row makes of that; or stacks of inputs and outputs, as `transformers` writes them unquantized."""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import corpus
import goldens
from styles import STYLES

# Least distances: of the two largest logits, and of the scores of the last chosen expert and the next.
MARGIN, CLEAR = 0.1, 0.01
STEPS = 8
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

COMMON = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    num_experts_per_tok=3, moe_intermediate_size=32, tie_word_embeddings=True,
)
MODELS = {
    # A dense layer by its number, one by the step of 3, one behind the last layer with experts.
    "qwen3": ("Qwen3Moe", dict(
        COMMON, num_hidden_layers=5, intermediate_size=96, num_experts=8, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[1, 4], rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )),
    "qwen35": ("Qwen3_5Moe", dict(
        COMMON, num_hidden_layers=4, num_experts=8, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )),
    "lfm2": ("Lfm2Moe", {k: v for k, v in COMMON.items() if k != "head_dim"} | dict(
        num_hidden_layers=4, intermediate_size=96, num_experts=6, num_dense_layers=2, routed_scaling_factor=1.5,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )),
    # Each other layer slides.
    "gpt_oss": ("GptOss", dict(
        num_hidden_layers=3, hidden_size=64, intermediate_size=96, num_local_experts=5, num_experts_per_tok=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=12, max_position_embeddings=256, sliding_window=10,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 24,
            "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
        },
    )),
    # The first layer sees all; without biases in the attention.
    "gpt_oss_plain": ("GptOss", dict(
        num_hidden_layers=3, hidden_size=48, intermediate_size=28, num_local_experts=5, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=10, max_position_embeddings=256, sliding_window=7,
        swiglu_alpha=1.2, swiglu_limit=1.0, tie_word_embeddings=True, attention_bias=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )),
}
# The values of MXFP4, e2m1, by their codes.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def grid(p):
    """What int8 makes of lines, with a scale for each."""
    scale = p.abs().amax(-1, keepdim=True) / 127
    return (p / scale).round() * scale


def mxfp4(p):
    """Lines in MXFP4: codes, exponents of two for each 32 inputs, and the values."""
    blocks = p.reshape(*p.shape[:-1], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = codes + 8 * (scaled < 0)
    return codes.to(torch.uint8), (exponents + 127).to(torch.uint8), values.reshape(p.shape)


@torch.no_grad()
def draw_gpt_oss(model, packed):
    """Parts that a checkpoint in MXFP4 has instead of its experts' matrices."""
    parts = {}
    for name, p in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            p.normal_(0, 1.0)
        elif name.endswith("norm.weight"):
            p.normal_(1, 0.2)
        elif name.endswith(("bias", "sinks")):
            p.normal_(0, 1.0 if name.endswith("sinks") else 0.4)
        elif name.endswith("router.weight"):
            p.normal_(0, 2 * p.shape[-1] ** -0.5)
        elif "experts." in name:
            # Inner rows exceed the limit, which a GGUF file does not say.
            size = 0.2 if "down" in name else 5.0 if packed else 1.5
            lines = torch.empty(p.transpose(1, 2).shape).normal_(0, size * p.shape[1] ** -0.5)
            if packed:
                codes, exponents, lines = mxfp4(lines)
                parts[f"{name}_blocks"], parts[f"{name}_scales"] = codes, exponents
            # Lines of one block are kept as they are.
            kept = packed and lines.shape[-1] == 32
            p.copy_((lines if kept else grid(lines)).transpose(1, 2))
        else:
            p.normal_(0, p.shape[-1] ** -0.5)
    return parts


def write_gpt_oss(model, parts, out):
    """A checkpoint in MXFP4, as published."""
    tensors = {name: p.detach() for name, p in model.named_parameters() if f"{name}_blocks" not in parts}
    for name, part in parts.items():
        if name.endswith("_blocks"):
            # The first of two values is in the lower half of a byte.
            part = part[..., ::2] | part[..., 1::2] << 4
        tensors[name] = part
    save_file({name: p.contiguous() for name, p in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    rope = config.pop("rope_parameters")
    length = rope["original_max_position_embeddings"]
    config |= {
        "architectures": ["GptOssForCausalLM"], "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope,
        "experts_per_token": config["num_experts_per_tok"], "initial_context_length": length, "dtype": "bfloat16",
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def gguf_of_gpt_oss(model, parts, tok, path):
    """The same as llama.cpp's converter writes it (`conversion/gpt_oss.py`)."""
    import gguf
    import gguf_files

    config = model.config
    rope = config.rope_parameters
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    named = lambda name: table.get_name(name, try_suffixes=(".weight", ".bias"))

    def add(writer):
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        gguf_files.byte_level(tok, "gpt-4o", 0)(writer)
        for name, p in model.named_parameters():
            values = p.detach().float().numpy()
            halves = {name: slice(None)}
            if "gate_up_proj" in name:
                halves = {name.replace("gate_up", "gate"): slice(0, None, 2), name.replace("gate_up", "up"): slice(1, None, 2)}
            for half, rows in halves.items():
                if f"{name}_blocks" in parts:
                    codes, exponents = (parts[f"{name}_{part}"].numpy()[:, rows] for part in ("blocks", "scales"))
                    blocks = np.concatenate([exponents[..., None], codes[..., :16] | codes[..., 16:] << 4], -1)
                    kind = gguf.GGMLQuantizationType.MXFP4
                    writer.add_tensor(named(f"{half}.weight"), blocks.reshape(*blocks.shape[:2], -1), raw_dtype=kind)
                    continue
                half = half.replace("proj_bias", "proj.bias").replace("sinks", "sinks.weight")
                one = values[..., rows] if "experts" in name else values
                kind = gguf.GGMLQuantizationType.BF16 if one.ndim == 2 and "bias" not in half else gguf.GGMLQuantizationType.F32
                one = gguf.quants.quantize(np.ascontiguousarray(one), kind)
                writer.add_tensor(named(half), one, raw_dtype=kind)

    gguf_files.write(path, add, "gpt-oss", config.num_hidden_layers)


@torch.no_grad()
def draw(model):
    for name, p in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            p.normal_(0, 1.0)
        elif p.dim() >= 2:
            p.normal_(0, p.shape[-1] ** -0.5)
        if "experts." in name and "shared" not in name:
            scale = p.abs().amax(-1, keepdim=True) / 127
            p.copy_((p / scale).round() * scale)
        elif name.endswith("gate.weight") or name.endswith("router.weight"):
            p.normal_(0, 2 * p.shape[-1] ** -0.5)
    for name, b in model.named_buffers():
        if name.endswith("expert_bias"):
            b.normal_(0, 0.2)


class Choices:
    """Distances of the last chosen score from the next, of all routers."""

    def __init__(self, model):
        self.least = float("inf")
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self.note)

    def note(self, module, inputs, output):
        scores = output[0]
        if len(inputs) > 1 and inputs[1] is not None:
            scores = scores.sigmoid() + inputs[1]
        top = scores.topk(module.top_k + 1, dim=-1).values
        self.least = min(self.least, (top[:, -2] - top[:, -1]).min().item())


def produce(kind, out):
    family, config = MODELS[kind]
    style = STYLES["qwen"]
    tok = style.train(corpus.paragraphs(5), 300, "qwen2")
    config["vocab_size"] = tok.get_vocab_size()
    classes = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    ends = sorted(style.ends(tok))
    build = getattr(transformers, f"{family}ForCausalLM")
    for attempt in range(200):
        torch.manual_seed(attempt)
        model = build._from_config(classes(**config), **EAGER).float().eval()
        parts = {}
        if kind.startswith("gpt_oss"):
            parts = draw_gpt_oss(model, kind == "gpt_oss")
        else:
            draw(model)
        for name, p in model.named_parameters():
            # The grid of the experts stays exact.
            if ".experts." not in name or "shared" in name or name.endswith("_bias"):
                p.data = p.data.to(torch.bfloat16).float()
        choices, cases, rows, margin = record(model, tok, style, ends)
        print(f"{kind} {attempt}: margin {margin:.3f}, choices {choices:.4f}", flush=True)
        if margin >= MARGIN and choices >= CLEAR:
            break
    else:
        raise SystemExit("no draw has clear margins")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, p in model.named_parameters():
        if ".experts." not in name or "shared" in name:
            p.data = p.data.to(torch.bfloat16)
    style.write(tok, out, 256)
    if parts:
        write_gpt_oss(model, parts, out)
        gguf_of_gpt_oss(model, parts, out, out.parent / "gguf" / f"{out.name}.gguf")
    else:
        model.save_pretrained(out, save_original_format=kind != "qwen35")
        stacked = "experts.gate_up_proj" in "".join(load_file(out / "model.safetensors"))
        assert stacked == (kind in ("qwen35", "gpt_oss_plain"))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[0]}) + "\n")
    if parts:
        # Nothing computes with int8 there; biases were in bfloat16 already.
        model = model.float()
    else:
        model = build.from_pretrained(out, dtype=torch.float32, **EAGER).eval()
    again = record(model, tok, style, ends)
    assert all(torch.equal(rows[id], again[2][id]) for id in rows), "the file holds another model"
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": out.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": attempt, "eos_ids": ends, "min_margin": round(margin, 4),
        "cases": cases, "chat": [],
    })
    save_file(rows, out / "goldens.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)


def record(model, tok, style, ends):
    """Least distance of choices, cases, logits, least margin."""
    choices, tensors, cases, worst = Choices(model), {}, [], float("inf")
    for id, text in (("short", "The river"), ("long", corpus.paragraphs(5)[0][:48])):
        ids = style.encode(tok, text)
        got, rows, finish = goldens.greedy(model, ids, STEPS, set(ends))
        worst = min(worst, goldens.least_margin(rows))
        tensors[f"{id}.logits"] = rows.contiguous()
        cases.append({
            "id": id, "prompt": text, "prompt_ids": ids, "output_ids": got, "finish": finish,
            "text": tok.decode(got, skip_special_tokens=True), "logits_steps": list(range(len(got))),
        })
    return choices.least, cases, tensors, worst


if __name__ == "__main__":
    produce(sys.argv[1], pathlib.Path(sys.argv[2]))
