"""Trains the tiny models of Qwen3-VL and of Qwen3.5 on drawn images and writes them with their goldens; what those of
Qwen2.5-VL need, too, which `qwen3vl_unseen.py` draws. See README.md."""

import argparse
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.video_utils import VideoMetadata

import chatml
import corpus
import goldens
import drawn_images
import training
from training import IGNORE

# Frames of the video in a second, unless the specification has another number.
FPS = 2
HALF = [0.5] * 3
# The configuration class and the model class of `transformers`.
FAMILIES = {
    "qwen3vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
}
# Of these a video is one run of placeholders, and published checkpoints are flat.
OLDER = ("qwen2_5_vl", "qwen2_vl")
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
ADDED = chatml.ADDED[:3] + [(mark, True) for mark in MARKS]
ENDS = ("<|im_end|>", "<|endoftext|>")
# The published template without tools.
TEMPLATE = r"""{%- set image_count = namespace(value=0) %}
{%- set video_count = namespace(value=0) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {%- set image_count.value = image_count.value + 1 %}
                {%- if add_vision_id %}Image {{ image_count.value }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif content.type == 'video' or 'video' in content %}
                {%- set video_count.value = video_count.value + 1 %}
                {%- if add_vision_id %}Video {{ video_count.value }}: {% endif -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
# Qwen3.5 does not think unless asked. What says so is not repeated in the next turn.
THINK = "<think>\n\n</think>\n\n"
TEMPLATES = {"qwen3vl": TEMPLATE, "qwen2_5_vl": TEMPLATE, "qwen2_vl": TEMPLATE, "qwen3_5": TEMPLATE.replace("assistant\\n' }}", f"assistant\\n{THINK}' }}}}".replace("\n", "\\n"))}

# What an image becomes; the first alone in a tower without deepstack.
FEATURES = ("embeds", "deepstack_0", "deepstack_1", "deepstack_2")
DESCRIBE, COLOURS = "Describe this image.", "Which colours are there?"
FACTS = corpus.FACTS[:6]


def added(spec):
    """The added tokens of the tokenizer, with the think marks where the family has them."""
    return chatml.ADDED + ADDED[3:] if spec["family"] == "qwen3_5" else ADDED


def drawn(spec):
    """The images of a tiny model."""
    return {id: value for id, value in drawn_images.IMAGES.items() if id in spec.get("images", drawn_images.IMAGES)}


def caption(id):
    return drawn_images.IMAGES[id][1]


def user(*content):
    """A message; images are ("image", id), the video is ("video",), anything else is text."""
    parts = [{"type": c[0], "id": c[-1]} if isinstance(c, tuple) else {"type": "text", "text": c} for c in content]
    return {"role": "user", "content": parts}


def say(text):
    return {"role": "assistant", "content": text}


def image(id):
    return ("image", id)


# id, mode, messages, answer.
def conversations(known):
    out = []
    for id in known:
        for mode in ("native", "fixed"):
            out.append((f"{mode}-{id}", mode, [user(image(id), DESCRIBE)], caption(id)))
            out.append((f"end-{mode}-{id}", mode, [user(COLOURS, image(id))], drawn_images.IMAGES[id][2]))
            out.append((f"middle-{mode}-{id}", mode, [user("Look at ", image(id), " here. " + DESCRIBE)], caption(id)))
            turns = [user(image(id), DESCRIBE), say(caption(id)), user(COLOURS)]
            out.append((f"turns-{mode}-{id}", mode, turns, drawn_images.IMAGES[id][2]))
    for a, b in (("boat", "tower"), ("tower", "boat"), ("train", "fish"), ("cross", "rings"), ("rings", "cross")):
        for mode in ("native", "fixed") if a in known and b in known else ():
            answer = f"First: {caption(a)} Then: {caption(b)}"
            out.append((f"two-{mode}-{a}-{b}", mode, [user(image(a), image(b), "Compare them.")], answer))
    out.append(("video", "native", [user(("video",), "What happens?")], drawn_images.VIDEO[1]))
    out.append(("sky", "native", [user(corpus.CHATS[0]["turns"][0][0])], corpus.CHATS[0]["turns"][0][1]))
    return out


# The goldens. Steps of `full` are recorded with all their logits.
RECORDED = [f"native-{id}" for id in drawn_images.IMAGES] + [
    "fixed-boat", "fixed-tower", "fixed-cross", "fixed-rings", "end-native-train", "end-fixed-boat", "middle-native-tower",
    "middle-fixed-rings", "two-native-train-fish", "two-native-boat-tower", "two-fixed-cross-rings", "video", "sky",
]
FULL = ("native-tower", "two-native-train-fish", "fixed-boat", "video")
TURNS = [("native", "boat"), ("fixed", "tower")]
PLAIN = [("native", "fish"), ("fixed", "cross")]


def normalisation(spec):
    return {"image_mean": spec.get("mean", HALF), "image_std": spec.get("std", HALF)}


class Vision:
    """Images as the processors make them: `pixel_values` and grids, by mode."""

    def __init__(self, spec):
        v = spec["vision"]
        sizes = {"patch_size": v["patch_size"], "merge_size": v["spatial_merge_size"], "temporal_patch_size": v["temporal_patch_size"]}
        self.family, self.whole, self.fps = spec["family"], spec["family"] in OLDER, spec.get("fps", FPS)
        video_processor = Qwen2VLVideoProcessor if self.whole else Qwen3VLVideoProcessor
        self.native = Qwen2VLImageProcessor(size=spec["image"], **sizes, **normalisation(spec))
        self.video_processor = video_processor(
            size=spec["video"], **sizes, **normalisation(spec), cap_pixels_per_frame=False, do_sample_frames=False
        )
        self.side, self.merge = spec["fixed"], v["spatial_merge_size"] ** 2
        self.known = {}

    def image_of(self, id, mode):
        if (id, mode) not in self.known:
            drawn = drawn_images.draw(id)
            more = {}
            if mode == "fixed":
                tensor = torch.from_numpy(np.array(drawn)).permute(2, 0, 1)
                cubic = torchvision.transforms.InterpolationMode.BICUBIC
                drawn = torchvision.transforms.v2.functional.resize(tensor, [self.side, self.side], cubic, antialias=True)
                more = {"do_resize": False}
            found = self.native(images=[drawn], return_tensors="pt", **more)
            self.known[id, mode] = (found["pixel_values"], found["image_grid_thw"])
        return self.known[id, mode]

    def video(self):
        if "video" not in self.known:
            frames = np.stack([np.array(f) for f in drawn_images.frames()])
            metadata = VideoMetadata(total_num_frames=len(frames), fps=self.fps, frames_indices=list(range(len(frames))))
            found = self.video_processor(videos=[frames], video_metadata=[metadata], return_tensors="pt")
            times = [k / self.fps for k in range(len(frames))]
            times += times[-1:] * (len(times) % 2)
            means = [(a + b) / 2 for a, b in zip(times[::2], times[1::2])]
            self.known["video"] = (found["pixel_values_videos"], found["video_grid_thw"], means)
        return self.known["video"]

    def pieces(self, part, mode):
        """What stands for the placeholder of a part, as the processor of transformers 5.23 writes it."""
        if part["type"] == "image":
            _, grid = self.image_of(part["id"], mode)
            return "<|image_pad|>", "<|image_pad|>" * (int(grid.prod()) // self.merge)
        _, grid, times = self.video()
        if self.whole:
            return "<|video_pad|>", "<|video_pad|>" * (int(grid.prod()) // self.merge)
        pads = "<|video_pad|>" * (int(grid[0, 1:].prod()) // self.merge)
        return "<|video_pad|>", "".join(f"<{t:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for t in times)


def parts(messages):
    return [c for m in messages if not isinstance(m["content"], str) for c in m["content"] if c["type"] != "text"]


def expand(rendered, media, vision, mode):
    """Replaces placeholders, in order, by what stands for their parts."""
    out, rest = "", rendered
    for part in media:
        marker, pieces = vision.pieces(part, mode)
        before, rest = rest.split(marker, 1)
        out += before + pieces
    return out + rest


def render(messages, family):
    return render_jinja_template(conversations=[messages], chat_template=TEMPLATES[family], add_generation_prompt=True)[0][0]


def inputs(tok, rows, vision):
    """Arguments of the model for a batch of (ids, parts, mode), padded on the right."""
    width = max(len(ids) for ids, _, _ in rows)
    ids = torch.tensor([r[0] + [0] * (width - len(r[0])) for r in rows])
    mask = torch.tensor([[1] * len(r[0]) + [0] * (width - len(r[0])) for r in rows])
    kinds = (ids == tok.token_to_id("<|image_pad|>")).int() + 2 * (ids == tok.token_to_id("<|video_pad|>")).int()
    out = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds}
    media = [(p, mode) for _, ps, mode in rows for p in ps]
    stills = [vision.image_of(p["id"], mode) for p, mode in media if p["type"] == "image"]
    films = [vision.video() for p, _ in media if p["type"] == "video"]
    if stills:
        out |= {"pixel_values": torch.cat([s[0] for s in stills]), "image_grid_thw": torch.cat([s[1] for s in stills])}
    if films:
        out |= {"pixel_values_videos": torch.cat([f[0] for f in films]), "video_grid_thw": torch.cat([f[1] for f in films])}
        if vision.family == "qwen2_5_vl":
            out["second_per_grid_ts"] = torch.tensor([vision.video_processor.temporal_patch_size / vision.fps] * len(films))
    return out


def sequences(tok, vision, spec):
    """(ids, labels, parts, mode) of everything to learn."""
    encode = lambda text: tok.encode(text, add_special_tokens=False).ids
    out = []
    for text in FACTS:
        ids = encode(text + ENDS[1])
        out.append((ids, ids, [], "native"))
    for _, mode, messages, answer in conversations(drawn(spec)):
        head = encode(expand(render(messages, spec["family"]), parts(messages), vision, mode))
        tail = encode(answer + ENDS[0])
        out.append((head + tail, [IGNORE] * len(head) + tail, parts(messages), mode))
    for mode, id in spec.get("plain", PLAIN):
        head, tail = encode(plain(vision, mode, id)), encode(" " + caption(id) + ENDS[1])
        out.append((head + tail, [IGNORE] * len(head) + tail, [{"type": "image", "id": id}], mode))
    return out


def plain(vision, mode, id):
    """An image and text without a template."""
    part = {"type": "image", "id": id}
    return "<|vision_start|>" + vision.pieces(part, mode)[1] + "<|vision_end|>Seen:"


def tokenizer(spec):
    texts = FACTS + [a for _, _, _, a in conversations(drawn(spec))] + [DESCRIBE, COLOURS, "Compare them. What happens? Look at here. Seen: seconds"]
    return chatml.train_tokenizer(texts, spec["tokenizer_size"], spec["split"], added(spec))


def make(spec, tok):
    """A model with the weights that `transformers` begins with."""
    token = tok.token_to_id
    config_class, model_class = FAMILIES[spec["family"]]
    config = config_class(
        text_config=spec["text"], vision_config=spec["vision"], tie_word_embeddings=spec["tie_word_embeddings"],
        image_token_id=token("<|image_pad|>"), video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"), vision_end_token_id=token("<|vision_end|>"),
    )
    config._attn_implementation = "eager"
    return model_class(config)


@torch.no_grad()
def scatter(model):
    """Starts weights apart from their defaults, so that mistakes with them show in features and logits."""
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            p.add_(0.2 * torch.randn_like(p))
        elif name.endswith("A_log"):
            p.uniform_(math.log(0.02), math.log(2.0))
        elif name.endswith("dt_bias"):
            p.uniform_(-2.0, 0.5)
        elif name.endswith("bias"):
            p.normal_(0, 0.1)
        elif "pos_embed" in name:
            p.normal_(0, 0.4)
        elif "visual" in name and "patch_embed" not in name:
            p.normal_(0, 1.2 * p.shape[-1] ** -0.5)
        elif "patch_embed" in name:
            p.normal_(0, 2.0 * p[0].numel() ** -0.5)


def fit(model, tok, seqs, vision, seed, steps, lr, batch=10):
    rng, queue = random.Random(seed), []

    def learn(_):
        nonlocal queue
        if len(queue) < batch:
            queue += rng.sample(range(len(seqs)), len(seqs))
        rows, queue = [seqs[i] for i in queue[:batch]], queue[batch:]
        feed = inputs(tok, [(ids, media, mode) for ids, _, media, mode in rows], vision)
        width = feed["input_ids"].shape[1]
        labels = torch.tensor([r[1] + [IGNORE] * (width - len(r[1])) for r in rows])
        loss = training.next_token_loss(model(**feed, use_cache=False).logits, labels)
        loss.backward()
        return f"{loss.item():.4f}"

    training.fit(model, learn, steps, lr)


def save(model, tok, spec, out):
    """Writes the checkpoint as `transformers` does, with the `config.json` of Qwen3-VL as published, unless told."""
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    dtype = getattr(torch, spec["dtype"])
    stored = type(model)(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(dtype)
    exact = dict(model.named_parameters())
    for name, p in stored.named_parameters():
        if name.endswith(tuple(spec.get("keep_f32", []))):
            p.data = exact[name].data.clone()
    ends = [tok.token_to_id(t) for t in ENDS]
    stored.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    stored.save_pretrained(out)
    if spec["family"] == "qwen3vl" and spec.get("config_keys", "old") == "old":
        old_keys(out / "config.json")
    if spec["family"] in OLDER and spec["config_keys"] == "old":
        published(out, spec["family"])
    chatml.write_tokenizer(tok, out, spec["text"]["max_position_embeddings"], added(spec), TEMPLATES[spec["family"]])
    v = spec["vision"]
    common = {
        "patch_size": v["patch_size"], "temporal_patch_size": v["temporal_patch_size"], "merge_size": v["spatial_merge_size"],
        **normalisation(spec),
    }
    if spec["family"] == "qwen2_vl":
        # One file for images and videos, which have the same limits.
        low, high = spec["image"].values()
        kind = {"processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
        (out / "preprocessor_config.json").write_text(json.dumps({"min_pixels": low, "max_pixels": high, **common, **kind}, indent=2) + "\n")
        return
    name = "Qwen2_5_VLProcessor" if spec["family"] == "qwen2_5_vl" else "Qwen3VLProcessor"
    video = "Qwen2VLVideoProcessor" if spec["family"] == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    for name, size, kind in (
        ("preprocessor_config.json", spec["image"], {"processor_class": name, "image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", spec["video"], {"processor_class": name, "video_processor_type": video}),
    ):
        (out / name).write_text(json.dumps({"size": size, **common, **kind}, indent=2) + "\n")


def old_keys(path):
    value = json.loads(path.read_text())
    text, vision = value["text_config"], value["vision_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"], text["rope_scaling"] = rope.pop("rope_theta"), rope
    text["dtype"] = value.pop("dtype")
    vision.pop("rope_parameters", None)
    vision["model_type"] = "qwen3_vl"
    for part in (text, vision):
        part.pop("transformers_version", None)
    value["transformers_version"] = "4.57.0.dev0"
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def published(out, family):
    """The keys and the names of tensors of Qwen2.5-VL and Qwen2-VL as published: flat, with a rope of the type "mrope"."""
    value = json.loads((out / "config.json").read_text())
    text, vision = value.pop("text_config"), value["vision_config"]
    rope = text.pop("rope_parameters")
    for key in ("layer_types", "model_type", "architectures", "transformers_version", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
        text.pop(key, None)
    for key in ("rope_parameters", "transformers_version", "dtype", "initializer_range"):
        vision.pop(key, None)
    vision["in_chans"], vision["model_type"] = vision.pop("in_channels"), family
    value["torch_dtype"] = value.pop("dtype")
    value |= text | {
        "rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
        "tie_word_embeddings": value["tie_word_embeddings"], "transformers_version": "4.49.0.dev0",
    }
    (out / "config.json").write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    tensors = load_file(out / "model.safetensors")
    names = lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    save_file({names(name): tensor for name, tensor in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def greedy(model, feed, limit, ends):
    """One forward over the prompt, then one per token, with cache; and the same logits from one forward without cache."""
    out, rows, past = [], [], None
    arguments = dict(feed)
    model.model.rope_deltas = None
    while True:
        step = model(**arguments, past_key_values=past, use_cache=True)
        past = step.past_key_values
        rows.append(step.logits[0, -1].float())
        out.append(int(rows[-1].argmax()))
        if out[-1] in ends or len(out) == limit:
            break
        arguments = {"input_ids": torch.tensor([out[-1:]])}
    rows = torch.stack(rows)
    ids = torch.cat([feed["input_ids"], torch.tensor([out[:-1]], dtype=torch.long)], 1)
    whole = dict(feed) | {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": F.pad(feed["mm_token_type_ids"], (0, len(out) - 1)),
    }
    model.model.rope_deltas = None
    found = model(**whole, use_cache=False).logits[0, feed["input_ids"].shape[1] - 1 :].float()
    assert torch.equal(found.argmax(-1), rows.argmax(-1)), "greedy tokens depend on how the logits are computed"
    return out, rows, "eos" if out[-1] in ends else "length", (found - rows).abs().max().item()


@torch.no_grad()
def features(model, pixels, grid):
    found = model.model.visual(pixels, grid)
    rows = [found.pooler_output, *getattr(found, "deepstack_features", [])]
    return {name: value.float().contiguous() for name, value in zip(FEATURES, rows)}


def levels(pixels, mean=HALF, std=HALF):
    """Pixel values as the u8 that they were made of, exactly."""
    channels = pixels.view(len(pixels), 3, -1)
    mean, std = (torch.tensor(of).view(1, 3, 1) for of in (mean, std))
    out = ((channels * std + mean) * 255).round().to(torch.uint8)
    assert ((out.float() / 255 - mean) / std - channels).abs().max() < 2e-6
    return out.view(pixels.shape)


@torch.no_grad()
def write(spec, out, seed, vision):
    model = FAMILIES[spec["family"]][1].from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(out)
    ends = set(model.generation_config.eos_token_id)
    encode = lambda text: tok.encode(text, add_special_tokens=False).ids
    tensors, cases, chats, missed, worst, apart = {}, [], [], [], (float("inf"), ""), 0.0

    def record(id, mode, ids, media, answer, full=False):
        nonlocal worst, apart
        feed = inputs(tok, [(ids, media, mode)], vision)
        if media:
            at, delta = model.model.get_rope_index(
                feed["input_ids"], feed["mm_token_type_ids"], feed.get("image_grid_thw"), feed.get("video_grid_thw"), feed["attention_mask"]
            )
            at, delta = at[:, 0].to(torch.int32), int(delta)
        else:
            at, delta = torch.arange(len(ids), dtype=torch.int32).expand(3, -1), 0
        tokens, rows, finish, drift = greedy(model, feed, 40, ends)
        apart = max(apart, drift)
        margin = goldens.least_margin(rows)
        worst = min(worst, (margin, id))
        text = tok.decode(tokens, skip_special_tokens=True)
        if text.strip() != answer.strip() or finish != "eos":
            missed.append((id, text))
        steps = list(range(len(tokens))) if full else [0]
        tensors[f"{id}.logits"] = rows[steps].contiguous()
        tensors[f"{id}.positions"] = at.contiguous()
        return {
            "prompt_ids": ids, "output_ids": tokens, "text": text, "finish": finish, "min_margin": round(margin, 4),
            "delta": delta, "logits_steps": steps,
        }

    for id, mode, messages, answer in conversations(drawn(spec)):
        if id not in spec.get("recorded", RECORDED):
            continue
        rendered = render(messages, spec["family"])
        assert rendered == auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = encode(expand(rendered, parts(messages), vision, mode))
        cases.append({"id": id, "mode": mode, "messages": messages} | record(id, mode, ids, parts(messages), answer, id in spec.get("full", FULL)))
    for mode, id in spec.get("plain", PLAIN):
        name = f"plain-{mode}-{id}"
        part = {"type": "image", "id": id}
        cases.append({"id": name, "mode": mode, "prompt": [part, {"type": "text", "text": "Seen:"}]} | record(name, mode, encode(plain(vision, mode, id)), [part], caption(id)))
    for k, text in enumerate(FACTS[:3]):
        prompt = text.rsplit(". ", 1)[0] + "."
        rest = text[len(prompt) :]
        ids = encode(prompt)
        cases.append({"id": f"text-{k}", "mode": "native", "prompt": [{"type": "text", "text": prompt}]} | record(f"text-{k}", "native", ids, [], rest))
    for mode, id in spec.get("turns", TURNS):
        messages, turns = [], []
        for question, answer in ((user(image(id), DESCRIBE), caption(id)), (user(COLOURS), drawn_images.IMAGES[id][2])):
            messages.append(question)
            ids = encode(expand(render(messages, spec["family"]), parts(messages), vision, mode))
            turns.append({"messages": list(messages)} | record(f"chat-{mode}-{id}-{len(turns)}", mode, ids, parts(messages), answer))
            messages.append(say(turns[-1]["text"]))
        chats.append({"id": f"chat-{mode}-{id}", "mode": mode, "turns": turns})

    shown = []
    for id in drawn(spec):
        for mode in ("native", "fixed"):
            pixels, grid = vision.image_of(id, mode)
            shown.append({"id": id, "mode": mode, "file": f"images/{id}.png", "size": list(drawn_images.IMAGES[id][0]), "grid": grid[0, 1:].tolist()})
            tensors[f"{id}.{mode}.pixels"] = levels(pixels)
            tensors |= {f"{id}.{mode}.{name}": value for name, value in features(model, pixels, grid).items()}
    pixels, grid, times = vision.video()
    tensors["video.pixels"] = levels(pixels)
    tensors |= {f"video.{name}": value for name, value in features(model, pixels, grid).items()}
    count = len(drawn_images.frames())
    video = {
        "files": [f"images/frame-{k}.png" for k in range(count)], "times": [k / FPS for k in range(count)],
        "size": list(drawn_images.VIDEO[0]), "grid": grid[0].tolist(), "means": times,
    }
    folder = out / "images"
    folder.mkdir()
    for id in drawn(spec):
        drawn_images.draw(id).save(folder / f"{id}.png", optimize=True)
        assert np.array_equal(np.array(Image.open(folder / f"{id}.png")), np.array(drawn_images.draw(id)))
    for k, frame in enumerate(drawn_images.frames()):
        frame.save(folder / f"frame-{k}.png", optimize=True)
    assert apart < goldens.DRIFT, f"cached and uncached logits differ by {apart}"
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens-vision/1", "model": spec["name"], "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "torchvision": torchvision.__version__.split("+")[0], "seed": seed,
        "eos_ids": sorted(ends), "min_margin": round(worst[0], 4), "fixed": spec["fixed"], "images": shown, "video": video,
        "cases": cases, "chat": chats,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    arrays = out / "arrays"
    arrays.mkdir()
    kinds = [name for name in FEATURES if f"cross.fixed.{name}" in tensors]
    for name in kinds:
        np.save(arrays / f"cross-{name}.npy", tensors[f"cross.fixed.{name}"].numpy())
    goldens.dump(out / "suite.json", suite(spec["name"], cases, ends, kinds))
    return worst, missed, apart


def suite(name, cases, ends, kinds):
    """Prompts without a template whose images are as large in either mode: for bundles of both."""
    out = []
    for case in cases:
        parts = case.get("prompt", [])
        images = [f"images/{part['id']}.png" for part in parts if part["type"] == "image"]
        if not parts or images not in ([], ["images/cross.png"]):
            continue
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        gold = [token for token in case["output_ids"] if token not in ends]
        arrays = {name: f"arrays/cross-{name}.npy" for name in kinds}
        more = {"images": images, "arrays": arrays} if images else {}
        out.append({"id": case["id"], "prompt": text, **more, "gold": gold, "max_new": len(case["output_ids"])})
    return {"schema": "npu_suite/v1", "model": name, "gate": "greedy_exact", "cases": out}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--margin", type=float, default=1.0, help="least top-1 margin over all golden steps, in logits")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    spec = json.loads(args.config.read_text())
    vision = Vision(spec)
    tok = tokenizer(spec)
    model = make(spec, tok)
    scatter(model)
    seqs = sequences(tok, vision, spec)
    print(f"{spec['name']}: {sum(p.numel() for p in model.parameters())} parameters, {len(seqs)} sequences, longest {max(len(s[0]) for s in seqs)}", flush=True)
    started = time.time()
    for attempt in range(4):
        fit(model, tok, seqs, vision, args.seed + attempt, args.steps if attempt == 0 else args.steps // 2, args.lr if attempt == 0 else args.lr / 3)
        save(model, tok, spec, args.out)
        (margin, where), missed, apart = write(spec, args.out, args.seed, vision)
        print(f"  least margin {margin:.3f} in case {where}, drift {apart:.1e}, {time.time() - started:.0f} s; missed {missed}", flush=True)
        if margin >= args.margin and not missed:
            break
    else:
        raise SystemExit("not learned")
    for f in args.out.rglob("*"):
        if f.is_file():
            f.chmod(0o644)


if __name__ == "__main__":
    main()
