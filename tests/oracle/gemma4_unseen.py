"""A Gemma 4 checkpoint that nobody has seen: its configuration and weights are drawn, nothing is trained."""

import json
import random
import shutil

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import corpus
import gemma4
import goldens
from styles import STYLES

IMAGES = [("boat", (83, 61), ""), ("tree", (40, 97), "")]
CLIPS = [("noon", 13007, "the boat leaves"), ("stop", 7000, "stop")]
# Greedy tokens of weights that were not trained lie closer together than those of the tiny models.
MARGIN = 0.02
LIMIT = 8


def draw(seed):
    """A random valid configuration: layer pattern, donors, heads, window, budget, pooling, chunk."""
    rng = random.Random(seed)
    layers = rng.randint(5, 8)
    while True:
        kinds = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers - 1)] + ["full_attention"]
        shared = rng.randint(1, layers - 3)
        before, behind = kinds[: layers - shared], kinds[layers - shared :]
        if len(set(before)) == 2 and len(set(behind)) == 2:
            break
    kv = rng.choice([1, 2, 3])
    size = rng.randint(331, 349)
    vision_heads, audio_heads = rng.choice([2, 3]), rng.choice([2, 4])
    patch, pool = rng.choice([4, 5]), rng.choice([2, 3])
    chunk = rng.choice([4, 8, 9])
    mels = rng.choice([20, 28, 36])
    return {
        "name": f"gemma4-unseen-{seed}",
        "style": "gemma4",
        "tokenizer_size": size,
        "dtype": rng.choice(["bfloat16", "float16"]),
        "spelling": rng.choice(["published", "saved"]),
        "text": {
            "vocab_size": size + rng.choice([0, 3, 6]),
            "hidden_size": rng.choice([68, 84, 92]),
            "intermediate_size": rng.choice([76, 100, 108]),
            "num_hidden_layers": layers,
            "layer_types": kinds,
            "num_attention_heads": kv * rng.choice([2, 3]),
            "num_key_value_heads": kv,
            "head_dim": rng.choice([12, 16, 28]),
            "global_head_dim": rng.choice([24, 32, 48]),
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": rng.random() < 0.5,
            "sliding_window": rng.randint(6, 19),
            "hidden_size_per_layer_input": rng.choice([8, 16, 20]),
            "final_logit_softcapping": rng.choice([20.0, 30.0]),
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
                    "rope_theta": rng.choice([1e5, 1e6]),
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([5e3, 1e4])},
            },
        },
        "vision": {
            "hidden_size": rng.choice([36, 44]),
            "intermediate_size": rng.choice([52, 60]),
            "num_hidden_layers": rng.randint(1, 3),
            "num_attention_heads": vision_heads,
            "num_key_value_heads": vision_heads,
            "head_dim": rng.choice([12, 16]),
            "patch_size": patch,
            "pooling_kernel_size": pool,
            "position_embedding_size": 120,
            "use_clipped_linears": rng.random() < 0.5,
        },
        "image": {"patch_size": patch, "pooling_kernel_size": pool, "max_soft_tokens": rng.choice([70, 140])},
        "audio": {
            "hidden_size": audio_heads * rng.choice([8, 12]),
            "num_hidden_layers": rng.randint(1, 3),
            "num_attention_heads": audio_heads,
            "subsampling_conv_channels": [mels, rng.choice([4, 8])],
            "conv_kernel_size": rng.choice([3, 5]),
            "attention_chunk_size": chunk,
            "attention_context_left": chunk + 1,
            "attention_logit_cap": 3.0,  # of 50, scores of weights that were not trained would see little
            "output_proj_dims": rng.choice([40, 52]),
            "use_clipped_linears": rng.random() < 0.5,
        },
        "mels": mels,
    }


@torch.no_grad()
def spread(model):
    """Weights large enough that each layer changes what is said."""
    gemma4.scatter(model)
    for name, p in model.named_parameters():
        if name.endswith("language_model.embed_tokens.weight"):
            p.normal_(0, 0.3)
        elif name.endswith("embed_tokens_per_layer.weight"):
            p.normal_(0, 0.2)
        elif p.dim() >= 2 and "tower" not in name:
            p.normal_(0, p.shape[-1] ** -0.5)


def cases(tok):
    text = corpus.CHATS[0]["turns"][0][0]
    return [
        ("long", [{"text": text * (1 + 60 // max(len(text) // 2, 1))}]), ("short", [{"text": "The"}]),
        ("boat", [{"image": "boat"}, {"text": gemma4.ASK_IMAGE}]), ("noon", [{"audio": "noon"}, {"text": gemma4.ASK_CLIP}]),
        ("both", [{"audio": "stop"}, {"text": " and "}, {"image": "tree"}]),
    ]


@torch.no_grad()
def record(spec, out, seed, tok, style):
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    media, ends = gemma4.Media(out, spec, IMAGES, CLIPS), set(style.ends(tok))
    tensors, texts, listed, worst = {}, [], [], float("inf")
    for name, _, _ in IMAGES:
        pixels, positions, tokens = media.images[name]
        tensors[f"image.{name}.soft"] = gemma4.image_features(model, pixels, positions)
        assert tensors[f"image.{name}.soft"].shape[0] == tokens
    for name, _, _ in CLIPS:
        mel, mask, tokens = media.audios[name]
        tensors[f"audio.{name}.mel"] = mel[0].contiguous()
        tensors[f"audio.{name}.soft"] = model.model.get_audio_features(mel, mask, return_dict=True).pooler_output[0, :tokens].contiguous()
    for id, parts in cases(tok):
        ids, given = gemma4.prompt_ids(tok, media, parts), media.tensors(parts)
        got, rows, finish = gemma4.greedy(model, ids, given, LIMIT, ends)
        worst = min(worst, goldens.least_margin(rows))
        if given:
            # What is seen and heard reaches the logits.
            blank = {k: v if v.dtype in (torch.bool, torch.int64) else torch.zeros_like(v) for k, v in given.items()}
            moved = (model(input_ids=torch.tensor([ids]), use_cache=False, **blank).logits[0, -1] - rows[0]).abs().max().item()
            assert moved > 0.05, (id, moved)
        steps = list(range(min(4, len(got))))
        tensors[f"{id}.logits"] = rows[steps].contiguous()
        entry = {"id": id, "prompt_ids": ids, "output_ids": got, "text": tok.decode(got, skip_special_tokens=True), "finish": finish, "logits_steps": steps}
        if given:
            listed.append({"parts": parts} | entry)
        else:
            texts.append({"prompt": parts[0]["text"]} | entry)
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": spec["name"], "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "eos_ids": sorted(ends), "min_margin": round(worst, 4),
        "cases": texts, "chat": [], "media": listed, "media_chat": {"turns": []},
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    return worst


def produce(spec, seed, out):
    torch.use_deterministic_algorithms(True)
    style = STYLES[spec["style"]]
    texts = corpus.paragraphs(seed) + [m for c in corpus.CHATS for t in c["turns"] for m in t]
    tok = style.train(texts + [gemma4.ASK_IMAGE, gemma4.ASK_CLIP], spec["tokenizer_size"])
    spec["tokenizer_size"] = tok.get_vocab_size()
    spec["text"]["vocab_size"] = max(spec["text"]["vocab_size"], spec["tokenizer_size"])
    spec["text"]["vocab_size_per_layer_input"] = spec["text"]["vocab_size"]
    for attempt in range(20):
        torch.manual_seed(1000 * seed + attempt)
        model = gemma4.build(spec, tok, style).eval()
        spread(model)
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        gemma4.write_media(out, seed, IMAGES, CLIPS)
        media = gemma4.Media(out, spec, IMAGES, CLIPS)
        gemma4.bound(model, [(gemma4.prompt_ids(tok, media, parts), None, media.tensors(parts)) for _, parts in cases(tok)])
        gemma4.save(model, tok, spec, style, out)
        saved = out / "config.saved.json"
        if spec["spelling"] == "saved":
            saved.replace(out / "config.json")
        else:
            saved.unlink()
        margin = record(spec, out, seed, tok, style)
        print(f"  weights {attempt}: least margin {margin:.4f}", flush=True)
        if margin >= MARGIN:
            break
    else:
        raise SystemExit(f"{spec['name']}: no margin of {MARGIN} in 20 draws")
    files = [f for f in out.rglob("*") if f.is_file()]
    for f in files:
        f.chmod(0o644)
    print(f"  {out.name}: {sum(f.stat().st_size for f in files)} bytes")
