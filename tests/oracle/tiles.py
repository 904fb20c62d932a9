"""Tiny checkpoints that see images in tiles, and what `transformers` answers: weights are drawn, nothing is trained.

    tiles.py internvl ../fixtures/vision/internvl           # in the layout of transformers, Qwen3
    tiles.py internvl-code ../fixtures/vision/internvl-code # in that of the original code, Qwen2
    tiles.py lfm2vl ../fixtures/vision/lfm2vl               # tiles, and images that keep their shape
    tiles.py docling ../fixtures/vision/docling             # Idefics 3 whose answers are marks

Draws are repeated until greedy tokens are text and have clear margins. What is compared are pixels, features, logits and
tokens."""

import json
import math
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import chatml
import drawn_images
import goldens
import siglip
from siglip import COLOURS, DESCRIBE, TEXTS, greedy, image, parts, plain, say, user

# Least distance of the best logit from the second.
MARGIN = 0.1
# Least change of the logits where an image is grey.
MOVED = 0.2
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
# Images that are no drawings: one pixel, and sides that differ much.
STRIPES = {"dot": (1, 1), "wide": (190, 3), "tall": (2, 150), "strip": (60, 5), "post": (4, 66)}


def draw_image(id):
    if id not in STRIPES:
        return drawn_images.draw(id)
    w, h = STRIPES[id]
    y, x = np.mgrid[0:h, 0:w]
    levels = np.stack([x * 200 // w + 40, y * 120 // h + 90, 255 - x * 150 // w], -1)
    return Image.fromarray(levels.astype(np.uint8), "RGB")


class InternVL:
    """Tiles of one size, the thumbnail behind them, nothing between."""

    name, model_class = "internvl", transformers.InternVLForConditionalGeneration
    # The published template.
    template = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
        "{{ '<IMG_CONTEXT>\\n' }}{% elif content['type'] == 'video' %}{{ '<video>\\n' }}{% elif content['type'] == 'text' %}"
        "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n' }}{% endif %}"
    )
    added = [(t, True) for t in (
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>",
    )]
    bos, ends, pads = "", ("<|im_end|>", "<|endoftext|>"), ("<IMG_CONTEXT>",)
    images = ("boat", "tower", "sun", "dot", "wide", "tall")
    side, patch, tiles = 30, 5, 6
    cases = [
        ("boat", [user(image("boat"), DESCRIBE)]),
        ("two", [user("Look at ", image("train"), " and ", image("sun"), ".")]),
        ("text", [user("What happens?")]),
    ]

    def tokenizer(self):
        return chatml.train_tokenizer(TEXTS, 380, "qwen2", self.added)

    def text(self, tok):
        return dict(
            model_type="qwen3", vocab_size=tok.get_vocab_size() + 3, hidden_size=60, intermediate_size=84, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=2, head_dim=14, max_position_embeddings=520, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attention_bias=False, tie_word_embeddings=False,
        )

    tower = dict(
        hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3, attention_bias=True, use_qk_norm=False,
        norm_type="layer_norm",
    )

    def config(self, tok):
        vision = self.tower | {"image_size": [self.side] * 2, "patch_size": [self.patch] * 2}
        return transformers.InternVLConfig(
            text_config=self.text(tok), vision_config=vision, image_token_id=tok.token_to_id("<IMG_CONTEXT>"),
            image_seq_length=(self.side // self.patch // 2) ** 2, downsample_ratio=0.5, tie_word_embeddings=False,
        )

    def save(self, model, out):
        model.to(torch.bfloat16).save_pretrained(out)

    def write(self, tok, out):
        chatml.write_tokenizer(tok, out, 520, self.added, self.template)
        size = {"size": {"height": self.side, "width": self.side}, "resample": 3, "min_patches": 1, "max_patches": self.tiles}
        kinds = {"image_processor_type": "GotOcr2ImageProcessorFast", "processor_class": "InternVLProcessor", "crop_to_patches": False}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **STEPS, **size, **IMAGENET}, indent=2) + "\n")

    def open(self, tok):
        size = {"size": {"height": self.side, "width": self.side}, "resample": 3, "min_patches": 1, "max_patches": self.tiles}
        images = transformers.GotOcr2ImageProcessor(**STEPS, **size, **IMAGENET)
        marks = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=self.ends[0], extra_special_tokens=marks)
        video = transformers.InternVLVideoProcessor()
        length = (self.side // self.patch // 2) ** 2
        self.processor = transformers.InternVLProcessor(images, fast, video, image_seq_length=length)

    def inputs(self, text, ids):
        """Prompt ids, and what goes into the model with them."""
        images = [draw_image(id) for id in ids]
        found = self.processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt")
        return found["input_ids"][0].tolist(), {"pixel_values": found["pixel_values"]} if images else {}

    def features(self, model, feed):
        """Levels of the patches of each part, in blocks, and rows of all parts."""
        rows = model.model.get_image_features(feed["pixel_values"], return_dict=True).pooler_output
        return [levels(part, IMAGENET, self.patch, 2) for part in feed["pixel_values"]], rows.reshape(-1, rows.shape[-1])

    def read(self, out):
        return self.model_class.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()


class InternVLCode(InternVL):
    """The same in the layout of the original code, with another decoder and a tower that normalises heads."""

    name, side, patch, tiles = "internvl-code", 24, 4, 3
    images = ("boat", "train", "sun")
    tower = dict(
        hidden_size=28, intermediate_size=52, num_hidden_layers=2, num_attention_heads=2, attention_bias=True, use_qk_norm=True,
        norm_type="rms_norm",
    )

    def text(self, tok):
        return dict(
            model_type="qwen2", vocab_size=tok.get_vocab_size() + 1, hidden_size=48, intermediate_size=68, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=320, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5}, tie_word_embeddings=False,
        )

    def save(self, model, out):
        model.to(torch.bfloat16).save_pretrained(out)
        # Read as `transformers` saved it: a model that was cast has rounded frequencies, too.
        self.model = super().read(out)
        tensors, renamed = load_file(out / "model.safetensors"), {}
        for name, value in tensors.items():
            for old, new in (
                ("multi_modal_projector.layer_norm", "mlp1.0"), ("multi_modal_projector.linear_1", "mlp1.1"),
                ("multi_modal_projector.linear_2", "mlp1.3"), ("vision_tower.", "vision_model."),
                ("embeddings.cls_token", "embeddings.class_embedding"), ("position_embeddings", "position_embedding"),
                ("patch_embeddings.projection", "patch_embedding"), ("encoder.layer.", "encoder.layers."),
                (".attention.projection_layer", ".attn.proj"), (".attention.", ".attn."), ("lambda_", "ls"),
                ("layernorm_before", "norm1"), ("layernorm_after", "norm2"),
            ):
                name = name.replace(old, new)
            renamed[name] = value
        assert all(name.startswith(("language_model.model.", "language_model.lm_head.", "mlp1.", "vision_model.")) for name in renamed)
        for name in [name for name in renamed if ".q_proj." in name and "vision_model" in name]:
            three = [renamed.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            renamed[name.replace("q_proj", "qkv")] = torch.cat(three)
        save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").rename(out / "config.transformers.json")
        text, vision = config["text_config"], config["vision_config"]
        text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
        (out / "config.json").write_text(json.dumps({
            "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5,
            "dynamic_image_size": True, "force_image_size": self.side, "max_dynamic_patch": self.tiles, "min_dynamic_patch": 1,
            "pad2square": False, "ps_version": "v2", "select_layer": -1, "template": "internvl2_5", "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_backbone_lora": 0, "use_llm_lora": 0, "use_thumbnail": True,
            "llm_config": text | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
            "vision_config": {
                "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b", "hidden_act": "gelu", "image_size": self.side,
                "patch_size": self.patch, "num_channels": 3, "qkv_bias": True, "qk_normalization": True, "layer_norm_eps": 1e-6,
                **{k: vision[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "norm_type")},
            },
        }, indent=2) + "\n")

    def write(self, tok, out):
        chatml.write_tokenizer(tok, out, 320, self.added, self.template)
        kinds = {"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": self.side, "do_center_crop": True, "size": self.side}
        files = {**kinds, "do_normalize": True, "do_resize": True, "resample": 3, **IMAGENET}
        (out / "preprocessor_config.json").write_text(json.dumps(files, indent=2) + "\n")
        (out / "config.transformers.json").unlink()

    def read(self, out):
        return self.model


class Lfm2Vl:
    """Tiles, and a thumbnail or an image that keeps its shape."""

    name, model_class = "lfm2vl", transformers.Lfm2VlForConditionalGeneration
    template = (
        "{{- bos_token -}}{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}{%- for item in message['content'] -%}"
        "{%- if item['type'] == 'image' -%}{{- '<image>' -}}{%- elif item['type'] == 'text' -%}{{- item['text'] -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    added = [(t, True) for t in (
        "<bos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5) if row * column <= 4),
    )]
    bos, ends, pads = "", ("<|im_end|>", "<|endoftext|>"), ("<image>",)
    # Longer ones have more patches than the processor's limit, and are refused.
    images = ("boat", "tower", "train", "sun", "dot", "strip", "post")
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    patch, factor = 4, 2
    tiles = {
        "encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 24, "min_tiles": 2, "max_tiles": 4, "use_thumbnail": True,
        "min_image_tokens": 5, "max_image_tokens": 12, "max_pixels_tolerance": 2.0, "do_image_splitting": True, "resample": 2,
        "return_row_col_info": True,
    }
    cases = InternVL.cases

    def tokenizer(self):
        return chatml.train_tokenizer(TEXTS, 400, "qwen2", self.added)

    def config(self, tok):
        text = dict(
            model_type="lfm2", vocab_size=tok.get_vocab_size() + 2, hidden_size=60, intermediate_size=96, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=320, norm_eps=1e-5, conv_L_cache=3,
            layer_types=["conv", "full_attention", "conv", "full_attention"], block_auto_adjust_ff_dim=True, block_multiple_of=8,
            block_ffn_dim_multiplier=1.0, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
        vision = dict(
            model_type="siglip2_vision_model", hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3,
            num_patches=25, patch_size=4, vision_use_head=False,
        )
        return transformers.Lfm2VlConfig(
            text_config=text, vision_config=vision, image_token_id=tok.token_to_id("<image>"), downsample_factor=2,
            projector_hidden_size=52, projector_use_layernorm=True, projector_bias=True, tie_word_embeddings=True,
        )

    def save(self, model, out):
        model.to(torch.bfloat16).save_pretrained(out)

    def write(self, tok, out):
        chatml.write_tokenizer(tok, out, 320, self.added, self.template)
        path = out / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<bos>"}, indent=2, ensure_ascii=False) + "\n")
        kinds = {"image_processor_type": "Lfm2VlImageProcessorFast", "processor_class": "Lfm2VlProcessor", "do_pad": True}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **STEPS, **self.tiles, **self.half}, indent=2) + "\n")

    def open(self, tok):
        images = transformers.Lfm2VlImageProcessor(**STEPS, **self.tiles, **self.half)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tok, bos_token="<bos>", eos_token=self.ends[0], extra_special_tokens={"image_token": "<image>"}
        )
        self.processor = transformers.Lfm2VlProcessor(images, fast)

    def inputs(self, text, ids):
        images = [draw_image(id) for id in ids]
        found = self.processor(text=[text], images=[images] if images else None, add_special_tokens=False, return_tensors="pt")
        return found["input_ids"][0].tolist(), {k: v for k, v in found.items() if k not in ("input_ids", "attention_mask")}

    def features(self, model, feed):
        rows = torch.cat(list(model.model.get_image_features(**feed, return_dict=True).pooler_output))
        found = []
        for part, (height, width) in zip(feed["pixel_values"], feed["spatial_shapes"].tolist()):
            pixels = part[: height * width].reshape(height, width, self.patch, self.patch, 3)
            pixels = pixels.permute(4, 0, 2, 1, 3).reshape(3, height * self.patch, width * self.patch)
            found.append(levels(pixels, self.half, self.patch, self.factor))
        return found, rows

    def read(self, out):
        return self.model_class.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()


class Docling(siglip.SmolVLM):
    """Idefics 3 of documents, as Granite-Docling and SmolDocling are: answers are marks, special tokens of the tokenizer."""

    name, model_class = "docling", transformers.Idefics3ForConditionalGeneration
    marks = ["<doctag>", "</doctag>", "<text>", "</text>", *(f"<loc_{n}>" for n in range(0, 500, 100))]
    added = siglip.SmolVLM.added + [(t, True) for t in marks]
    images = ("boat",)
    cases = [("boat", [user(image("boat"), "Convert this page to docling.")])]

    def config(self, tok):
        config = super().config(tok).to_dict()
        config = {key: config[key] for key in ("text_config", "vision_config", "image_token_id", "scale_factor", "tie_word_embeddings")}
        for part in ("text_config", "vision_config"):
            config[part] = {k: v for k, v in config[part].items() if k != "architectures"}
        config["vision_config"].pop("model_type")
        return transformers.Idefics3Config(**config)

    def save(self, model, out):
        model.to(torch.bfloat16).save_pretrained(out)

    def open(self, tok):
        pass

    def inputs(self, text, ids):
        return super().inputs(text, ids, "native")

    def features(self, model, feed):
        pixels, rows = super().features(model, feed)
        return [levels(part, siglip.HALF, 4, 2) for part in pixels], rows

    read = Lfm2Vl.read


def levels(pixels, norm, patch, block):
    """Levels of an image `[channels, height, width]` as patches in blocks: `[patches, channels, patch²]`."""
    mean, std = (torch.tensor(norm[key]).reshape(3, 1, 1) for key in ("image_mean", "image_std"))
    found = ((pixels * std + mean) * 255).round()
    assert ((found / 255 - mean) / std - pixels).abs().max() < 1e-5
    channels, height, width = found.shape
    rows, columns = height // patch // block, width // patch // block
    cut = found.reshape(channels, rows, block, patch, columns, block, patch).permute(1, 4, 2, 5, 0, 3, 6)
    return cut.reshape(-1, channels, patch * patch).to(torch.uint8).contiguous()


@torch.no_grad()
def draw(model, tok, wanted=()):
    """Weights as large as a trained model's, away from their defaults, so that all of it shows. Tokens that are no text
    are unlikely."""
    for name, p in model.named_parameters():
        if "lambda_" in name:
            p.normal_(0.8, 0.2)
        elif "norm" in name and name.endswith("weight"):
            p.normal_(1, 0.2)
        elif name.endswith("bias"):
            p.normal_(0, 0.1)
        elif "position_embedding" in name or "cls_token" in name:
            p.normal_(0, 0.5)
        elif "patch_embedding" in name:
            p.normal_(0, 2.0 * p[0].numel() ** -0.5)
        elif name.endswith("embed_tokens.weight"):
            p.normal_(0, 0.25 if isinstance(model, transformers.Lfm2VlForConditionalGeneration) else 1.0)
        elif "conv.conv" in name:
            p.normal_(0, 0.6)
        elif p.dim() >= 2:
            # Logits are as far apart as a trained model's.
            p.normal_(0, (4.0 if name.startswith("lm_head") else 1.2) * p.shape[-1] ** -0.5)
    head = model.get_output_embeddings().weight
    known = {str(t) for t in tok.get_added_tokens_decoder().values()} - set(wanted)
    for id in range(head.shape[0]):
        word = tok.decode([id], skip_special_tokens=False) if id < tok.get_vocab_size() else ""
        if word in wanted:
            head[id] *= 2
        elif not word.strip() or "\ufffd" in word or word in known:
            head[id] *= 0.3


def render(family, messages):
    from transformers.utils.chat_template_utils import render_jinja_template

    found, _ = render_jinja_template(
        conversations=[messages], chat_template=family.template, add_generation_prompt=True, bos_token="<bos>"
    )
    return found[0]


@torch.no_grad()
def record(family, out, tok):
    """Cases, images, tensors and the least margin; none where an answer is no text or an image shows in no logit."""
    model = family.read(out)
    family.open(tok)
    marks = getattr(family, "marks", [])
    ends = {tok.token_to_id(t) for t in family.ends}
    known = {tok.token_to_id(str(t)) for t in tok.get_added_tokens_decoder().values()} - ends - {tok.token_to_id(t) for t in marks}
    cases, tensors, least = [], {}, math.inf

    def answer(id, messages, templated=True):
        nonlocal least
        text = render(family, messages) if templated else plain(family, messages[0]["content"])
        ids, feed = family.inputs(text, parts(messages))
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
        text = tok.decode([token for token in got if token not in ends], skip_special_tokens=not marks)
        if len(set(got)) < 2 or "\ufffd" in text or marks and sum(mark in text for mark in marks) < 2:
            return None
        tiles = []
        for shown in parts(messages):
            count = len(family.features(model, family.inputs(render(family, [user(image(shown))]), [shown])[1])[0])
            tiles.append(count if count > 1 else 0)
        case = {
            "id": id, "mode": "native", **({"messages": messages} if templated else {"prompt": messages[0]["content"]}),
            "tiles": tiles, "prompt_ids": ids, "output_ids": got, "text": text,
            "finish": finish, "logits_steps": list(range(len(got))),
        }
        cases.append(case)
        return case

    for id, messages in family.cases:
        if answer(id, messages) is None:
            return None
    # What follows a question about an image that stays in the caches.
    first = next(case for case in cases if case["id"] == "boat")
    if not marks and answer("again", first["messages"] + [say(first["text"]), user(COLOURS)]) is None:
        return None
    if answer("plain", [user(image(family.images[0]), "Seen:")], templated=False) is None:
        return None
    images = []
    for id in family.images:
        found, rows = family.features(model, family.inputs(render(family, [user(image(id))]), [id])[1])
        counts = [len(part) for part in found]
        # Rows and columns are those of a tile, or what makes as many patches.
        images.append({"id": id, "mode": "native", "grid": [1, counts[0]], "tiles": len(counts) if len(counts) > 1 else 0, "patches": counts})
        tensors[f"{id}.native.pixels"] = torch.cat(found)
        tensors[f"{id}.native.embeds"] = rows.contiguous()
    return cases, images, tensors, least


def produce(family, out):
    tok = family.tokenizer()
    for attempt in range(400):
        torch.manual_seed(attempt)
        model = family.model_class(family.config(tok)).float().eval()
        draw(model, tok, getattr(family, "marks", []))
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        ends = [tok.token_to_id(t) for t in family.ends]
        model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
        family.save(model, out)
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
    shown = {id for case in cases for id in parts(case.get("messages", [{"content": case.get("prompt", [])}]))}
    for id in sorted(shown | {one["id"] for one in images}):
        draw_image(id).save(folder / f"{id}.png", optimize=True)
        assert np.array_equal(np.array(Image.open(folder / f"{id}.png")), np.array(draw_image(id)))
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens-vision/1", "model": family.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": attempt, "eos_ids": sorted(ends), "min_margin": round(least, 4),
        "pads": [tok.token_to_id(t) for t in family.pads], "images": images, "cases": cases,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    gold = [token for token in cases[-1]["output_ids"] if token not in ends]
    name = f"images/{family.images[0]}.png"
    case = {"id": "plain", "prompt": "Seen:", "images": [name], "gold": gold, "max_new": len(cases[-1]["output_ids"])}
    goldens.dump(out / "suite.json", {"schema": "npu_suite/v1", "model": family.name, "gate": "greedy_exact", "cases": [case]})
    for file in out.rglob("*"):
        if file.is_file():
            file.chmod(0o644)


FAMILIES = {"internvl": InternVL, "internvl-code": InternVLCode, "lfm2vl": Lfm2Vl, "docling": Docling}
if __name__ == "__main__":
    produce(FAMILIES[sys.argv[1]](), pathlib.Path(sys.argv[2]))
