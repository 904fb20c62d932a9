"""The Gemma 4 tiny model: text, images and audio. Trains a checkpoint, draws its images, makes its clips, records goldens."""

import json
import random
import shutil
import wave

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from transformers.models.gemma4 import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor

import corpus
import goldens
import training
from styles import STYLES
from training import IGNORE

# File, size, what is drawn, and the answer learnt. Flat, wide, tall, square, and thinner than one soft token.
IMAGES = [
    ("boat", (96, 64), "A red boat with a white sail on a blue sea."),
    ("tree", (45, 83), "A green tree stands behind a grey wall."),
    ("flag", (150, 40), "A flag of three stripes, black, red and gold."),
    ("moon", (51, 51), "The moon is yellow and the night is dark."),
    ("pole", (7, 280), "A long pole, striped in white and orange."),
]
# File, samples, words: each word has an audio clip of its own.
CLIPS = [
    ("noon", 27011, "the boat leaves at noon"),
    ("bread", 19200, "warm bread for six"),
    ("rain", 32001, "rain comes before the night"),
    ("stop", 9813, "stop"),
]
ASK_IMAGE, ASK_CLIP = "Describe this image.", "\nTranscription: "


def draw_image(name, size):
    w, h = size
    y, x = np.mgrid[0:h, 0:w]
    base = {
        "boat": ([70, 120, 210], [20, 60, 150]), "tree": ([150, 200, 240], [90, 140, 90]), "flag": ([20, 20, 20], [30, 10, 10]),
        "moon": ([10, 10, 40], [30, 20, 60]), "pole": ([250, 250, 250], [230, 230, 220]),
    }[name]
    t = (y / max(h - 1, 1))[..., None]
    image = Image.fromarray((np.array(base[0]) * (1 - t) + np.array(base[1]) * t).astype(np.uint8), "RGB")
    d = ImageDraw.Draw(image)
    if name == "boat":
        d.polygon([(20, 44), (76, 44), (64, 56), (32, 56)], fill=(200, 30, 30))
        d.polygon([(46, 8), (46, 42), (70, 42)], fill=(250, 250, 250))
    if name == "tree":
        d.ellipse([8, 6, 38, 46], fill=(30, 140, 40))
        d.rectangle([20, 46, 26, 70], fill=(110, 70, 30))
        d.rectangle([0, 62, 45, 83], fill=(130, 130, 135))
    if name == "flag":
        d.rectangle([0, 13, 150, 26], fill=(200, 20, 20))
        d.rectangle([0, 27, 150, 40], fill=(240, 200, 30))
    if name == "moon":
        d.ellipse([12, 9, 36, 33], fill=(245, 230, 120))
        d.point([(5, 5), (44, 8), (40, 40), (8, 44)], fill=(255, 255, 255))
    if name == "pole":
        for k in range(0, 280, 40):
            d.rectangle([0, k, 7, k + 19], fill=(240, 130, 20))
    return image


def speak(words, samples, seed):
    """Each word is a chord that glides, under an envelope: not speech, but as different as words are."""
    rng, total = np.random.default_rng(seed), np.zeros(samples)
    words = words.split()
    span = samples / len(words)
    for i, word in enumerate(words):
        own = random.Random(word)
        t0, t1 = int(i * span + 0.08 * span), int((i + 0.92) * span)
        t = np.arange(t1 - t0) / 16000
        envelope = np.sin(np.pi * np.arange(t1 - t0) / (t1 - t0)) ** 0.5
        for _ in range(4):
            f0, glide = own.uniform(150, 3400), own.uniform(-900, 900)
            total[t0:t1] += own.uniform(0.05, 0.16) * envelope * np.sin(2 * np.pi * (f0 * t + glide * t * t / 2))
    total += 0.004 * rng.standard_normal(samples)
    return np.clip(total * 32767, -32768, 32767).astype("<i2")


def write_media(out, seed, images=IMAGES, clips=CLIPS):
    for name, size, _ in images:
        draw_image(name, size).save(out / f"{name}.png", optimize=True)
    for i, (name, samples, words) in enumerate(clips):
        with wave.open(str(out / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(speak(words, samples, seed + i).tobytes())


def read_clip(path):
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768.0


class Media:
    """The images and clips of a folder as the model's classes take them."""

    def __init__(self, folder, spec, images=IMAGES, clips=CLIPS):
        processor = Gemma4ImageProcessor(**spec["image"])
        features = Gemma4AudioFeatureExtractor(feature_size=spec["mels"])
        self.images, self.audios = {}, {}
        for name, _, _ in images:
            found = processor(Image.open(folder / f"{name}.png"), return_tensors="pt")
            self.images[name] = (found["pixel_values"], found["image_position_ids"], int(found["num_soft_tokens_per_image"][0]))
        for name, _, _ in clips:
            found = features([read_clip(folder / f"{name}.wav")], return_tensors="pt")
            mask = found["input_features_mask"]
            tokens = int(mask[0, ::2][::2].sum())
            self.audios[name] = (found["input_features"], mask, tokens)

    def tensors(self, parts):
        """What a forward takes beside the ids."""
        images = [self.images[p["image"]] for p in parts if "image" in p]
        audios = [self.audios[p["audio"]] for p in parts if "audio" in p]
        out = {}
        if images:
            out |= {"pixel_values": torch.cat([i[0] for i in images]), "image_position_ids": torch.cat([i[1] for i in images])}
        if audios:
            assert len(audios) == 1
            out |= {"input_features": audios[0][0], "input_features_mask": audios[0][1]}
        return out

    def expand(self, tok, ids):
        """`<|image|>` to `<|image>`, so many `<|image|>`, `<image|>`; clips alike. `ids` are ints or parts."""
        one = lambda text: tok.token_to_id(text)
        out = []
        for item in ids:
            if isinstance(item, int):
                out.append(item)
            elif "image" in item:
                out += [one("<|image>")] + [one("<|image|>")] * self.images[item["image"]][2] + [one("<image|>")]
            else:
                out += [one("<|audio>")] + [one("<|audio|>")] * self.audios[item["audio"]][2] + [one("<audio|>")]
        return out


def cases():
    """id, parts of the prompt, answer."""
    out = [(name, [{"image": name}, {"text": ASK_IMAGE}], " " + words) for name, _, words in IMAGES]
    out += [(name, [{"audio": name}, {"text": ASK_CLIP}], words) for name, _, words in CLIPS]
    out.append(("both", [{"image": "moon"}, {"text": "What did you hear?"}, {"audio": "rain"}], " " + CLIPS[2][2] + ", and the moon came out."))
    out.append(("two", [{"image": "pole"}, {"text": " or "}, {"image": "tree"}, {"text": "?"}], " First the pole, then the tree."))
    return out


CHAT = ("shore", [{"image": "boat"}, {"text": "What do you see?"}], "I see a red boat.", "Thank you!", "You are welcome. Ask me again when it rains. 🌧️")


def prompt_ids(tok, media, parts):
    ids = [tok.token_to_id("<bos>")]
    for part in parts:
        ids += tok.encode(part["text"], add_special_tokens=False).ids if "text" in part else [part]
    return media.expand(tok, ids)


def chat_ids(tok, style, media, parts, rendered):
    """A rendered conversation, its marks replaced by the parts in order."""
    queue = [p for p in parts if "text" not in p]
    marks = {tok.token_to_id("<|image|>"), tok.token_to_id("<|audio|>")}
    return media.expand(tok, [queue.pop(0) if i in marks else i for i in style.encode_chat(tok, rendered)])


def messages_of(parts):
    content = [{"type": next(iter(p))} | ({"text": p["text"]} if "text" in p else {}) for p in parts]
    return [{"role": "user", "content": content}]


def media_sequences(tok, style, media):
    """(ids, labels, tensors) of every media case and of the chat."""
    out = []
    for _, parts, answer in cases():
        head = prompt_ids(tok, media, parts)
        tail = tok.encode(answer, add_special_tokens=False).ids + [tok.token_to_id(style.end_text)]
        out.append((head + tail, [IGNORE] * len(head) + tail, media.tensors(parts)))
    _, parts, first, again, second = CHAT
    messages = messages_of(parts)
    for answer in (first, second):
        head = chat_ids(tok, style, media, parts, style.render(messages))
        tail = tok.encode(style.answer(answer), add_special_tokens=False).ids
        out.append((head + tail, [IGNORE] * len(head) + tail, media.tensors(parts)))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": again}]
    return out


@torch.no_grad()
def scatter(model):
    """Starts what has a default apart from it, so that mistakes with it show."""
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith(".weight"):
            p.add_(0.15 * torch.randn_like(p))
        elif name.endswith("per_dim_scale"):
            p.normal_(0, 0.5)
        elif name.endswith("position_embedding_table"):
            p.normal_(0, 0.3)
        elif name.endswith("embed_tokens_per_layer.weight"):
            p.normal_(0, 0.05)  # the row of padding, too
        elif name.endswith("output_proj.bias"):
            p.normal_(0, 0.3)
        elif "tower" in name and p.dim() >= 2:
            p.mul_(3.0)
    for name, b in model.named_buffers():
        if name.endswith("layer_scalar"):
            b.uniform_(0.75, 1.15)


@torch.no_grad()
def bound(model, batches):
    """Clipping bounds that cut about one value in a hundred on each side, of inputs and outputs."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if module.__class__.__name__ == "Gemma4ClippableLinear" and module.use_clipped_linears:

            def note(module, inputs, output, name=name):
                rows = found.setdefault(name, ([], []))
                rows[0].append(inputs[0].flatten())
                rows[1].append(output.flatten())

            hooks.append(module.register_forward_hook(note))
    for ids, _, tensors in batches:
        model(input_ids=torch.tensor([ids]), **tensors)
    for hook in hooks:
        hook.remove()
    for name, module in model.named_modules():
        if name in found:
            for side, values in zip(("input", "output"), found[name]):
                values = torch.cat(values).sort().values
                for end, q in (("min", 0.008), ("max", 0.994)):
                    getattr(module, f"{side}_{end}").copy_(values[int(q * (len(values) - 1))].bfloat16().float())


def fit(model, texts, media, seed, steps, lr, clip_at=0.5):
    from train import batches

    feed = batches(texts, random.Random(seed), 16)

    def learn(step):
        if clip_at is not None and step == int(clip_at * steps):
            bound(model, media)
        ids, labels = next(feed)
        loss = training.next_token_loss(model(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        seen = 0.0
        for ids, labels, tensors in [media[(step * 3 + k) % len(media)] for k in range(3)]:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False, **tensors).logits
            other = training.next_token_loss(logits, torch.tensor([labels]))
            (other / 3).backward()
            seen += other.item() / 3
        return f"{loss.item():.4f}  media {seen:.4f}"

    training.fit(model, learn, steps, lr, every=20)


def build(spec, tok, style):
    one = tok.token_to_id
    text = transformers.Gemma4TextConfig(
        **spec["text"], pad_token_id=one("<pad>"), eos_token_id=one("<eos>"), bos_token_id=one("<bos>")
    )
    config = transformers.Gemma4Config(
        text_config=text, vision_config=transformers.Gemma4VisionConfig(**spec["vision"]),
        audio_config=transformers.Gemma4AudioConfig(**spec["audio"]),
        boi_token_id=one("<|image>"), eoi_token_id=one("<image|>"), image_token_id=one("<|image|>"), video_token_id=one("<|video|>"),
        boa_token_id=one("<|audio>"), eoa_token_index=one("<audio|>"), audio_token_id=one("<|audio|>"), tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    return transformers.Gemma4ForConditionalGeneration(config)


def save(model, tok, spec, style, out):
    out.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, spec["dtype"])
    stored = type(model)(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(dtype)
    stored.config.dtype = dtype
    stored.generation_config = transformers.GenerationConfig(
        eos_token_id=style.ends(tok), bos_token_id=tok.token_to_id("<bos>"), pad_token_id=0, do_sample=False
    )
    stored.save_pretrained(out)
    # Published checkpoints may carry keys and values of shared layers: they are to be ignored.
    tensors = load_file(out / "model.safetensors")
    layers = spec["text"]["num_hidden_layers"]
    at = f"model.language_model.layers.{layers - 1}.self_attn"
    width = spec["text"]["num_key_value_heads"] * spec["text"]["global_head_dim"]
    for part in ("k_proj", "v_proj"):
        tensors[f"{at}.{part}.weight"] = torch.ones(width, spec["text"]["hidden_size"], dtype=dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    saved = json.loads((out / "config.json").read_text())
    (out / "config.saved.json").write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
    (out / "config.json").write_text(json.dumps(publish(saved, spec), indent=2, sort_keys=True) + "\n")
    style.write(tok, out, spec["text"]["max_position_embeddings"])
    features = Gemma4AudioFeatureExtractor(feature_size=spec["mels"]).to_dict()
    processor = {
        "processor_class": "Gemma4Processor", "audio_ms_per_token": 40, "audio_seq_length": 750,
        "image_seq_length": spec["image"]["max_soft_tokens"],
        "feature_extractor": {k: v for k, v in features.items() if not isinstance(v, (np.ndarray, list)) or k == "model_input_names"},
        "image_processor": Gemma4ImageProcessor(**spec["image"]).to_dict(),
    }
    (out / "processor_config.json").write_text(json.dumps(processor, indent=2, sort_keys=True, default=str) + "\n")


def publish(saved, spec):
    """The older spelling of `config.json`, that published checkpoints have."""
    value = json.loads(json.dumps(saved))
    text = value["text_config"]
    text.pop("per_layer_config")
    text["global_head_dim"] = spec["text"]["global_head_dim"]
    text["num_global_key_value_heads"] = None
    value["vision_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    value["eoa_token_index"] = value.pop("eoa_token_index", None) or value.pop("eoa_token_id")
    return value


@torch.no_grad()
def greedy(model, ids, tensors, limit, ends):
    """As `goldens.greedy`, the media with the prompt."""
    out, rows, past, feed = [], [], None, ids
    while True:
        step = model(input_ids=torch.tensor([feed]), past_key_values=past, use_cache=True, **(tensors if past is None else {}))
        past = step.past_key_values
        rows.append(step.logits[0, -1].float())
        out.append(int(rows[-1].argmax()))
        if out[-1] in ends or len(out) == limit:
            break
        feed = [out[-1]]
    rows = torch.stack(rows)
    whole = model(input_ids=torch.tensor([ids + out[:-1]]), use_cache=False, **tensors).logits[0, len(ids) - 1 :].float()
    apart = (whole - rows).abs().max().item()
    assert apart < goldens.DRIFT, apart
    return out, rows, "eos" if out[-1] in ends else "length"


def image_features(model, pixels, positions):
    """The soft tokens of images, one row after the other."""
    soft = model.model.get_image_features(pixels, positions, return_dict=True).pooler_output
    soft = torch.cat(list(soft)) if isinstance(soft, (list, tuple)) else soft.reshape(-1, soft.shape[-1])
    return soft.contiguous()


@torch.no_grad()
def record(spec, out, seed, style, tok):
    """Text by `goldens.write`; then what it lacks."""
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    found = goldens.write(spec["name"], out, seed, style, model)
    media, ends = Media(out, spec), set(style.ends(tok))
    tensors = load_file(out / "goldens.safetensors")
    value = json.loads((out / "goldens.json").read_text())
    missed = list(found["missed"])
    images, audios, listed = [], [], []
    for name, size, _ in IMAGES:
        pixels, positions, tokens = media.images[name]
        real = int((positions[0, :, 0] >= 0).sum())
        grid = (positions[0].max(0).values + 1).tolist()
        levels = pixels[0, :real] * 255
        assert (levels - levels.round()).abs().max() < 1e-3
        tensors[f"image.{name}.patches"] = levels.round().to(torch.uint8).contiguous()
        soft = image_features(model, pixels, positions)
        assert soft.shape[0] == tokens
        tensors[f"image.{name}.soft"] = soft
        images.append({"id": name, "file": f"{name}.png", "size": list(size), "grid": grid, "tokens": tokens})
    wide = Gemma4ImageProcessor(**(spec["image"] | {"max_soft_tokens": 140}))(Image.open(out / "flag.png"), return_tensors="pt")
    tensors["image.flag.soft140"] = image_features(model, wide["pixel_values"], wide["image_position_ids"])
    for name, samples, _ in CLIPS:
        mel, mask, tokens = media.audios[name]
        soft = model.model.get_audio_features(mel, mask, return_dict=True)
        tensors[f"audio.{name}.mel"] = mel[0].contiguous()
        tensors[f"audio.{name}.soft"] = soft.pooler_output[0, :tokens].contiguous()
        audios.append({"id": name, "file": f"{name}.wav", "samples": samples, "frames": mel.shape[1], "valid": int(mask.sum()), "tokens": tokens})
    worst = found["margin"]

    def note(id, parts, ids, answer, limit, tail):
        nonlocal worst
        got, rows, finish = greedy(model, ids, media.tensors(parts), limit, ends)
        text = tok.decode(got, skip_special_tokens=True)
        margin = goldens.least_margin(rows)
        if text != answer or finish != "eos":
            missed.append(id)
        if margin < worst:
            worst, found["where"] = margin, id
        tensors[f"{id}.logits"] = rows[:4].contiguous()
        return {
            "prompt_ids": ids, "output_ids": got, "text": text, "finish": finish, "min_margin": round(margin, 4),
            "logits_steps": list(range(min(4, len(got)))), **tail,
        }

    for id, parts, answer in cases():
        entry = note(id, parts, prompt_ids(tok, media, parts), answer, 40, {})
        listed.append({"id": id, "parts": parts} | entry)
    id, parts, first, again, second = CHAT
    messages, turns = messages_of(parts), []
    for user, answer in ((parts, first), (again, second)):
        ids = chat_ids(tok, style, media, parts, style.render(messages))
        turns.append({"user": user} | note(f"{id}{len(turns)}", parts, ids, answer, 64, {}))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": again}]
    value |= {"images": images, "audios": audios, "media": listed, "media_chat": {"id": id, "turns": turns}, "min_margin": round(worst, 4)}
    goldens.dump(out / "goldens.json", value)
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    return found | {"margin": worst, "learned": not missed, "missed": missed}


def produce(spec, seed, steps, out, margin, lr):
    from train import sequences

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    style = STYLES[spec["style"]]
    texts = corpus.paragraphs(seed) + [m for c in corpus.CHATS for t in c["turns"] for m in t]
    texts += [ASK_IMAGE, ASK_CLIP] + [words for _, _, words in IMAGES + CLIPS]
    tok = style.train(texts, spec["tokenizer_size"])
    model = build(spec, tok, style)
    scatter(model)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    write_media(out, seed)
    media = Media(out, spec)
    seqs, more = sequences(tok, seed, style), media_sequences(tok, style, media)
    count = sum(p.numel() for p in model.parameters())
    longest = max(len(s[0]) for s in seqs + more)
    print(f"{spec['name']}: {count} parameters, {len(seqs)} texts, {len(more)} with media, longest {longest} tokens", flush=True)
    assert longest <= spec["text"]["max_position_embeddings"], longest
    for attempt in range(3):
        first = attempt == 0
        fit(model, seqs, more, seed + attempt, steps if first else steps // 2, lr if first else lr / 3, clip_at=0.5 if first else None)
        save(model, tok, spec, style, out)
        found = record(spec, out, seed, style, tok)
        print(f"  least margin {found['margin']:.3f} in case {found['where']}, missed {found['missed']}", flush=True)
        if found["margin"] >= margin and found["learned"]:
            break
    else:
        raise SystemExit(f"{spec['name']}: least margin {found['margin']:.3f} < {margin}, or not learned: {found['missed']}")
    size = 0
    for f in out.rglob("*"):
        f.chmod(0o644)
        size += f.stat().st_size
    print(f"  {out.name}: {size} bytes; ways to the same result differ by at most {found['drift']:.2e}")
