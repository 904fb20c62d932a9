"""Tiny checkpoints of decoders with recurrent states: weights are drawn, nothing is trained.

    hybrids.py granite-h ../fixtures/hybrid/granite-h
    hybrids.py all ../fixtures/hybrid
    hybrids.py NAME DIR --unseen SEED     # other sizes under the same switches

Draws are repeated until greedy tokens and choices of experts have clear margins. Tensors and `config.json` are as
published checkpoints of the class have them. Logits are those of one forward pass over the whole text.

| folder | class and switches |
|---|---|
| `granite-h` | Granite 4 H: Mamba-2 and attention without positions, shared MLP, multipliers, tied head |
| `granite-moe` | Granite 4 H Tiny: the same with experts, several groups of B and C, in shards |
| `granite-rope` | Granite 4 Micro: attention alone, with rope, untied head |
| `falcon-h1` | Falcon-H1: attention and Mamba-2 side by side, gate without norm, all multipliers |
| `falcon-norm` | the same with a norm before the gate, biases, groups, time steps with limits |
| `nemotron-h` | Nemotron Nano: layers of one kind each, squared ReLU, norm of groups behind the gate |
| `nemotron-moe` | Nemotron 3 Nano: experts of two matrices |
| `qwen3-next` | Qwen3-Next: fused projections of the gated delta net, experts one by one |

`NAME.gguf` beside some of them holds the same model as llama.cpp's converter names and changes it
(`conversion/{granite,falcon_h1,nemotron,qwen,mamba}.py`), written by the `gguf` package without a tokenizer. Matrices are
BF16, all else is F32.
"""

import argparse
import collections
import json
import pathlib
import random
import shutil

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file

import corpus
import goldens
from styles import STYLES

torch.set_num_threads(1)

# Least distances: of the two largest logits, and of the scores of the last chosen expert and the next.
MARGIN, CLEAR = 0.1, 0.004
STEPS = 8
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

GRANITE = dict(
    hidden_size=48, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5,
    intermediate_size=56, shared_intermediate_size=56, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=6,
    mamba_d_head=16, mamba_d_state=20, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=256,
    embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=3.0,
    position_embedding_type="nope", tie_word_embeddings=True,
)
FALCON = dict(
    hidden_size=44, intermediate_size=60, num_hidden_layers=3, num_attention_heads=5, num_key_value_heads=1, head_dim=12,
    max_position_embeddings=512, mamba_d_ssm=72, mamba_n_heads=6, mamba_d_head=12, mamba_d_state=20, mamba_n_groups=1,
    mamba_d_conv=4, mamba_rms_norm=False, mamba_norm_before_gate=False, tie_word_embeddings=False,
    embedding_multiplier=5.5, lm_head_multiplier=0.3, mlp_multipliers=[0.9, 0.6], key_multiplier=0.4,
    attention_in_multiplier=1.25, attention_out_multiplier=0.8, ssm_multipliers=[0.7, 0.9, 0.8, 1.1, 0.6],
    ssm_in_multiplier=1.2, ssm_out_multiplier=0.7, rope_parameters={"rope_type": "default", "rope_theta": 1e11},
)
NEMOTRON = dict(
    hidden_size=48, intermediate_size=68, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
    max_position_embeddings=512, ssm_state_size=20, mamba_num_heads=8, mamba_head_dim=10, n_groups=2, conv_kernel=4,
    chunk_size=128, layer_norm_epsilon=1e-5, tie_word_embeddings=False,
)
MODELS = {
    "granite-h": ("GraniteMoeHybrid", dict(
        GRANITE, num_hidden_layers=5, layer_types=["mamba", "mamba", "attention", "mamba", "attention"],
    )),
    "granite-moe": ("GraniteMoeHybrid", dict(
        GRANITE, num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], num_local_experts=7,
        num_experts_per_tok=3, intermediate_size=32, shared_intermediate_size=40, mamba_n_groups=2,
    )),
    "granite-rope": ("GraniteMoeHybrid", dict(
        GRANITE, num_hidden_layers=3, layer_types=["attention"] * 3, position_embedding_type="rope",
        tie_word_embeddings=False, **ROPE,
    )),
    "falcon-h1": ("FalconH1", FALCON),
    "falcon-norm": ("FalconH1", dict(
        FALCON, num_hidden_layers=2, mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_n_groups=2, mamba_proj_bias=True,
        projectors_bias=True, attention_bias=True, mlp_bias=True, time_step_limit=(0.2, 0.9), tie_word_embeddings=True,
    )),
    "nemotron-h": ("NemotronH", dict(
        NEMOTRON, hybrid_override_pattern="M-M*-M-",
    )),
    "nemotron-moe": ("NemotronH", dict(
        NEMOTRON, hybrid_override_pattern="ME*EM", n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=36,
        moe_shared_expert_intermediate_size=52, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=1, topk_group=1,
    )),
    "qwen3-next": ("Qwen3Next", dict(
        hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
        max_position_embeddings=512, full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=12, linear_value_head_dim=16, linear_conv_kernel_dim=4, num_experts=7, num_experts_per_tok=3,
        moe_intermediate_size=20, shared_expert_intermediate_size=36, norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )),
}


def other_sizes(name, settings, seed):
    """The same switches with other sizes."""
    rng = random.Random(f"{name} {seed}")
    changed = dict(settings)
    group, kv = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
    changed |= {"num_attention_heads": group * kv, "num_key_value_heads": kv}
    family = MODELS[name][0]
    groups, each, dim, state = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([8, 12, 14]), rng.choice([10, 16, 28])
    heads = groups * each
    if family == "GraniteMoeHybrid":
        dim *= 2 if heads * dim % 2 else 1
        hidden = heads * dim // 2
        changed |= {"mamba_n_heads": heads, "mamba_d_head": dim, "mamba_d_state": state, "mamba_n_groups": groups}
        while hidden % (2 * group * kv):
            hidden, changed["mamba_n_heads"] = hidden + heads * dim // 2, changed["mamba_n_heads"] + heads
        changed |= {"hidden_size": hidden, "mamba_d_conv": rng.choice([2, 3, 5])}
    elif family == "FalconH1":
        changed |= {
            "mamba_n_heads": heads, "mamba_d_head": dim, "mamba_d_state": state, "mamba_n_groups": groups,
            "mamba_d_ssm": heads * dim, "mamba_d_conv": rng.choice([2, 3, 5]), "hidden_size": rng.choice([36, 52, 64]),
        }
    elif family == "NemotronH":
        changed |= {
            "mamba_num_heads": heads, "mamba_head_dim": dim, "ssm_state_size": state, "n_groups": groups,
            "conv_kernel": rng.choice([2, 3, 5]), "hidden_size": rng.choice([36, 52, 64]), "use_bias": True, "mlp_bias": True,
        }
    else:
        changed |= {
            "linear_num_key_heads": groups, "linear_num_value_heads": heads, "linear_key_head_dim": state,
            "linear_value_head_dim": dim, "linear_conv_kernel_dim": rng.choice([2, 3, 5]), "hidden_size": rng.choice([36, 52, 64]),
        }
    return changed


@torch.no_grad()
def draw(model):
    centred = model.config.model_type == "qwen3_next"
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.uniform_(0.2, 6.0).log_()
        elif name.endswith("dt_bias"):
            # Steps of Nemotron above `time_step_min`, which its class applies in prompts alone.
            p.uniform_(-1.0 if model.config.model_type == "nemotron_h" else -3.0, 0.5)
        elif name.endswith(".D"):
            p.normal_(1.0, 0.4)
        elif "norm" in name and p.dim() == 1:
            p.normal_(0.0 if centred and "linear_attn" not in name else 1.0, 0.25)
        elif name.endswith("bias"):
            p.normal_(0, 0.2)
        elif "embed" in name:
            p.normal_(0, 1.0 if model.config.model_type in ("nemotron_h", "qwen3_next") else 0.3)
        elif "conv1d" in name:
            p.normal_(0, 0.7)
        elif name == "lm_head.weight":
            # Against the factors of logits.
            scaled = model.config.model_type in ("granitemoehybrid", "falcon_h1")
            p.normal_(0, (6 if scaled else 2.5) * p.shape[-1] ** -0.5)
        else:
            p.normal_(0, 1.5 * p.shape[-1] ** -0.5)
        p.copy_(p.to(torch.bfloat16))
        if ".experts." in name:
            # Rows on a grid that int8 with one scale a row holds exactly, in the type that the file has.
            scale = 2.0 ** (p.abs().amax(-1, keepdim=True) / 127).log2().ceil()
            rounded = (p / scale).round()
            largest = rounded.abs() == rounded.abs().amax(-1, keepdim=True)
            p.copy_(torch.where(largest, rounded.sign() * 127, rounded) * scale)
        elif name.endswith("gate.weight") or name.endswith("router.weight"):
            p.copy_((2 * p.shape[-1] ** -0.5 * torch.randn_like(p)).to(torch.bfloat16))
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.normal_(0, 0.4)


class Choices:
    """Distances of the last chosen score from the next, of all routers."""

    def __init__(self, model):
        self.least, self.count = float("inf"), 0
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self.note)
                self.count += 1

    def note(self, module, inputs, output):
        scores = output[0].float()
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            scores = scores.sigmoid() + bias
        top = scores.topk(module.top_k + 1, dim=-1).values
        self.least = min(self.least, (top[:, -2] - top[:, -1]).min().item())


@torch.no_grad()
def greedy(model, prompt, ends):
    """Ids and logits by a forward pass over the whole text for each token, and how the answer ends."""
    ids, rows = list(prompt), []
    while True:
        rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float())
        ids.append(int(rows[-1].argmax()))
        out = ids[len(prompt) :]
        if out[-1] in ends or len(out) == STEPS:
            return out, torch.stack(rows), "eos" if out[-1] in ends else "length"


def record(model, tok, style, ends):
    """Least distance of choices, cases, logits, least margin."""
    choices, tensors, cases, worst = Choices(model), {}, [], float("inf")
    texts = corpus.paragraphs(5)
    long = next(text for text in texts if len(style.encode(tok, text)) > 75)
    for id, text in (("short", "The river"), ("middle", texts[0][:40]), ("long", long)):
        # More than a chunk of 64; less where each token decides.
        ids = style.encode(tok, text)[: 77 if choices.count == 0 else 40]
        got, rows, finish = greedy(model, ids, set(ends))
        worst = min(worst, goldens.least_margin(rows))
        tensors[f"{id}.logits"] = rows.contiguous()
        cases.append({
            "id": id, "prompt": tok.decode(ids, skip_special_tokens=False), "prompt_ids": ids, "output_ids": got,
            "finish": finish, "text": tok.decode(got, skip_special_tokens=True), "logits_steps": list(range(len(got))),
        })
    return choices.least, cases, tensors, worst


def as_published(name, family, path):
    """Keys of `config.json` in the spelling of published checkpoints of the class."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters", None) or {}
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    config["torch_dtype"] = config.pop("dtype", "bfloat16")
    if family == "GraniteMoeHybrid":
        config["layer_types"] = [kinds[kind] for kind in config["layer_types"]]
        config |= {"rope_theta": rope.get("rope_theta", 10000), "rope_scaling": None, "normalization_function": "rmsnorm"}
        config.pop("time_step_limit", None)
    elif family == "FalconH1":
        for gone in ("layers_block_type", "layer_types"):
            config.pop(gone, None)
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "attn_layer_indices": None, "mamba_use_mlp": True}
        if name == "falcon-h1":
            config.pop("time_step_limit", None)
    elif family == "NemotronH":
        for gone in ("layers_block_type", "layer_types", "mtp_layers_block_type"):
            config.pop(gone, None)
        pattern = MODELS[name][1]["hybrid_override_pattern"]
        # Published files have it, though JSON does not.
        config |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "time_step_limit": [0.0, float("inf")]}
    elif family == "Qwen3Next":
        config.pop("layer_types", None)
        config |= {
            "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"], "rope_scaling": None,
            "full_attention_interval": MODELS[name][1]["full_attention_interval"], "decoder_sparse_step": 1, "mlp_only_layers": [],
        }
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def produce(name, out, unseen=None):
    family, settings = MODELS[name]
    if unseen is not None:
        settings = other_sizes(name, settings, unseen)
    style = STYLES["qwen"]
    tok = style.train(corpus.paragraphs(5), 300, "qwen2")
    ends = sorted(style.ends(tok))
    ids = {"bos_token_id": None, "eos_token_id": ends[0], "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(**settings, **ids, vocab_size=tok.get_vocab_size())
    build = getattr(transformers, f"{family}ForCausalLM")
    for attempt in range(400):
        torch.manual_seed(attempt)
        model = build._from_config(config, **EAGER).float().eval()
        draw(model)
        choices, cases, rows, margin = record(model, tok, style, ends)
        print(f"{name} {attempt}: margin {margin:.3f}, choices {choices:.4f}", flush=True)
        short = min(len(case["output_ids"]) for case in cases)
        if margin >= MARGIN and choices >= CLEAR and short > 3:
            break
    else:
        raise SystemExit("no draw has clear margins")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stored = model
    for p in stored.parameters():
        p.data = p.data.to(torch.bfloat16)
    shard = {"max_shard_size": "120KB"} if name == "granite-moe" else {}
    stored.save_pretrained(out, save_original_format=True, **shard)
    style.write(tok, out, 512)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[0]}) + "\n")
    as_published(name, family, out / "config.json")
    model = build.from_pretrained(out, dtype=torch.float32, **EAGER).eval()
    again = record(model, tok, style, ends)
    apart = max((rows[id] - again[2][id]).abs().max().item() for id in rows)
    assert apart < 1e-5, f"the file holds another model, {apart}"
    for case in cases:
        found = model.generate(torch.tensor([case["prompt_ids"]]), max_new_tokens=STEPS, do_sample=False)[0]
        got = found[len(case["prompt_ids"]) :].tolist()[: len(case["output_ids"])]
        # Steps with a cache do not limit the time step.
        assert name == "falcon-norm" or got == case["output_ids"], (case["id"], got)
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": out.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": attempt, "eos_ids": ends, "min_margin": round(margin, 4),
        "cases": cases, "chat": [],
    })
    save_file(again[2], out / "goldens.safetensors", metadata={"format": "pt"})
    names = sorted({key for file in out.glob("model*.safetensors") for key in load_file(file)})
    print(f"{name}: {sum(file.stat().st_size for file in out.iterdir())} bytes, {names[:12]}")
    for file in out.iterdir():
        file.chmod(0o644)


GGUF = {
    "granite-moe": "granitehybrid", "falcon-h1": "falcon-h1", "nemotron-h": "nemotron_h", "nemotron-moe": "nemotron_h_moe",
    "qwen3-next": "qwen3next",
}


def permuted(weight, heads):
    """`LlamaModel.permute` of the converter."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def converted(kind, config, tensors):
    """Names as the package's table has them for the checkpoint's, and values, after `modify_tensors`."""
    experts = collections.defaultdict(dict)
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1)
    for name, value in tensors.items():
        part = name.rsplit(".", 2)[-2]
        if name.endswith("A_log"):
            value = -value.exp()
        if kind != "qwen3next" and name.endswith(("A_log", ".D")):
            value = value.reshape(-1, 1)
        if "conv1d.weight" in name:
            value = value.squeeze()
        if kind != "qwen3next" and name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            value = value.reshape(groups, -1)
        if kind == "qwen3next" and name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + 1
        if kind in ("granitehybrid", "nemotron_h", "nemotron_h_moe") and part in ("q_proj", "k_proj"):
            value = permuted(value, config.num_attention_heads if part == "q_proj" else config.num_key_value_heads)
        if kind == "falcon-h1":
            inner, own = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
            sizes = (inner, inner, own, own, config.mamba_n_heads)
            parts = torch.cat([torch.full((n, 1), m) for n, m in zip(sizes, config.ssm_multipliers)])
            attention = config.attention_in_multiplier
            factors = {
                "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0], "q_proj": attention,
                "v_proj": attention, "k_proj": attention * config.key_multiplier, "o_proj": config.attention_out_multiplier,
                "out_proj": config.ssm_out_multiplier, "lm_head": config.lm_head_multiplier,
                "embed_tokens": config.embedding_multiplier, "in_proj": parts * config.ssm_in_multiplier,
            }
            value = value * factors.get(part, 1.0)
        if ".experts." in name:
            layer, rest = name.split(".experts.")
            number, which, _ = rest.split(".")
            experts[f"{layer.replace('backbone', 'model').replace('mixer', 'mlp')}.experts.{which}.weight"][int(number)] = value
            continue
        name = name.replace(".dt_bias", ".dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("input_linear.weight"):
            gate, up = value.chunk(2, dim=-2)
            end = "exps" if "block_sparse" in name else "shexp"
            bid = name.split(".")[2]
            yield None, f"blk.{bid}.ffn_gate_{end}.weight", gate
            yield None, f"blk.{bid}.ffn_up_{end}.weight", up
        elif name.endswith("in_proj_qkvz.weight"):
            heads, dk = config.linear_num_key_heads, config.linear_key_head_dim
            dv = config.linear_num_value_heads // heads * config.linear_value_head_dim
            q, k, v, z = value.reshape(heads, -1, value.shape[-1]).split([dk, dk, dv, dv], dim=1)
            bid = name.split(".")[2]
            yield None, f"blk.{bid}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            yield None, f"blk.{bid}.attn_gate.weight", z.flatten(0, 1)
        else:
            yield name, None, value
    for name, parts in experts.items():
        yield name, None, torch.stack([parts[number] for number in sorted(parts)])


def write_gguf(name, folder):
    kind = GGUF[name]
    config = transformers.AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(folder.parent / f"{name}.gguf", kind)
    kinds = getattr(config, "layer_types", None) or ["hybrid"] * config.num_hidden_layers
    attention = [kind in ("full_attention", "attention", "hybrid") for kind in kinds]
    writer.add_block_count(len(kinds))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon)
    if kind in ("falcon-h1", "qwen3next"):
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    else:
        writer.add_head_count_kv([config.num_key_value_heads if own else 0 for own in attention])
    if kind != "granitehybrid":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind.startswith("nemotron"):
        width = config.moe_intermediate_size if kind.endswith("moe") else config.intermediate_size
        writer.add_feed_forward_length([width if own in ("mlp", "moe") else 0 for own in kinds])
        inner, sizes = config.mamba_num_heads * config.mamba_head_dim, (config.conv_kernel, config.ssm_state_size)
        sizes += (config.n_groups, config.mamba_num_heads)
    elif kind == "qwen3next":
        writer.add_feed_forward_length(config.intermediate_size)
        inner = config.linear_num_value_heads * config.linear_value_head_dim
        sizes = config.linear_conv_kernel_dim, config.linear_key_head_dim, config.linear_num_key_heads
        sizes += (config.linear_num_value_heads,)
        writer.add_full_attention_interval(MODELS[name][1]["full_attention_interval"])
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        inner = config.mamba_n_heads * config.mamba_d_head
        sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_conv_kernel(sizes[0])
    writer.add_ssm_state_size(sizes[1])
    writer.add_ssm_group_count(sizes[2])
    writer.add_ssm_time_step_rank(sizes[3])
    if kind == "granitehybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(False)
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if kind in ("granitehybrid", "nemotron_h_moe", "qwen3next"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3next":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "nemotron_h_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
    number = {arch: id for id, arch in gguf.MODEL_ARCH_NAMES.items()}[kind]
    table = gguf.get_tensor_name_map(number, len(kinds))
    tensors = {key: value.float() for file in sorted(folder.glob("model*.safetensors")) for key, value in load_file(file).items()}
    for ours, theirs, value in converted(kind, config, tensors):
        theirs = theirs or table.get_name(ours, try_suffixes=(".weight", ".bias"))
        assert theirs, ours
        stored = value.to(torch.bfloat16).float()
        value = value.contiguous().numpy()
        # Multiplied weights need more bits than BF16 has.
        matrix = value.ndim >= 2 and not any(part in theirs for part in ("ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d"))
        if matrix and bool((stored == torch.from_numpy(value)).all()):
            data = gguf.quants.quantize(value, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(theirs, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(theirs, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder.parent / f"{name}.gguf").chmod(0o644)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("name", choices=[*MODELS, "all"])
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--unseen", type=int)
    arguments.add_argument("--gguf", action="store_true", help="only the GGUF file of the folder that is there")
    given = arguments.parse_args()
    if given.gguf:
        write_gguf(given.name, given.out)
    elif given.name == "all":
        for name in MODELS:
            produce(name, given.out / name)
        for name in GGUF:
            write_gguf(name, given.out / name)
    else:
        produce(given.name, given.out, given.unseen)


if __name__ == "__main__":
    main()
