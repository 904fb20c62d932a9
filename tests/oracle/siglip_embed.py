"""SigLIP 2 that nobody trained: random weights in small shapes, and the vectors that `transformers` makes of texts and images.

    python siglip_embed.py FIXTURES [NAME…]

`siglip-fixed` takes images of one size (`SiglipModel`), `siglip-naflex` any shape (`Siglip2Model`). Images are those of
`qwen3vl-tiny` and `media`.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    Siglip2Config, Siglip2ImageProcessor, Siglip2Model, Siglip2Processor, Siglip2Tokenizer, SiglipConfig, SiglipImageProcessor,
    SiglipModel, SiglipProcessor, SiglipTokenizer,
)

from goldens import dump

TEXTS = ["a boat", "Who wrote this?", "naïve café", "Paris is the capital of France.", "A BOAT", "ÜBER Ångström"]
# What `SiglipTokenizer` does to texts before it cuts them.
PLAIN = ["A Boat", "isn't it?  -- Yes; (no)\tmaybe.", "ÜBER Ångström…", "  a_b+c  `x` {y}~\n", "Straße № 5", "!?"]
IMAGES = ["qwen3vl-tiny/images/boat.png", "qwen3vl-tiny/images/tower.png", "media/baseline.jpg.png", "media/lossless.webp.png"]
LENGTH, SIDE, PATCH = 40, 5, 8
# Patches of the graphs of images that keep their shape.
BUDGETS = [24, 60]


def rounded(model):
    """Weights that bf16 and f16 hold, larger than a fresh model's, so that attention is sharp and mistakes show."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(1.6)
            else:
                p.add_(0.2 * torch.randn_like(p))
            p.copy_(p.to(torch.bfloat16))
            p[p.abs() < 1e-4] = 0
    return model.float().eval()


def texts_of(out, left):
    """The tokenizer of another fixture, which pads, as the class of SigLIP 2 reads it. Older files name Gemma's."""
    source = out.parent / "embeddinggemma-tiny"
    shutil.copy(source / "tokenizer.json", out / "tokenizer.json")
    config = {"tokenizer_class": "GemmaTokenizer", "pad_token": "<pad>", "padding_side": "left" if left else "right"}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Siglip2Tokenizer.from_pretrained(out)


def configs(naflex):
    text = dict(
        vocab_size=481, hidden_size=36, intermediate_size=52, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=LENGTH, projection_size=48, layer_norm_eps=1e-6, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )
    vision = dict(
        hidden_size=48, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4, patch_size=PATCH, layer_norm_eps=1e-6,
    )
    if naflex:
        return Siglip2Config(text_config=text, vision_config=vision | {"num_patches": SIDE * SIDE})
    return SiglipConfig(text_config=text, vision_config=vision | {"image_size": SIDE * PATCH})


@torch.no_grad()
def make(out):
    naflex = out.name.endswith("naflex")
    torch.manual_seed(11 if naflex else 5)
    config = configs(naflex)
    config._attn_implementation = "eager"
    made = rounded((Siglip2Model if naflex else SiglipModel)(config))
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stored = type(made)(config)
    stored.load_state_dict(made.state_dict())
    stored.to(torch.float16).save_pretrained(out)
    model = type(made).from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tok = texts_of(out, naflex)
    if naflex:
        processor = Siglip2ImageProcessor(patch_size=PATCH, max_num_patches=BUDGETS[0])
    else:
        processor = SiglipImageProcessor(size={"height": SIDE * PATCH, "width": SIDE * PATCH}, resample=2)
    processor.save_pretrained(out)
    both = (Siglip2Processor if naflex else SiglipProcessor)(processor, tok)

    norm = lambda vector: [float(v) for v in vector / vector.norm()]
    texts, images = [], []
    for text in TEXTS:
        ids = tok(text).input_ids
        padded = both(text=[text], padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
        vector = model.get_text_features(input_ids=padded).pooler_output[0]
        texts.append({"text": text, "ids": ids, "vector": norm(vector)})
    for name in IMAGES:
        image = Image.open(out.parent / name).convert("RGB")
        for budget in BUDGETS if naflex else [SIDE * SIDE]:
            extra = {"max_num_patches": budget} if naflex else {}
            inputs = processor(images=image, return_tensors="pt", **extra)
            vector = model.get_image_features(**inputs).pooler_output[0]
            images.append({"image": name, "size": list(image.size), "patches": budget, "vector": norm(vector)})
    cosines = [float(np.dot(a["vector"], b["vector"])) for a in images for b in texts]
    goldens = {"transformers": transformers.__version__, "texts": texts, "images": images}
    if not naflex:
        first = SiglipTokenizer.__new__(SiglipTokenizer)
        first.do_lower_case = True
        goldens["plain"] = [[text, first.canonicalize_text(text)] for text in PLAIN]
    dump(out / "goldens.json", goldens)
    for file in out.iterdir():
        file.chmod(0o644)
    print(out.name, f"cosines {min(cosines):.3f} to {max(cosines):.3f}", sum(f.stat().st_size for f in out.iterdir()), "bytes")
    for group in (texts, images):
        matrix = np.array([one["vector"] for one in group])
        print(np.round(matrix @ matrix.T, 3).tolist(), flush=True)


def main():
    fixtures = Path(sys.argv[1])
    for name in sys.argv[2:] or ["siglip-fixed", "siglip-naflex"]:
        make(fixtures / name)


if __name__ == "__main__":
    main()
