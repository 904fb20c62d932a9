"""A checkpoint of Qwen3-VL, Qwen2.5-VL or Qwen2-VL nobody has seen: dimensions drawn from a seed, random weights, and what
`transformers` answers.

Nothing is trained. Random weights make every part matter, and what is compared are features, positions and logits; the
tokens are those of greedy decoding. See README.md.
"""

import argparse
import math
import random
from pathlib import Path

import numpy as np
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file

import goldens
import drawn_images
import qwen3vl
from qwen3vl import DESCRIBE, expand, image, inputs, levels, parts, render, user

# Tokens of an answer.
LIMIT = 6
# Least distance of the best logit from the second: a hundred times what two ways of computing them differ by; of
# Qwen2.5-VL what f16 leaves of it.
MARGINS = {"qwen3vl": 2e-3, "qwen2_5_vl": 0.04, "qwen2_vl": 0.07}
# Those of CLIP.
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
SHOWN = ("boat", "tower")
# id, mode, messages.
CASES = [
    ("native-boat", "native", [user(image("boat"), DESCRIBE)]),
    ("native-tower", "native", [user("Look at ", image("tower"), " here.")]),
    ("native-two", "native", [user(image("tower"), "Compare them.", image("boat"))]),
    ("fixed-boat", "fixed", [user(image("boat"), DESCRIBE)]),
    ("text", "native", [user("What happens?")]),
]
VIDEO = ("video", "native", [user(("video",), "What happens?")])


def draw(seed):
    rng = random.Random(f"qwen3vl {seed}")
    patch, merge, temporal = rng.choice([4, 6, 10]), rng.choice([2, 3]), rng.choice([1, 2])
    token = patch * merge
    kv, group, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([12, 14, 18, 22])
    hidden = 4 * rng.randint(10, 16)
    # A half is shared out as interleaving can give it: height and width take every third pair.
    most = (dim // 2) // 3
    height, width = rng.randint(1, most), rng.randint(1, most)
    depth, layers = rng.randint(3, 5), rng.randint(2, 4)
    deepstack = sorted(rng.sample(range(depth), rng.randint(1, min(layers, depth))))
    heads, vision_dim = rng.choice([1, 2, 3]), rng.choice([8, 12, 16, 20])
    size = 300 + rng.randint(0, 20)
    tied = rng.random() < 0.5
    return {
        "name": f"qwen3vl-unseen-{seed}",
        "family": "qwen3vl",
        "tokenizer_size": size,
        "split": "qwen2",
        "dtype": rng.choice(["bfloat16", "float16"]),
        "config_keys": rng.choice(["old", "new"]),
        "fixed": 3 * token,
        "image": {"shortest_edge": 4 * token**2, "longest_edge": 12 * token**2},
        "video": {"shortest_edge": 4 * token**2, "longest_edge": 24 * token**2},
        "text": {
            "vocab_size": size + rng.choice([0, 5]),
            "hidden_size": hidden,
            "intermediate_size": 4 * rng.randint(12, 24),
            "num_hidden_layers": layers,
            "num_attention_heads": kv * group,
            "num_key_value_heads": kv,
            "head_dim": dim,
            "attention_bias": rng.random() < 0.5,
            "rms_norm_eps": rng.choice([1e-5, 1e-6]),
            "rope_parameters": {
                "rope_type": "default", "rope_theta": rng.choice([1e4, 1e5, 5e6]), "mrope_interleaved": True,
                "mrope_section": [dim // 2 - height - width, height, width],
            },
            "max_position_embeddings": rng.choice([160, 192]),
            "tie_word_embeddings": tied,
        },
        "vision": {
            "hidden_size": heads * vision_dim,
            "intermediate_size": 4 * rng.randint(8, 16),
            "num_heads": heads,
            "depth": depth,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": temporal,
            "out_hidden_size": hidden,
            "num_position_embeddings": rng.choice([4, 5, 6]) ** 2,
            "deepstack_visual_indexes": deepstack,
        },
        "tie_word_embeddings": tied,
    }


def draw_windowed(seed):
    """Qwen2.5-VL: windows that cut through images, sections of a rope that differ, a rate with broken steps in time."""
    rng = random.Random(f"qwen2_5_vl {seed}")
    patch, merge = rng.choice([4, 6, 10]), rng.choice([2, 3])
    token = patch * merge
    kv, group, dim = rng.choice([1, 2, 3]), rng.choice([2, 3]), rng.choice([12, 14, 18])
    hidden = kv * group * dim
    height, width = (rng.randint(1, (dim // 2 - 1) // 2) for _ in range(2))
    depth = rng.randint(3, 4)
    heads, vision_dim = rng.choice([2, 3]), rng.choice([8, 12, 20])
    size = 300 + rng.randint(0, 20)
    tied = rng.random() < 0.5
    return {
        "name": f"qwen2_5_vl-unseen-{seed}",
        "family": "qwen2_5_vl",
        "tokenizer_size": size,
        "split": "qwen2",
        "dtype": rng.choice(["bfloat16", "float16"]),
        "config_keys": rng.choice(["old", "new"]),
        "fixed": 5 * token,
        "mean": MEAN,
        "std": STD,
        "fps": 3,
        "image": {"shortest_edge": 9 * token**2, "longest_edge": 24 * token**2},
        "video": {"shortest_edge": 3 * token**2, "longest_edge": 6 * token**2},
        "text": {
            "vocab_size": size + rng.choice([0, 5]),
            "hidden_size": hidden,
            "intermediate_size": 4 * rng.randint(12, 24),
            "num_hidden_layers": rng.randint(2, 3),
            "num_attention_heads": kv * group,
            "num_key_value_heads": kv,
            "rms_norm_eps": rng.choice([1e-5, 1e-6]),
            "rope_parameters": {
                "rope_type": "default", "rope_theta": rng.choice([1e4, 1e5, 1e6]),
                "mrope_section": [dim // 2 - height - width, height, width],
            },
            "max_position_embeddings": rng.choice([160, 192]),
            "tie_word_embeddings": tied,
        },
        "vision": {
            "hidden_size": heads * vision_dim,
            "intermediate_size": 4 * rng.randint(8, 16),
            "num_heads": heads,
            "depth": depth,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "window_size": 2 * token + patch - 1,
            "fullatt_block_indexes": list(range(1, depth, 2)),
            "tokens_per_second": 2,
        },
        "tie_word_embeddings": tied,
    }


def draw_older(seed):
    """Qwen2-VL: the sizes of a drawn Qwen2.5-VL, with a tower without windows, and limits of images for videos, too."""
    spec = draw_windowed(seed)
    vision, rng = spec["vision"], random.Random(f"qwen2_vl {seed}")
    for key in ("intermediate_size", "out_hidden_size", "window_size", "fullatt_block_indexes", "tokens_per_second"):
        del vision[key]
    vision |= {"embed_dim": vision.pop("hidden_size"), "hidden_size": spec["text"]["hidden_size"], "mlp_ratio": rng.randint(2, 4)}
    return spec | {"name": f"qwen2_vl-unseen-{seed}", "family": "qwen2_vl", "video": spec["image"], "config_keys": "old"}


DRAWS = {"qwen3vl": draw, "qwen2_5_vl": draw_windowed, "qwen2_vl": draw_older}


@torch.no_grad()
def spread(model, vocab):
    """Weights as large as a trained model's, so that all of it shows in the logits."""
    qwen3vl.scatter(model)
    for name, p in model.named_parameters():
        if "visual" in name or p.dim() < 2:
            continue
        scale = 1.0 if "embed_tokens" in name and not model.config.tie_word_embeddings else 1.2 * p.shape[-1] ** -0.5
        p.normal_(0, scale)


def write(spec, out, seed, vision):
    """The goldens, and the least margin; none where an answer has a token that text cannot have."""
    model = qwen3vl.FAMILIES[spec["family"]][1].from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tok = qwen3vl.Tokenizer.from_file(str(out / "tokenizer.json"))
    ends = set(model.generation_config.eos_token_id)
    known = [tok.token_to_id(mark) for mark, _ in qwen3vl.ADDED]
    tensors, cases, least = {}, [], math.inf
    levels_of = lambda pixels: levels(pixels, **{key.removeprefix("image_"): of for key, of in qwen3vl.normalisation(spec).items()})
    for id, mode, messages in CASES + [VIDEO] * vision.whole:
        ids = tok.encode(expand(render(messages, spec["family"]), parts(messages), vision, mode), add_special_tokens=False).ids
        feed = inputs(tok, [(ids, parts(messages), mode)], vision)
        at = torch.arange(len(ids)).expand(3, -1)
        if parts(messages):
            wanted = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "attention_mask")
            of = {key: feed[key] for key in wanted if key in feed}
            at = model.model.get_rope_index(feed["input_ids"], feed["mm_token_type_ids"], **of)[0][:, 0]
        try:
            tokens, rows, finish, drift = qwen3vl.greedy(model, feed, LIMIT, ends)
        except ValueError:  # An answer with a placeholder has no image for it.
            return None
        assert drift < goldens.DRIFT, f"{id}: cached and uncached logits differ by {drift}"
        if any(token in known or token >= tok.get_vocab_size() for token in tokens):
            return None
        least = min(least, goldens.least_margin(rows))
        tensors[f"{id}.logits"] = rows.contiguous()
        tensors[f"{id}.positions"] = at.to(torch.int32).contiguous()
        cases.append({
            "id": id, "mode": mode, "messages": messages, "prompt_ids": ids, "output_ids": tokens,
            "text": tok.decode(tokens, skip_special_tokens=True), "finish": finish, "logits_steps": list(range(len(tokens))),
        })
    if least < MARGINS[spec["family"]]:
        return None
    # Such as one token again and again, whatever is shown.
    if vision.whole and len({tuple(case["output_ids"]) for case in cases}) < 4:
        return None
    shown = []
    for id in SHOWN:
        for mode in ("native", "fixed"):
            pixels, grid = vision.image_of(id, mode)
            shown.append({"id": id, "mode": mode, "grid": grid[0, 1:].tolist()})
            tensors[f"{id}.{mode}.pixels"] = levels_of(pixels)
            tensors |= {f"{id}.{mode}.{name}": value for name, value in qwen3vl.features(model, pixels, grid).items()}
    folder = out / "images"
    folder.mkdir()
    video = {"files": [], "times": []}
    if vision.whole:
        pixels, grid, _ = vision.video()
        tensors["video.pixels"] = levels_of(pixels)
        tensors |= {f"video.{name}": value for name, value in qwen3vl.features(model, pixels, grid).items()}
        for k, frame in enumerate(drawn_images.frames()):
            video["files"].append(f"images/frame-{k}.png")
            video["times"].append(k / vision.fps)
            frame.save(folder / f"frame-{k}.png", optimize=True)
    for id in SHOWN:
        drawn_images.draw(id).save(folder / f"{id}.png", optimize=True)
        assert np.array_equal(np.array(Image.open(folder / f"{id}.png")), np.array(drawn_images.draw(id)))
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens-vision/1", "model": spec["name"], "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "torchvision": torchvision.__version__.split("+")[0], "seed": seed,
        "eos_ids": sorted(ends), "min_margin": round(least, 4), "fixed": spec["fixed"], "images": shown,
        "video": video, "cases": cases, "chat": [],
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    return least


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--family", choices=list(DRAWS), default="qwen3vl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    spec = DRAWS[args.family](args.seed)
    vision, tok = qwen3vl.Vision(spec), qwen3vl.tokenizer(spec)
    for attempt in range(400):
        torch.manual_seed(1000 * args.seed + attempt)
        model = qwen3vl.make(spec, tok)
        spread(model, spec["text"]["vocab_size"])
        qwen3vl.save(model, tok, spec, args.out)
        margin = write(spec, args.out, args.seed, vision)
        if margin is not None:
            break
    else:
        raise SystemExit("no weights whose answers are text")
    print(f"{spec['name']}: {sum(p.numel() for p in model.parameters())} parameters, attempt {attempt}, least margin {margin:.4f}")
    print(spec)
    for f in args.out.rglob("*"):
        if f.is_file():
            f.chmod(0o644)


if __name__ == "__main__":
    main()
