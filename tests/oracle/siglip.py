"""Tiny SmolVLM and Gemma 3 checkpoints that see, and what `transformers` answers: weights are drawn, nothing is trained.

    siglip.py smolvlm ../fixtures/smolvlm-tiny
    siglip.py gemma3 ../fixtures/gemma3-vision
    siglip.py gemma3 --unseen SEED DIR      # Gemma 3 in other shapes, for QHX_TEST_SEEING

Draws are repeated until greedy tokens are text and have clear margins. What is compared are pixels, features, logits and
tokens."""

import json
import math
import pathlib
import random
import shutil
import sys

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer

import chatml
import corpus
import drawn_images
import goldens
from styles import STYLES

# Least distance of the best logit from the second.
MARGIN = 0.08
# Least change of the logits where an image is grey.
MOVED = 0.2
LIMIT = 5
SEED = 5
DESCRIBE, COLOURS = "Describe this image.", "Which colours are there?"
TEXTS = corpus.paragraphs(SEED) + [a for _, *rest in drawn_images.IMAGES.values() for a in rest] + [DESCRIBE, COLOURS, "Compare them."]

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True, "do_rescale": True, "do_normalize": True}
TOWER = {
    "hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 24, "patch_size": 4,
}


def user(*content):
    parts = [{"type": "image", "id": c[1]} if isinstance(c, tuple) else {"type": "text", "text": c} for c in content]
    return {"role": "user", "content": parts}


def say(text):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def image(id):
    return ("image", id)


def parts(messages):
    return [c["id"] for m in messages for c in m["content"] if c["type"] == "image"]


class SmolVLM:
    """Tiles. The processor is that of Idefics 3, which SmolVLM's equals for images."""

    name, model_class = "smolvlm-tiny", transformers.SmolVLMForConditionalGeneration
    # The published template, which takes texts as strings, too.
    template = (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'] is string %}"
        "{{': ' + message['content']}}{% else %}{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}"
        "{{ '<image>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    added = [(t, True) for t in (
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
        "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>",
    )]
    bos, ends, pads = "", ("<end_of_utterance>", "<|im_end|>"), ("<image>",)
    modes = ("native", "fixed")
    # id, mode, messages.
    cases = [
        ("boat", "native", [user(image("boat"), DESCRIBE)]),
        ("two", "native", [user("Look at ", image("train"), " and ", image("tower"), ".")]),
        ("fixed", "fixed", [user(image("tower"), DESCRIBE)]),
        ("text", "native", [user("What happens?")]),
    ]

    def tokenizer(self):
        return chatml.train_tokenizer(TEXTS, 400, "qwen2", self.added)

    def encode(self, text):
        return self.processor["native"].tokenizer(text, add_special_tokens=False)["input_ids"]

    def config(self, tok):
        text = dict(
            model_type="llama", vocab_size=tok.get_vocab_size() + 3, hidden_size=60, intermediate_size=84, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=2, head_dim=10, max_position_embeddings=320, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=2,
        )
        return transformers.SmolVLMConfig(
            text_config=text, vision_config=TOWER, image_token_id=tok.token_to_id("<image>"), scale_factor=2, tie_word_embeddings=False,
        )

    def write(self, tok, out):
        chatml.write_tokenizer(tok, out, 320, self.added, self.template)
        size = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}, "resample": 1, "do_image_splitting": True}
        kinds = {"image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor", "do_pad": True}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **size, **HALF}, indent=2) + "\n")
        self.processor = {}
        for mode in self.modes:
            images = transformers.models.idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil(
                **HALF, **size | {"do_image_splitting": mode == "native"}
            )
            fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=self.ends[0])
            self.processor[mode] = transformers.Idefics3Processor(images, fast, image_seq_len=9)

    def inputs(self, rendered, ids, mode):
        """Prompt ids, and what goes into the model with them."""
        images = [drawn_images.draw(id) for id in ids]
        found = self.processor[mode](
            text=[rendered], images=[images] if images else None, add_special_tokens=False, return_tensors="pt"
        )
        feed = {k: found[k] for k in ("pixel_values", "pixel_attention_mask") if k in found}
        return found["input_ids"][0].tolist(), feed

    def features(self, model, feed):
        """Levels `[tiles, channels, side, side]`, and rows of all tiles."""
        rows = model.model.get_image_features(**feed, return_dict=True).pooler_output
        assert bool((feed["pixel_attention_mask"] == 1).all())
        return feed["pixel_values"][0], torch.cat(list(rows))


class Gemma3:
    """The tokens of an image see each other, in sliding layers within the window."""

    name, model_class, modes = "gemma3-vision", transformers.Gemma3ForConditionalGeneration, ("native",)
    bos, ends, pads = "<bos>", ("<end_of_turn>", "<eos>"), ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    style = STYLES["gemma3"]
    cases = [
        ("boat", "native", [user(image("boat"), DESCRIBE)]),
        ("two", "native", [user("Look at ", image("train"), image("tower"), "Compare them.")]),
        ("text", "native", [user("What happens when the sun goes down over the river and the lights of the town come on?")]),
    ]

    tower, pool, text = TOWER, 2, {}

    def __init__(self, seed=None):
        self.template = self.style.template
        if seed is not None:
            self.other_shapes(random.Random(f"gemma3 {seed}"))
            self.name = f"gemma3-unseen-{seed}"

    def other_shapes(self, rng):
        """Other heads, windows, layers and scales, other patches and blocks that are one token."""
        kv, group, heads = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
        layers, self.pool, patch = rng.choice([3, 5, 6]), rng.choice([1, 2, 3]), rng.choice([3, 5, 7, 8])
        kinds = ["sliding_attention", "full_attention"]
        self.text = dict(
            hidden_size=kv * group * -(-rng.choice([44, 70]) // (kv * group)), intermediate_size=rng.choice([60, 100]), num_hidden_layers=layers,
            num_attention_heads=kv * group, num_key_value_heads=kv, head_dim=rng.choice([10, 14, 20]), query_pre_attn_scalar=rng.choice([7, 30]),
            sliding_window=rng.choice([4, 20, 50]), layer_types=[kinds[i % 2] if i < 2 else rng.choice(kinds) for i in range(layers)],
            rms_norm_eps=rng.choice([1e-4, 1e-6]),
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5e4} if rng.random() < 0.5 else {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([500.0, 2e4])},
            },
        )
        self.tower = dict(
            hidden_size=heads * rng.choice([8, 12]), intermediate_size=rng.choice([40, 56]), num_hidden_layers=rng.choice([1, 2, 4]),
            num_attention_heads=heads, image_size=rng.choice([2, 3, 4]) * self.pool * patch, patch_size=patch, layer_norm_eps=rng.choice([1e-4, 1e-6]),
        )

    @property
    def side(self):
        """Tokens of a side."""
        return self.tower["image_size"] // self.tower["patch_size"] // self.pool

    def tokenizer(self):
        return self.style.train(TEXTS, 460)

    def config(self, tok):
        text = dict(
            vocab_size=tok.get_vocab_size() + 2, hidden_size=64, intermediate_size=84, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, query_pre_attn_scalar=12, sliding_window=6, max_position_embeddings=320,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
        token = tok.token_to_id
        return transformers.Gemma3Config(
            text_config=text | self.text, vision_config=self.tower | {"vision_use_head": False}, mm_tokens_per_image=self.side**2,
            image_token_index=token("<image_soft_token>"), boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
        )

    def write(self, tok, out):
        self.style.write(tok, out, 320)
        pixels = self.tower["image_size"]
        size = {"size": {"height": pixels, "width": pixels}, "resample": 2}
        kinds = {"image_processor_type": "Gemma3ImageProcessorFast", "processor_class": "Gemma3Processor", "do_pan_and_scan": None}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **size, **HALF}, indent=2) + "\n")
        images = transformers.Gemma3ImageProcessor(**HALF, **size)
        marks = {"image_token": self.pads[1], "boi_token": self.pads[0], "eoi_token": self.pads[2]}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<bos>", extra_special_tokens=marks)
        self.processor = transformers.Gemma3Processor(images, fast, image_seq_length=self.side**2)

    def inputs(self, rendered, ids, mode):
        images = [drawn_images.draw(id) for id in ids]
        found = self.processor(
            text=[rendered], images=[images] if images else None, add_special_tokens=False, return_tensors="pt"
        )
        feed = {k: found[k] for k in ("pixel_values", "token_type_ids") if k in found}
        return found["input_ids"][0].tolist(), feed if images else {}

    def features(self, model, feed):
        rows = model.model.get_image_features(feed["pixel_values"], return_dict=True).pooler_output
        return feed["pixel_values"], rows.reshape(-1, rows.shape[-1])


@torch.no_grad()
def draw(model, tok):
    """Weights as large as a trained model's, away from their defaults, so that all of it shows. Tokens that are no text
    are unlikely."""
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            p.normal_(0, 0.2)
            # Gemma's are differences from one; what a layer adds is larger than what it finds.
            p.add_(1.0 if "vision" in name or "model.text_model" in name else 1.5 if "post_" in name else 0.0)
        elif name.endswith("bias"):
            p.normal_(0, 0.1)
        elif "position_embedding" in name:
            p.normal_(0, 0.5)
        elif "patch_embedding" in name:
            p.normal_(0, 2.0 * p[0].numel() ** -0.5)
        elif name.endswith("embed_tokens.weight"):
            p.normal_(0, 0.125 if isinstance(model, transformers.Gemma3ForConditionalGeneration) else 1.0)
        elif "mm_input_projection" in name:
            p.normal_(0, p.shape[0] ** -0.5)
        elif p.dim() >= 2:
            # Logits are as far apart as a trained model's.
            p.normal_(0, (4.0 if name.startswith("lm_head") else 1.2) * p.shape[-1] ** -0.5)
    head = model.get_output_embeddings().weight
    known = {str(t) for t in tok.get_added_tokens_decoder().values()}
    for id in range(head.shape[0]):
        word = tok.decode([id], skip_special_tokens=False) if id < tok.get_vocab_size() else ""
        if not word.strip() or "\ufffd" in word or word in known:
            head[id] *= 0.3


@torch.no_grad()
def greedy(model, ids, feed, ends):
    """One forward over the prompt, then one per token, with cache; and the same logits from one forward without."""
    out, rows, past = [], [], None
    while True:
        more = feed if past is None else {}
        step = model(input_ids=torch.tensor([ids if past is None else out[-1:]]), cache=past, use_cache=True, **more)
        past = step.cache
        rows.append(step.logits[0, -1].float())
        out.append(int(rows[-1].argmax()))
        if out[-1] in ends or len(out) == LIMIT:
            break
    rows, whole = torch.stack(rows), dict(feed)
    if "token_type_ids" in whole:
        whole["token_type_ids"] = torch.nn.functional.pad(whole["token_type_ids"], (0, len(out) - 1))
    found = model(input_ids=torch.tensor([ids + out[:-1]]), use_cache=False, **whole).logits[0, len(ids) - 1 :].float()
    apart = (found - rows).abs().max().item()
    assert apart < goldens.DRIFT, apart
    return out, rows, "eos" if out[-1] in ends else "length"


def in_blocks(pixels, patch, block):
    """Levels of `[tiles, channels, side, side]` as patches, in blocks: `[tiles · patches, channels, patch²]`."""
    levels = (pixels * 127.5 + 127.5).round()
    assert ((levels - 127.5) / 127.5 - pixels).abs().max() < 1e-6
    tiles, channels, side, _ = levels.shape
    count = side // patch // block
    cut = levels.reshape(tiles, channels, count, block, patch, count, block, patch).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return cut.reshape(-1, channels, patch * patch).to(torch.uint8).contiguous()


def plain(family, parts):
    """A prompt without a template, with whatever the tokenizer adds."""
    return family.bos + "".join(family.pads[0] if part["type"] == "image" else part["text"] for part in parts)


def rendered(family, messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"bos_token": "<bos>"}
    return render_jinja_template(conversations=[messages], chat_template=family.template, add_generation_prompt=True, **names)[0][0]


@torch.no_grad()
def record(family, out, tok):
    """Cases, images, tensors and the least margin; none where an answer is no text or an image shows in no logit."""
    model = family.model_class.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    if isinstance(family, Gemma3):
        goldens.scale_as_stored(model, out)
    ends = {tok.token_to_id(t) for t in family.ends}
    known = {tok.token_to_id(str(t)) for t in tok.get_added_tokens_decoder().values()} - ends
    cases, tensors, least = [], {}, math.inf

    def answer(id, mode, messages, templated=True):
        nonlocal least
        text = rendered(family, messages) if templated else plain(family, messages[0]["content"])
        ids, feed = family.inputs(text, parts(messages), mode)
        try:
            got, rows, finish = greedy(model, ids, feed, ends)
        except ValueError:  # An answer with a placeholder has no image for it.
            return None
        if any(token in known or token >= tok.get_vocab_size() for token in got):
            return None
        least = min(least, goldens.least_margin(rows))
        if feed:
            grey = feed | {"pixel_values": torch.full_like(feed["pixel_values"], 0.1)}
            moved = (model(input_ids=torch.tensor([ids]), use_cache=False, **grey).logits[0, -1] - rows[0]).abs().max().item()
            if moved < MOVED:
                return None
        tensors[f"{id}.logits"] = rows.contiguous()
        text = tok.decode(got, skip_special_tokens=True)
        if len(set(got)) < 2 or "\ufffd" in text:
            return None
        tiles = []
        for shown in parts(messages):
            count = family.features(model, family.inputs(rendered(family, [user(image(shown))]), [shown], mode)[1])[0].shape[0]
            tiles.append(count if count > 1 else 0)
        case = {
            "id": id, "mode": mode, **({"messages": messages} if templated else {"prompt": messages[0]["content"]}),
            "tiles": tiles, "prompt_ids": ids, "output_ids": got, "text": text,
            "finish": finish, "logits_steps": list(range(len(got))),
        }
        cases.append(case)
        return case

    for id, mode, messages in family.cases:
        if answer(id, mode, messages) is None:
            return None
    # What follows a question about an image that stays in the caches.
    first = next(case for case in cases if case["id"] == "boat")
    if answer("again", "native", first["messages"] + [say(first["text"]), user(COLOURS)]) is None:
        return None
    if answer("plain", "native", [user(image("train"), "Seen:")], templated=False) is None:
        return None
    images = []
    for id in ("boat", "tower", "train"):
        for mode in family.modes:
            feed = family.inputs(rendered(family, [user(image(id))]), [id], mode)[1]
            pixels, rows = family.features(model, feed)
            tiles = pixels.shape[0] if pixels.shape[0] > 1 else 0
            tower, pool = getattr(family, "tower", TOWER), getattr(family, "pool", 2)
            side = tower["image_size"] // tower["patch_size"]
            images.append({"id": id, "mode": mode, "grid": [side, side], "tiles": tiles})
            tensors[f"{id}.{mode}.pixels"] = in_blocks(pixels, tower["patch_size"], pool)
            tensors[f"{id}.{mode}.embeds"] = rows.contiguous()
    return cases, images, tensors, least


def produce(family, out):
    tok = family.tokenizer()
    if isinstance(family, Gemma3):
        apart = [tok.encode(t, add_special_tokens=False).ids for t in ("user\n", "\n\n", "user\n\n\n")]
        assert apart[0] + apart[1] != apart[2], "texts around an image are one with their neighbours"
    for attempt in range(400):
        torch.manual_seed(attempt)
        model = family.model_class(family.config(tok)).float().eval()
        draw(model, tok)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        ends = [tok.token_to_id(t) for t in family.ends]
        model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
        model.to(torch.bfloat16).save_pretrained(out)
        family.write(tok, out)
        found = record(family, out, Tokenizer.from_file(str(out / "tokenizer.json")))
        print(f"{family.name} {attempt}: {found and found[-1]}", flush=True)
        if found and found[-1] >= MARGIN:
            break
    else:
        raise SystemExit("no draw has clear margins")
    cases, images, tensors, least = found
    folder = out / "images"
    folder.mkdir()
    for id in sorted({shown["id"] for shown in images}):
        drawn_images.draw(id).save(folder / f"{id}.png", optimize=True)
        assert np.array_equal(np.array(Image.open(folder / f"{id}.png")), np.array(drawn_images.draw(id)))
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens-vision/1", "model": family.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": attempt, "eos_ids": sorted(ends), "min_margin": round(least, 4),
        "images": images, "cases": cases,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    gold = [token for token in cases[-1]["output_ids"] if token not in ends]
    case = {"id": "plain", "prompt": "Seen:", "images": ["images/train.png"], "gold": gold, "max_new": len(cases[-1]["output_ids"])}
    goldens.dump(out / "suite.json", {"schema": "npu_suite/v1", "model": family.name, "gate": "greedy_exact", "cases": [case]})
    for file in out.rglob("*"):
        if file.is_file():
            file.chmod(0o644)


torch.set_num_threads(1)
if __name__ == "__main__":
    if "--unseen" in sys.argv:
        produce(Gemma3(int(sys.argv[3])), pathlib.Path(sys.argv[4]))
    else:
        produce({"smolvlm": SmolVLM, "gemma3": Gemma3}[sys.argv[1]](), pathlib.Path(sys.argv[2]))
