"""Tiny checkpoints that see one image in one pass of an encoder, and what `transformers` answers: weights are drawn,
nothing is trained.

    seeing.py paddleocr ../fixtures/vision/paddleocr
    seeing.py paligemma ../fixtures/vision/paligemma
    seeing.py mistral3 ../fixtures/vision/mistral3

    seeing.py paddleocr --unseen SEED DIR

`--unseen` draws a checkpoint of other shapes, for `QHX_TEST_SEEING`. A number behind the folder is that of the first
draw of weights. Draws are repeated until greedy tokens are text and have clear margins. What
is compared are pixels, features, logits and tokens."""

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
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

import chatml
import drawn_images
import goldens
import styles
from siglip import COLOURS, DESCRIBE, HALF, TEXTS, image, parts, say, user

# Least distance of the best logit from the second.
MARGIN = 0.1
# Least change of the logits where an image is grey.
MOVED = 0.2
LIMIT = 5
# Images that are no drawings: one pixel, and sides that differ much.
STRIPES = {"dot": (1, 1), "wide": (190, 3), "tall": (2, 150), "long": (20000, 2)}


def draw_image(id):
    if id not in STRIPES:
        return drawn_images.draw(id)
    w, h = STRIPES[id]
    y, x = np.mgrid[0:h, 0:w]
    levels = np.stack([x * 200 // w + 40, y * 120 // h + 90, 255 - x * 150 // w], -1)
    return Image.fromarray(levels.astype(np.uint8), "RGB")


def levels(pixels, mean, std):
    """The u8 levels that pixel values `[…, channels, rows, columns]` were made of, exactly."""
    mean, std = (torch.tensor(of).view(3, 1, 1) for of in (mean, std))
    out = ((pixels * std + mean) * 255).round().to(torch.uint8)
    assert ((out.float() / 255 - mean) / std - pixels).abs().max() < 2e-6
    return out


def in_squares(patches, grid, merge):
    """Patches row by row as squares of those that become one token, one behind the other."""
    rows, columns = grid
    cut = patches.reshape(rows // merge, merge, columns // merge, merge, *patches.shape[1:])
    return cut.transpose(1, 2).reshape(patches.shape).contiguous()


class PaddleOCR:
    """Rotary positions beside learned ones that are resampled, squares of patches, M-RoPE."""

    name, model_class = "paddleocr", transformers.PaddleOCRVLForConditionalGeneration
    # The published template.
    template = (
        "{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}"
        "{{- '<|begin_of_sentence|>' -}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'user' -%}{{- 'User: ' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for content in message['content'] -%}{%- if content['type'] == 'image' -%}"
        "{{ '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}{%- endif -%}{%- endfor -%}"
        "{%- for content in message['content'] -%}{%- if content['type'] == 'text' -%}{{ content['text'] }}{%- endif -%}{%- endfor -%}"
        "{%- endif -%}{{ '\\n' -}}"
        "{%- elif message['role'] == 'assistant' -%}{{- 'Assistant: ' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for content in message['content'] -%}{%- if content['type'] == 'text' -%}{{ content['text'] }}{%- endif -%}{%- endfor -%}"
        "{%- endif -%}{{ '</s>' -}}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
    )
    added = [(t, True) for t in (
        "</s>", "<|begin_of_sentence|>", "<unk>", "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video_pad|>",
    )]
    bos, ends, pads = "", ("</s>", "<unk>"), ("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",)
    shown = ("boat", "tower", "train", "dot", "wide", "tall")
    cases = [
        ("boat", [user(image("boat"), "OCR:")]),
        ("two", [user("Table Recognition:", image("train"), image("tower"))]),
        ("wide", [user(image("wide"), "OCR:")]),
        ("text", [user("What happens?")]),
    ]
    patch, merge, size = 6, 2, {"shortest_edge": 4 * 144, "longest_edge": 14 * 144}
    text, vision = {}, {}

    def tokenizer(self):
        return chatml.train_tokenizer([*TEXTS, "User: OCR: Table Recognition: Assistant:"], 410, "qwen2", self.added)

    def config(self, tok):
        text = dict(
            vocab_size=tok.get_vocab_size() + 3, hidden_size=44, intermediate_size=60, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=14, max_position_embeddings=320, rms_norm_eps=1e-5, use_bias=False, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 3, 2]}, pad_token_id=2,
        )
        vision = dict(
            hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3, image_size=32, patch_size=self.patch,
            spatial_merge_size=self.merge,
        )
        token = tok.token_to_id
        return transformers.PaddleOCRVLConfig(
            text_config=text | self.text, vision_config=vision | self.vision, tie_word_embeddings=bool(self.text.get("tie_word_embeddings")),
            image_token_id=token("<|IMAGE_PLACEHOLDER|>"),
            video_token_id=token("<|video_pad|>"), vision_start_token_id=token("<|IMAGE_START|>"), vision_end_token_id=token("<|IMAGE_END|>"),
        )

    def write(self, tok, out):
        chatml.write_tokenizer(tok, out, 320, self.added, self.template)
        sizes = {"patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": 1}
        kinds = {"image_processor_type": "PaddleOCRVLImageProcessor", "processor_class": "PaddleOCRVLProcessor", "resample": 3}
        low, high = self.size.values()
        limits = {"min_pixels": low, "max_pixels": high}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **sizes, **limits, **HALF}, indent=2) + "\n")
        images = transformers.PaddleOCRVLImageProcessor(**HALF, **sizes, size=self.size)
        marks = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>", extra_special_tokens=marks)
        self.processor = transformers.PaddleOCRVLProcessor(images, fast)

    def publish(self, out):
        """Keys and names of tensors of the published checkpoint, and tensors of it that the class ignores."""
        path = out / "config.json"
        value = json.loads(path.read_text())
        text, vision = value.pop("text_config"), value["vision_config"]
        rope = text.pop("rope_parameters")
        vision.pop("rope_parameters", None)
        vision |= {"temporal_patch_size": 2, "tokens_per_second": 2, "model_type": "paddleocr_vl"}
        for key in ("model_type", "architectures", "transformers_version", "dtype", "bos_token_id", "eos_token_id"):
            text.pop(key, None)
        value["torch_dtype"] = value.pop("dtype")
        value |= text | {
            "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "default"}, "use_3d_rope": True, "rope_is_neox_style": True,
            "weight_share_add_bias": True, "tie_word_embeddings": bool(self.text.get("tie_word_embeddings")), "sliding_window": None, "transformers_version": "4.55.0",
        }
        path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
        renamed = lambda name: (
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual.").replace("model.projector.", "mlp_AR.")
        )
        tensors = {renamed(name): tensor for name, tensor in load_file(out / "model.safetensors").items()}
        tensors["visual.vision_model.head.probe"] = torch.zeros(1, 1, vision["hidden_size"], dtype=torch.bfloat16)
        tensors["visual.vision_model.embeddings.packing_position_embedding.weight"] = torch.zeros(9, vision["hidden_size"], dtype=torch.bfloat16)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def inputs(self, text, ids):
        """Prompt ids, and what goes into the model with them."""
        images = [draw_image(id) for id in ids]
        found = self.processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt")
        return found["input_ids"][0].tolist(), {k: found[k] for k in ("pixel_values", "image_grid_thw", "mm_token_type_ids") if k in found and images}

    def features(self, model, feed):
        """Levels of patches, rows, and the grid of an image."""
        (rows,) = model.model.get_image_features(feed["pixel_values"], feed["image_grid_thw"], return_dict=True).pooler_output
        grid = feed["image_grid_thw"][0, 1:].tolist()
        return in_squares(levels(feed["pixel_values"], [0.5] * 3, [0.5] * 3), grid, self.merge), rows, grid


class PaliGemma:
    """A prompt that sees itself, with its images in front, and an answer that does not; no template is published."""

    name, model_class = "paligemma", transformers.PaliGemmaForConditionalGeneration
    # What the bundle's template makes of a conversation: what `PaliGemmaProcessor` makes of images and a text.
    template = (
        "{%- for message in messages -%}{%- if message['content'] is not string -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
        "{{- bos_token -}}"
        "{%- for message in messages -%}{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{- '\n' -}}{%- endfor -%}"
    )

    class Style(styles.Gemma):
        added, end_turn = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<loc0000>", "<loc0001>", "<seg000>"], "<eos>"
        marks_text = "caption en\ndetect\nanswer en\n"

    style = Style()
    bos, ends, pads = "<bos>", ("<eos>", "<pad>"), ("<image>",)
    shown = ("boat", "tower", "train", "dot", "wide", "tall", "long")
    cases = [
        ("boat", [user(image("boat"), "caption en")]),
        ("two", [user(image("train"), image("tower"), "answer en Which is it, and where does it stand?")]),
        ("long", [user(image("long"), "detect boat")]),
    ]
    again, margin, said = False, 0.06, "Seen:\n"
    side, patch, text, vision = 4, 6, {}, {}

    def tokenizer(self):
        return self.style.train(TEXTS, 430)

    def config(self, tok):
        text = dict(
            model_type="gemma2", vocab_size=tok.get_vocab_size() + 2, hidden_size=48, intermediate_size=60, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=14, query_pre_attn_scalar=18, sliding_window=12, max_position_embeddings=320,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"], attn_logit_softcapping=9.0, final_logit_softcapping=20.0,
            # Behind the cap, biases of keys do not cancel.
            attention_bias=True,
        )
        vision = dict(
            model_type="siglip_vision_model", hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=3,
            image_size=self.patch * self.side, patch_size=self.patch, projection_dim=(text | self.text)["hidden_size"], vision_use_head=False,
            num_image_tokens=16,
        )
        return transformers.PaliGemmaConfig(
            text_config=text | self.text, vision_config=vision | self.vision, image_token_index=tok.token_to_id("<image>"),
            projection_dim=vision["projection_dim"], hidden_size=vision["projection_dim"],
        )

    def write(self, tok, out):
        self.style.write(tok, out, 320)
        path = out / "tokenizer_config.json"
        config = json.loads(path.read_text())
        del config["chat_template"]
        path.write_text(json.dumps(config, indent=2) + "\n")
        pixels = self.patch * self.side
        size = {"size": {"height": pixels, "width": pixels}, "resample": 3}
        kinds = {"image_processor_type": "SiglipImageProcessor", "processor_class": "PaliGemmaProcessor", "image_seq_length": self.side**2}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **size, **HALF}, indent=2) + "\n")
        images = transformers.SiglipImageProcessor(**HALF, **size)
        images.image_seq_length = self.side**2
        marks = {"image_token": "<image>"}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<bos>", eos_token="<eos>", extra_special_tokens=marks)
        self.processor = transformers.PaliGemmaProcessor(images, fast)

    def publish(self, out):
        """Keys and names of tensors of the published checkpoint."""
        path = out / "config.json"
        value = json.loads(path.read_text())
        text, vision = value["text_config"], value["vision_config"]
        for key in ("rope_parameters", "layer_types", "transformers_version", "dtype", "tie_word_embeddings"):
            text.pop(key, None)
        text |= {"hidden_act": "gelu_pytorch_tanh", "num_image_tokens": 16, "torch_dtype": "bfloat16", "rope_theta": 10000.0}
        value["torch_dtype"] = value.pop("dtype")
        value |= {"ignore_index": -100, "transformers_version": "4.47.0.dev0"}
        path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
        renamed = lambda name: (
            name.replace("model.language_model.", "language_model.model.")
            .replace("model.vision_tower.", "vision_tower.vision_model.").replace("model.multi_modal_projector.", "multi_modal_projector.")
        )
        tensors = {renamed(name): tensor for name, tensor in load_file(out / "model.safetensors").items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def inputs(self, text, ids):
        # The processor puts BOS behind the images and a line end behind the text itself.
        text = text.replace("<bos>", "").removesuffix("\n")
        images = [draw_image(id) for id in ids]
        found = self.processor(text=[text], images=[images], return_tensors="pt")
        return found["input_ids"][0].tolist(), {k: found[k] for k in ("pixel_values", "token_type_ids")}

    def features(self, model, feed):
        rows = model.model.get_image_features(feed["pixel_values"], return_dict=True).pooler_output[0]
        n, p = self.side, self.patch
        cut = levels(feed["pixel_values"][0], [0.5] * 3, [0.5] * 3).reshape(3, n, p, n, p).permute(1, 3, 0, 2, 4)
        return cut.reshape(n * n, 3, p * p).contiguous(), rows / self.scale, [n, n]

    def adjust(self, model):
        # As `goldens.scale_as_stored`. The decoder's graph multiplies all rows with this factor; the class only those of
        # the embedding table.
        scale = model.get_input_embeddings().embed_scale
        self.scale = scale.copy_(scale.to(torch.bfloat16).to(scale.dtype))


class Mistral3:
    """Images of any shape, a mark behind each row of tokens, frequencies of columns between those of rows."""

    name, model_class = "mistral3", transformers.Mistral3ForConditionalGeneration
    # The published template without system prompt and tools.
    template = (
        "{{- bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{- '[INST]' }}"
        "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for block in message['content'] %}"
        "{%- if block['type'] == 'text' %}{{- block['text'] }}{%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}{%- endif %}"
        "{%- endfor %}{%- endif %}{{- '[/INST]' }}{%- elif message['role'] == 'assistant' %}"
        "{%- if message['content'] is string %}{{- message['content'] + eos_token }}"
        "{%- else %}{{- message['content'][0]['text'] + eos_token }}{%- endif %}{%- endif %}{%- endfor %}"
    )
    added = [(t, True) for t in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")]
    bos, ends, pads = "", ("</s>", "<unk>"), ("[IMG]",)
    # Not "dot": the class fails where an image is one token.
    shown = ("boat", "tower", "train", "wide", "tall")
    cases = [
        ("boat", [user(image("boat"), DESCRIBE)]),
        ("two", [user("Look at ", image("train"), image("tower"), "Compare them.")]),
        ("wide", [user(image("wide"), DESCRIBE)]),
        ("text", [user("What happens?")]),
    ]
    patch, merge, longest, bias = 6, 2, 76, False
    text, vision = {}, {}

    def tokenizer(self):
        return chatml.train_tokenizer(TEXTS, 400, "qwen2", self.added)

    def config(self, tok):
        text = dict(
            model_type="mistral", vocab_size=tok.get_vocab_size() + 3, hidden_size=44, intermediate_size=60, num_hidden_layers=2,
            num_attention_heads=6, num_key_value_heads=2, head_dim=14, max_position_embeddings=320, rms_norm_eps=1e-5, sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
        )
        vision = dict(
            model_type="pixtral", hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=3, head_dim=12, image_size=84,
            patch_size=self.patch, hidden_act="silu", rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
        )
        return transformers.Mistral3Config(
            text_config=text | self.text, vision_config=vision | self.vision, image_token_index=tok.token_to_id("[IMG]"), spatial_merge_size=self.merge,
            multimodal_projector_bias=self.bias, tie_word_embeddings=bool(self.text.get("tie_word_embeddings")),
        )

    def write(self, tok, out):
        chatml.write_tokenizer(tok, out, 320, self.added, self.template)
        path = out / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config |= {"bos_token": "<s>", "eos_token": "</s>"}
        path.write_text(json.dumps(config, indent=2) + "\n")
        self.norm = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
        size = {"size": {"longest_edge": self.longest}, "patch_size": self.patch, "resample": 3}
        kinds = {"image_processor_type": "PixtralImageProcessor", "processor_class": "PixtralProcessor"}
        steps = {key: HALF[key] for key in ("do_resize", "do_rescale", "do_normalize")}
        (out / "preprocessor_config.json").write_text(json.dumps({**kinds, **size, **self.norm, **steps}, indent=2) + "\n")
        images = transformers.PixtralImageProcessor(**self.norm, **steps, size=size["size"], patch_size=self.patch)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>")
        self.processor = transformers.PixtralProcessor(images, fast, patch_size=self.patch, spatial_merge_size=self.merge)

    def publish(self, out):
        """Keys and names of tensors of the published checkpoint."""
        path = out / "config.json"
        value = json.loads(path.read_text())
        text, vision = value["text_config"], value["vision_config"]
        text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
        vision["rope_theta"] = vision.pop("rope_parameters")["rope_theta"]
        for part in (text, vision):
            for key in ("transformers_version", "dtype", "layer_types"):
                part.pop(key, None)
        value["torch_dtype"] = value.pop("dtype")
        value |= {"transformers_version": "4.50.0.dev0"}
        path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
        renamed = lambda name: (
            name.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head")
            .replace("model.vision_tower.", "vision_tower.").replace("model.multi_modal_projector.", "multi_modal_projector.")
        )
        named = lambda name: name if name.startswith("language_model.") else renamed(name)
        tensors = {named(name): tensor for name, tensor in load_file(out / "model.safetensors").items()}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    def inputs(self, text, ids):
        images = [draw_image(id) for id in ids]
        found = self.processor(text=[text], images=[images] if images else None, add_special_tokens=False, return_tensors="pt")
        return found["input_ids"][0].tolist(), {k: found[k] for k in ("pixel_values", "image_sizes") if k in found and images}

    def tokens(self, feed):
        """Rows and columns of tokens of each image."""
        side = self.patch * self.merge
        return [[int(n) // side for n in size] for size in feed.get("image_sizes", [])]

    def features(self, model, feed):
        (rows,) = model.model.get_image_features(**feed, return_dict=True).pooler_output
        grid = [n * self.merge for n in self.tokens(feed)[0]]
        p = self.patch
        cut = levels(feed["pixel_values"][0], *self.norm.values()).reshape(3, grid[0], p, grid[1], p).permute(1, 3, 0, 2, 4)
        return in_squares(cut.reshape(-1, 3, p * p), grid, self.merge), rows, grid


@torch.no_grad()
def draw(model, tok):
    """Weights as large as a trained model's, away from their defaults, so that all of it shows. Tokens that are no text
    are unlikely."""
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            p.normal_(1.0, 0.2)
            # Gemma's are differences from one; what a layer adds is larger than what it finds.
            if isinstance(model, transformers.PaliGemmaForConditionalGeneration) and "language_model" in name:
                p.add_(0.5 if "post_" in name else -1.0)
        elif name.endswith("bias"):
            p.normal_(0, 0.1)
        elif "position_embedding" in name:
            p.normal_(0, 0.5)
        elif "patch_embedding" in name or "patch_conv" in name:
            p.normal_(0, 2.0 * p[0].numel() ** -0.5)
        elif name.endswith("embed_tokens.weight"):
            p.normal_(0, 0.28 if isinstance(model, transformers.PaliGemmaForConditionalGeneration) else 1.0)
        elif p.dim() >= 2:
            # Logits are as far apart as a trained model's.
            p.normal_(0, (4.0 if name.startswith("lm_head") else 1.2) * p.shape[-1] ** -0.5)
    head = model.get_output_embeddings().weight
    known = {str(t) for t in tok.get_added_tokens_decoder().values()}
    for id in range(head.shape[0]):
        word = tok.decode([id], skip_special_tokens=False) if id < tok.get_vocab_size() else ""
        if not word.strip() or "\ufffd" in word or word in known:
            head[id] *= 0.3


def forget(model):
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None


@torch.no_grad()
def greedy(model, ids, feed, ends):
    """One forward over the prompt, then one per token, with cache; and the same logits from one forward without."""
    out, rows, past = [], [], None
    forget(model)
    while True:
        more = feed if past is None else {}
        step = model(input_ids=torch.tensor([ids if past is None else out[-1:]]), cache=past, use_cache=True, **more)
        past = step.cache
        rows.append(step.logits[0, -1].float())
        out.append(int(rows[-1].argmax()))
        if out[-1] in ends or len(out) == LIMIT:
            break
    rows, whole = torch.stack(rows), dict(feed)
    for key, value in (("mm_token_type_ids", 0), ("token_type_ids", 1)):
        if key in whole:
            whole[key] = torch.nn.functional.pad(whole[key], (0, len(out) - 1), value=value)
    forget(model)
    found = model(input_ids=torch.tensor([ids + out[:-1]]), use_cache=False, **whole).logits[0, len(ids) - 1 :].float()
    apart = (found - rows).abs().max().item()
    assert apart < goldens.DRIFT, apart
    return out, rows, "eos" if out[-1] in ends else "length"


def rendered(family, messages):
    names = {"bos_token": family.bos or "<s>", "eos_token": family.ends[0]}
    return render_jinja_template(conversations=[messages], chat_template=family.template, add_generation_prompt=True, **names)[0][0]


def plain(family, content):
    """A prompt without a template."""
    return family.bos + "".join(family.pads[0] if part["type"] == "image" else part["text"] for part in content)


@torch.no_grad()
def record(family, model, tok):
    """Cases, images, tensors and the least margin; none where an answer is no text or an image shows in no logit."""
    if hasattr(family, "adjust"):
        family.adjust(model)
    ends = {tok.token_to_id(t) for t in family.ends}
    known = {tok.token_to_id(str(t)) for t in tok.get_added_tokens_decoder().values()} - ends
    cases, tensors, least = [], {}, math.inf

    def answer(id, messages, templated=True):
        nonlocal least
        text = rendered(family, messages) if templated else plain(family, messages[0]["content"])
        ids, feed = family.inputs(text, parts(messages))
        try:
            got, rows, finish = greedy(model, ids, feed, ends)
        except ValueError:  # An answer with a placeholder has no image for it.
            return None
        if any(token in known or token >= tok.get_vocab_size() for token in got):
            return None
        least = min(least, goldens.least_margin(rows))
        if "pixel_values" in feed:
            forget(model)
            grey = feed | {"pixel_values": torch.full_like(feed["pixel_values"], 0.1)}
            moved = (model(input_ids=torch.tensor([ids]), use_cache=False, **grey).logits[0, -1] - rows[0]).abs().max().item()
            if moved < MOVED:
                return None
        text = tok.decode(got, skip_special_tokens=True)
        if len(set(got)) < 2 or "\ufffd" in text or least < getattr(family, "margin", MARGIN):
            return None
        tensors[f"{id}.logits"] = rows.contiguous()
        # Rows of tokens of each image, where marks stand behind these.
        rows_of = [n if n > 1 else 0 for n, _ in family.tokens(feed)] if hasattr(family, "tokens") else []
        case = {
            "id": id, "mode": "native", "tiles": rows_of, **({"messages": messages} if templated else {"prompt": messages[0]["content"]}),
            "prompt_ids": ids, "output_ids": got, "text": text, "finish": finish, "logits_steps": list(range(len(got))),
        }
        cases.append(case)
        return case

    for id, messages in family.cases:
        if answer(id, messages) is None:
            return None
    # What follows a question about an image that stays in the caches.
    if getattr(family, "again", True) and answer("again", cases[0]["messages"] + [say(cases[0]["text"]), user(COLOURS)]) is None:
        return None
    if answer("plain", [user(image("train"), getattr(family, "said", "Seen:"))], templated=False) is None:
        return None
    images = []
    for id in family.shown:
        pixels, rows, grid = family.features(model, family.inputs(rendered(family, [user(image(id))]), [id])[1])
        images.append({"id": id, "mode": "native", "grid": grid})
        tensors[f"{id}.native.pixels"] = pixels.reshape(pixels.shape[0], -1)
        tensors[f"{id}.native.embeds"] = rows.contiguous()
    return cases, images, tensors, least


def produce(family, out, first=0):
    tok = family.tokenizer()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    family.write(tok, out)
    read = Tokenizer.from_file(str(out / "tokenizer.json"))
    ends = [tok.token_to_id(t) for t in family.ends]
    config = family.config(tok)
    config._attn_implementation = "eager"
    for attempt in range(first, first + 5000):
        torch.manual_seed(attempt)
        model = family.model_class(config).float().eval()
        draw(model, tok)
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16).float()
        found = record(family, model, read)
        if found:
            print(f"{family.name} {attempt}: {found[-1]}", flush=True)
            break
    else:
        raise SystemExit("no draw has clear margins")
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    model.to(torch.bfloat16).save_pretrained(out)
    loaded = family.model_class.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    family.publish(out)
    found = record(family, loaded, read)
    cases, images, tensors, least = found
    folder = out / "images"
    folder.mkdir()
    for id in sorted({shown["id"] for shown in images} | {"long"}):
        draw_image(id).save(folder / f"{id}.png", optimize=True)
        assert np.array_equal(np.array(Image.open(folder / f"{id}.png")), np.array(draw_image(id)))
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens-vision/1", "model": family.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": attempt, "eos_ids": sorted(ends), "min_margin": round(least, 4),
        "images": images, "cases": cases,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    for file in out.rglob("*"):
        if file.is_file():
            file.chmod(0o644)


torch.set_num_threads(1)


def heads(rng, dims):
    """Heads of a decoder and its hidden size, which is not theirs together."""
    kv, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
    found = {"num_attention_heads": kv * group, "num_key_value_heads": kv, "head_dim": rng.choice(dims)}
    return found | {
        "hidden_size": rng.choice([36, 52, 68]), "intermediate_size": rng.choice([44, 76]), "num_hidden_layers": rng.choice([1, 3, 5]),
        "rms_norm_eps": rng.choice([1e-4, 1e-6]),
    }


def tower(rng):
    count = rng.choice([1, 2, 3])
    return {
        "hidden_size": count * rng.choice([12, 20]), "num_attention_heads": count, "num_hidden_layers": rng.choice([1, 2, 4]),
        "intermediate_size": rng.choice([36, 52]),
    }


def unseen(family, seed):
    """Shapes that no fixture has; a scale, an activation and an order of the keys are those of the class."""
    rng = random.Random(f"{family.name} {seed}")
    made = family()
    made.name = f"{family.name}-unseen-{seed}"
    if family is PaddleOCR:
        made.text, made.vision = heads(rng, [10, 14, 18]), tower(rng) | {"image_size": rng.choice([24, 56])}
        made.patch, made.merge = rng.choice([4, 5, 7]), rng.choice([2, 3])
        area = (made.patch * made.merge) ** 2
        made.size = {"shortest_edge": 3 * area, "longest_edge": rng.choice([14, 20]) * area}
        half = made.text["head_dim"] // 2
        height, width = rng.randint(0, half // 3), rng.randint(1, half // 3)
        made.text |= {
            "use_bias": rng.random() < 0.5, "tie_word_embeddings": rng.random() < 0.5,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": rng.choice([1e3, 1e6]), "mrope_section": [half - height - width, height, width],
            },
        }
        made.vision["layer_norm_eps"] = 1e-6
    elif family is PaliGemma:
        made.text, made.vision = heads(rng, [10, 14, 20]), tower(rng) | {"layer_norm_eps": rng.choice([1e-4, 1e-6])}
        made.side, made.patch = rng.choice([3, 5, 6]), rng.choice([4, 5, 7])
        made.text |= {
            "query_pre_attn_scalar": rng.choice([9, 50]), "sliding_window": rng.choice([5, 40]), "layer_types": None,
            "attn_logit_softcapping": rng.choice([4.0, 50.0, None]), "final_logit_softcapping": rng.choice([20.0, 30.0]),
            "attention_bias": rng.random() < 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
    else:
        made.text, made.vision = heads(rng, [10, 14, 18]), tower(rng)
        made.patch, made.merge, made.bias = rng.choice([4, 5, 7]), rng.choice([2, 3]), rng.random() < 0.5
        # Below 64 the class makes the wide image 0 pixels high.
        made.longest = {4: 66, 5: 75, 7: 90}[made.patch]
        dim = made.vision["hidden_size"] // made.vision["num_attention_heads"]
        made.vision |= {
            "head_dim": dim, "hidden_act": rng.choice(["silu", "gelu"]), "image_size": made.patch * 30,
            "rope_parameters": {"rope_type": "axial", "rope_theta": rng.choice([300.0, 1e5])},
        }
        made.text |= {
            "sliding_window": rng.choice([None, 30]), "tie_word_embeddings": rng.random() < 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 1e9])},
        }
    print(made.name, made.text, made.vision, made.patch, getattr(made, "merge", ""), flush=True)
    return made


FAMILIES = {"paddleocr": PaddleOCR, "paligemma": PaliGemma, "mistral3": Mistral3}
if __name__ == "__main__":
    if "--unseen" in sys.argv:
        produce(unseen(FAMILIES[sys.argv[1]], int(sys.argv[3])), pathlib.Path(sys.argv[4]), *map(int, sys.argv[5:]))
    else:
        produce(FAMILIES[sys.argv[1]](), pathlib.Path(sys.argv[2]), *map(int, sys.argv[3:]))
