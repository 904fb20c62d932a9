"""CLIP that nobody trained: random weights in small shapes, and the vectors that `transformers` makes of texts and images.

    python clip.py ../fixtures                       # encoders/clip
    python clip.py ../fixtures --unseen SEED OUT     # other sizes, and the end of texts by its id

Configuration and processor have the keys of openai/clip-vit-base-patch32. Images are those of `qwen3vl-tiny` and `media`,
and of one pixel and of one row.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

from encoders import WORDS
from goldens import dump
from siglip_embed import IMAGES, rounded

TEXTS = ["a boat", "Who wrote this?", "naïve café", "Paris is the capital of France.", "A  BOAT", "it's 42!"]


def tokenizer(out):
    """Pieces of words with an end, as of CLIP; the last token ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator([w.lower() for w in WORDS], trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>"))
    merges = [tuple(pair) for pair in json.loads(tok.to_str())["model"]["merges"]]
    vocab = {piece: i for i, piece in enumerate([*letters, *(letter + "</w>" for letter in letters)])}
    kept = []
    for a, b in merges:
        if a in vocab and b in vocab and not a.endswith("</w>") and len(kept) < 60:
            vocab.setdefault(a + b, len(vocab))
            kept.append((a, b))
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    made = CLIPTokenizer(vocab=vocab, merges=kept, model_max_length=24)
    made.save_pretrained(out)
    return len(vocab)


@torch.no_grad()
def make(fixtures, out, seed=None):
    draw = random.Random(seed)
    size = lambda least, most, default: default if seed is None else draw.randint(least, most)
    torch.manual_seed(29 if seed is None else seed)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    vocab = tokenizer(out)
    act = "quick_gelu" if seed is None else "gelu"
    text_heads, heads, patch, side = size(1, 4, 3), size(1, 4, 4), size(3, 9, 7), size(3, 6, 5)
    text = dict(
        vocab_size=vocab, hidden_size=12 * text_heads, intermediate_size=size(20, 60, 52), num_hidden_layers=size(2, 4, 3),
        num_attention_heads=text_heads, max_position_embeddings=24, hidden_act=act, layer_norm_eps=1e-5, bos_token_id=0,
        eos_token_id=2 if seed is None else vocab - 1, pad_token_id=1,
    )
    vision = dict(
        hidden_size=10 * heads, intermediate_size=size(20, 60, 44), num_hidden_layers=size(2, 4, 3), num_attention_heads=heads,
        image_size=patch * side, patch_size=patch, hidden_act=act, layer_norm_eps=1e-5,
    )
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=size(10, 50, 28))
    config._attn_implementation = "eager"
    made = rounded(CLIPModel(config))
    made.to(torch.float16).save_pretrained(out)
    model = CLIPModel.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    saved = json.loads((out / "config.json").read_text())
    saved |= {"text_config_dict": {"hidden_size": text["hidden_size"]}, "vision_config_dict": None}
    (out / "config.json").write_text(json.dumps(saved, indent=2) + "\n")
    pixels = patch * side
    processor = CLIPImageProcessor(size={"shortest_edge": pixels}, crop_size={"height": pixels, "width": pixels})
    written = {
        "crop_size": pixels, "do_center_crop": True, "do_normalize": True, "do_resize": True, "size": pixels, "resample": 3,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": processor.image_mean, "image_std": processor.image_std,
    }
    (out / "preprocessor_config.json").write_text(json.dumps(written, indent=2) + "\n")
    tok = CLIPTokenizer.from_pretrained(out)
    norm = lambda vector: [float(v) for v in vector / vector.norm()]
    texts, images = [], []
    for one in TEXTS:
        inputs = tok(one, padding="max_length", max_length=24, return_tensors="pt")
        vector = model.get_text_features(**inputs).pooler_output[0]
        texts.append({"text": one, "ids": tok(one).input_ids, "vector": norm(vector)})
    drawn = np.random.default_rng(3).integers(0, 256, (1, 90, 3), dtype=np.uint8)
    Image.fromarray(drawn).save(out / "row.png")
    Image.fromarray(drawn[:, :1]).save(out / "pixel.png")
    for name in [*IMAGES, *(f"encoders/clip/{own}.png" for own in ("row", "pixel"))]:
        path = fixtures / name if seed is None or not name.startswith("encoders") else out / Path(name).name
        image = Image.open(path).convert("RGB")
        inputs = processor(images=image, return_tensors="pt")
        vector = model.get_image_features(**inputs).pooler_output[0]
        images.append({"image": name, "size": list(image.size), "patches": side * side, "vector": norm(vector)})
    cosines = [float(np.dot(a["vector"], b["vector"])) for a in images for b in texts]
    dump(out / "goldens.json", {"transformers": transformers.__version__, "texts": texts, "images": images})
    for file in out.iterdir():
        file.chmod(0o644)
    print(out.name, f"cosines {min(cosines):.3f} to {max(cosines):.3f}", sum(f.stat().st_size for f in out.iterdir()), "bytes")
    for group in (texts, images):
        matrix = np.array([one["vector"] for one in group])
        print(np.round(matrix @ matrix.T, 3).tolist(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    fixtures = Path(sys.argv[1])
    if "--unseen" in sys.argv:
        make(fixtures, Path(sys.argv[4]), int(sys.argv[3]))
    else:
        make(fixtures, fixtures / "encoders/clip")
