"""Tiny checkpoints with experts of Qwen3-MoE, Qwen3.5-MoE and LFM2-MoE: weights are drawn, nothing is trained.

    experts.py qwen3 ../fixtures/qwen3-moe
    experts.py qwen35 ../fixtures/qwen35-moe
    experts.py lfm2 ../fixtures/lfm2-moe

Rows of the experts' matrices are on a grid that int8 with one scale a row holds exactly. Draws are repeated until
greedy tokens and choices of experts have clear margins. Qwen3-MoE and LFM2-MoE are written expert by expert, as they are
published, Qwen3.5-MoE in stacks."""

import json
import pathlib
import shutil
import sys

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
}


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
        draw(model)
        for name, p in model.named_parameters():
            # The grid of the experts stays exact.
            if ".experts." not in name or "shared" in name:
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
    model.save_pretrained(out, save_original_format=kind != "qwen35")
    stacked = "experts.gate_up_proj" in "".join(load_file(out / "model.safetensors"))
    assert stacked == (kind == "qwen35")
    style.write(tok, out, 256)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[0]}) + "\n")
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


produce(sys.argv[1], pathlib.Path(sys.argv[2]))
