"""Goldens of the shaping part of the kit of host-ops: what torchvision and the processors of transformers make of
images and sound that an integer formula gives, so that no image or clip has to be stored.

    shape.py vision ../fixtures/shape
    shape.py audio ../fixtures/shape
    shape.py lanczos ../fixtures/shape
"""

import argparse
import hashlib
import itertools
import json
import math
import pathlib

import numpy as np


def image_of(width, height, seed):
    """Gradients, edges of 17 by 23 pixels and noise; uint8 [height, width, 3]."""
    y, x, c = np.meshgrid(*(np.arange(n, dtype=np.uint32) for n in (height, width, 3)), indexing="ij")
    with np.errstate(over="ignore"):
        h = x * np.uint32(374761393) + y * np.uint32(668265263) + (c + np.uint32(seed)) * np.uint32(2246822519)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(1274126177)
        noise = (h ^ (h >> np.uint32(16))) & np.uint32(255)
    edge = ((x // 17 + y // 23 + c) & 1) * 255
    gradient = (x * 3 + y * 5 + c * 40) & 255
    return ((2 * edge + gradient + noise) >> 2).astype(np.uint8)


def values(count, seed):
    """Multiples of 1/4096 from -0.5 on, below 0.5: exact in f32."""
    with np.errstate(over="ignore"):
        h = (np.arange(count, dtype=np.uint32) + np.uint32(seed)) * np.uint32(2654435761)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(2246822519)
        h = h ^ (h >> np.uint32(13))
    return ((h & np.uint32(4095)).astype(np.float32) - 2048.0) / 4096.0


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def decimals(array):
    """f32 as the shortest decimals that read back to the same bits."""
    return [float(str(v)) for v in np.asarray(array, dtype=np.float32).ravel()]


RESIZES = [  # width, height -> width, height
    (1280, 853, 512, 512), (403, 504, 64, 64), (200, 150, 512, 512), (333, 217, 160, 160), (90, 121, 160, 160),
    (700, 300, 224, 96), (515, 509, 512, 512), (99, 105, 96, 96), (64, 48, 64, 96), (64, 48, 32, 48), (5, 3, 32, 32),
    (1, 1, 32, 64), (2000, 7, 320, 32), (96, 64, 96, 64), (33, 1, 7, 5),
]

QWEN_SIZES = [
    (512, 512), (640, 480), (480, 640), (1920, 1080), (4032, 3024), (3024, 4032), (8000, 6000), (50, 50), (1, 1), (1, 200),
    (200, 1), (16, 16), (48, 48), (80, 80), (112, 144), (33, 4000), (4000, 33), (255, 257), (256, 256), (97, 1531), (1000, 5),
    (65535, 400), (10, 1999), (31, 31), (240, 272), (272, 240), (12345, 6789), (20000, 150), (176, 208), (5120, 3200),
    (201, 1), (7, 1407), (1400, 7),
]
FILM_SIZES = [(640, 360), (52, 34), (1920, 1080), (8, 300), (7, 5), (9, 2000), (96, 64), (1080, 1920), (33, 31)]
GEMMA_SIZES = QWEN_SIZES + [(7000, 7), (7, 7000), (1, 3000), (768, 768), (767, 769), (1104, 552), (912, 684)]


def target_sizes():
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    def answer(rule, *arguments):
        try:
            height, width = rule(*arguments)
            return [width, height]
        except ValueError:
            return None

    smart, budget = [], []
    for factor, least, most in [(32, 65536, 16777216), (28, 3136, 1003520), (32, 4096, 40960)]:
        for width, height in QWEN_SIZES:
            to = answer(smart_resize, height, width, factor, least, most)
            smart.append({"from": [width, height], "factor": factor, "pixels": [least, most], "to": to})
    for patch, pool, tokens in [(16, 3, 280), (16, 3, 70), (14, 2, 64)]:
        for width, height in GEMMA_SIZES:
            to = answer(get_aspect_ratio_preserving_size, height, width, patch, tokens * pool**2, pool)
            budget.append({"from": [width, height], "patch": patch, "pool": pool, "patches": tokens * pool**2, "to": to})
    return {"smart_resize": smart, "smart_resize_video": film_sizes(answer), "aspect_ratio_preserving_size": budget}


def film_sizes(answer):
    """Sizes of frames, by the number of frames of their video. The processor, asked with frames, gives the same."""
    import torch
    from transformers import Qwen3VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    out = []
    for patch, least, most in [(16, 4096, 25165824), (16, 131072, 786432), (8, 2048, 8192)]:
        size = {"shortest_edge": least, "longest_edge": most}
        processor = Qwen3VLVideoProcessor(patch_size=patch, size=size, do_sample_frames=False, cap_pixels_per_frame=False)
        for (width, height), counts in zip(FILM_SIZES, itertools.cycle([(2, 5, 40), (3, 12, 768), (4, 6, 64)])):
            for count in counts:
                to = answer(smart_resize, count, height, width, 2, 2 * patch, least, most)
                if to and count * height * width < 1 << 20:
                    video = torch.zeros(count, 3, height, width, dtype=torch.uint8)
                    found = processor(videos=[video], return_tensors="pt")["video_grid_thw"][0].tolist()
                    assert found[1:] == [to[1] // patch, to[0] // patch], (found, to)
                out.append({"from": [width, height], "frames": count, "factor": 2 * patch, "pixels": [least, most], "to": to})
    return out


def patches():
    """Pixels of both processors, without resizing: images have sizes that the rules leave as they are."""
    import torch
    from transformers import Qwen2VLImageProcessor
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor

    cases = []
    clip = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for patch, norm, sizes in [(16, half, [(64, 64), (96, 160), (224, 32)]), (14, clip, [(56, 84), (112, 28)])]:
        size = {"shortest_edge": 1, "longest_edge": 1 << 24}
        processor = Qwen2VLImageProcessor(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size, **norm)
        for width, height in sizes:
            image = torch.from_numpy(image_of(width, height, width)).permute(2, 0, 1)
            out = processor([image], return_tensors="pt")
            pixels = out["pixel_values"].numpy().astype("<f4")
            assert out["image_grid_thw"].tolist() == [[1, height // patch, width // patch]]
            cases.append(
                {"layout": "channels_first", "frames": 2, "patch": patch, "block": 2, "size": [width, height],
                 "mean": norm["image_mean"], "std": norm["image_std"], "shape": list(pixels.shape),
                 "sha256": digest(pixels), "last": decimals(pixels[-1, -4:])}
            )
    # Two different frames in one patch: the reshape and permutation of Qwen2VLVideoProcessor.
    width, height, patch = 64, 96, 16
    frames = np.stack([image_of(width, height, seed) for seed in (1, 2)]).transpose(0, 3, 1, 2)
    x = (torch.from_numpy(frames).float() - 127.5) / 127.5
    rows, columns = height // patch, width // patch
    x = x.view(1, 2, 3, rows // 2, 2, patch, columns // 2, 2, patch).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    pixels = x.reshape(rows * columns, -1).numpy().astype("<f4")
    cases.append(
        {"layout": "channels_first", "frames": 2, "seeds": [1, 2], "patch": patch, "block": 2, "size": [width, height],
         "mean": [0.5] * 3, "std": [0.5] * 3, "shape": list(pixels.shape), "sha256": digest(pixels),
         "last": decimals(pixels[-1, -4:])}
    )
    processor = Gemma4ImageProcessor(max_soft_tokens=70)
    for width, height in [(384, 384), (576, 240), (48, 3360)]:
        image = torch.from_numpy(image_of(width, height, width)).permute(2, 0, 1)
        out = processor([image], return_tensors="pt")
        count = (width // 16) * (height // 16)
        pixels = out["pixel_values"].numpy()[0, :count].astype("<f4")
        assert (out["image_position_ids"][0, count:] == -1).all(), "the image was resized"
        assert out["image_position_ids"][0, 1].tolist() == [1, 0]
        model = (2 * (torch.from_numpy(pixels) - 0.5)).numpy().astype("<f4")
        cases.append(
            {"layout": "channels_last", "frames": 1, "patch": 16, "block": 1, "size": [width, height],
             "shape": list(pixels.shape), "sha256": digest(pixels), "model_sha256": digest(model),
             "last": decimals(pixels[-1, -4:])}
        )
    return cases


def positions():
    import torch
    from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
    from transformers.models.gemma4.modeling_gemma4 import (
        Gemma4VisionPatchEmbedder, Gemma4VisionPooler, Gemma4VisionRotaryEmbedding,
    )
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    learned, ropes, axial, pooled = [], [], [], []
    width = 5
    for side, rows, columns, block in [(6, 4, 6, 2), (6, 8, 2, 2), (7, 1, 5, 1), (3, 6, 1, 1), (4, 4, 4, 2), (1, 2, 2, 2)]:
        table = torch.from_numpy(values(side * side * width, side)).view(-1, width)
        indices, weights = get_vision_interpolation_indices_and_weights(
            torch.tensor([[1, rows, columns]]), side, "bilinear", align_corners=True, spatial_merge_size=block
        )
        learned.append(
            {"side": side, "grid": [rows, columns], "block": block, "width": width,
             "values": decimals((table[indices] * weights[:, :, None]).sum(1))}
        )
    config = Qwen3VLVisionConfig(hidden_size=32, num_heads=2)
    rope = Qwen3VLVisionRotaryEmbedding(config)
    grid = [(r, c) for br in range(2) for bc in range(3) for r in (2 * br, 2 * br + 1) for c in (2 * bc, 2 * bc + 1)]
    cos, sin = rope(torch.zeros(1), torch.tensor(grid))
    theta = config.rope_parameters["rope_theta"]
    ropes.append(
        {"axes": "rows_columns", "head": 16, "theta": theta, "grid": [4, 6], "block": 2,
         "cos": decimals(cos[:, :8]), "sin": decimals(sin[:, :8])}
    )
    config = Gemma4VisionConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16, rope_parameters={
        "rope_type": "axial", "rope_theta": 100.0}, position_embedding_size=9, patch_size=2)
    rope = Gemma4VisionRotaryEmbedding(config)
    grid = torch.tensor([[[x, y] for y in range(3) for x in range(4)]])
    cos, sin = (t[0] for t in rope(torch.zeros(1), grid))
    each = lambda t: torch.cat([t[:, 0:4], t[:, 8:12]], dim=1)
    ropes.append(
        {"axes": "columns_rows", "head": 16, "theta": 100.0, "grid": [3, 4], "block": 1,
         "cos": decimals(each(cos)), "sin": decimals(each(sin))}
    )
    embedder = Gemma4VisionPatchEmbedder(config)
    table = torch.from_numpy(values(2 * 9 * 32, 3)).view(2, 9, 32)
    embedder.position_embedding_table.data = table
    found = embedder._position_embeddings(grid, torch.zeros(1, 12, dtype=torch.bool))[0]
    axial.append({"entries": 9, "width": 32, "grid": [3, 4], "values": decimals(found.detach())})
    pooler = Gemma4VisionPooler(config)
    grid = torch.tensor([[[x, y] for y in range(6) for x in range(9)]])
    rows = torch.from_numpy(values(54 * 4, 4)).view(1, 54, 4)
    found, _ = pooler._avg_pool_by_positions(rows, grid, 6)
    pooled.append({"grid": [6, 9], "pool": 3, "width": 4, "values": decimals(found[0])})
    return {"learned": learned, "rope": ropes, "axial": axial, "pooled": pooled}


def vision():
    import torch
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tvf

    resizes = []
    for name, mode in [("bicubic", InterpolationMode.BICUBIC), ("bilinear", InterpolationMode.BILINEAR)]:
        for index, (width, height, to_width, to_height) in enumerate(RESIZES):
            source = torch.from_numpy(image_of(width, height, index)).permute(2, 0, 1)
            done = tvf.resize(source, [to_height, to_width], interpolation=mode, antialias=True)
            done = done.permute(1, 2, 0).contiguous().numpy()
            resizes.append(
                {"filter": name, "seed": index, "from": [width, height], "to": [to_width, to_height],
                 "sha256": digest(done), "last_row": done[-1].ravel().tolist()[:48]}
            )
    seed = image_of(5, 4, 9)
    return {
        "image": {"size": [5, 4], "seed": 9, "values": seed.ravel().tolist()},
        "resize": resizes, "sizes": target_sizes(), "patches": patches(), "positions": positions(),
    }


def lanczos():
    """What Pillow makes of the same images with its `LANCZOS`. Up to Pillow 12 the horizontal pass comes first, as for those
    whom models were trained by; Pillow 13 begins with the vertical one where the height shrinks much more."""
    import PIL
    from PIL import Image

    assert int(PIL.__version__.split(".")[0]) < 13, "needs Pillow 12 or one before it"

    resizes = []
    for index, (width, height, to_width, to_height) in enumerate(RESIZES):
        source = Image.fromarray(image_of(width, height, index))
        done = np.asarray(source.resize((to_width, to_height), Image.Resampling.LANCZOS))
        resizes.append(
            {"filter": "lanczos", "seed": index, "from": [width, height], "to": [to_width, to_height],
             "sha256": digest(done), "last_row": done[-1].ravel().tolist()[:48]}
        )
    return {"resize": resizes}


def sound(kind, count):
    """Samples as a 16-bit file has them, as f32; from integers only, so that they are the same everywhere."""
    n = np.arange(count, dtype=np.int64)
    if kind == "silence":
        wave = n * 0
    elif kind == "click":
        wave = np.where(n == count // 5, 29491, 0) + np.where(n == count - 3, -16384, 0)
    elif kind == "noise":
        with np.errstate(over="ignore"):
            h = n.astype(np.uint32) * np.uint32(2654435761)
            h = (h ^ (h >> np.uint32(15))) * np.uint32(2246822519)
            h = h ^ (h >> np.uint32(13))
        wave = (h & np.uint32(16383)).astype(np.int64) - 8192
    else:
        start, sweep, loud = {"tone": (90000000, 0, 2), "chirp": (20000000, 24000, 1), "faint": (300000000, 0, 400)}[kind]
        phase = (n * start + n * n * sweep) & 0xFFFFFFFF
        x = (phase >> 16) - 32768
        wave = (x * (32768 - np.abs(x)) >> 13) // loud
    return (np.clip(wave, -32768, 32767) / 32768.0).astype(np.float32)


SOUNDS = [
    ("chirp", 6400), ("silence", 2000), ("click", 4001), ("noise", 5555), ("tone", 3333), ("faint", 2563), ("noise", 1),
    ("noise", 160), ("noise", 161), ("tone", 320), ("tone", 321), ("chirp", 48001),
]


def audio():
    """Log-mel features of two front ends, their rows in one list: the JSON says where a case's rows begin."""
    from transformers import WhisperFeatureExtractor
    from transformers.audio_utils import mel_filter_bank, window_function
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    rows, cases, filters, place = [], [], [], 0

    def keep(kind, count, front, features, **more):
        nonlocal place
        frames = list(range(len(features))) if len(features) <= 48 else list(range(0, len(features), 23))
        chosen = np.asarray(features, dtype=np.float32)[frames].ravel()
        cases.append({"front": front, "sound": kind, "samples": count, "frames": len(features), "kept": frames,
                      "at": place, **more})
        rows.append(chosen)
        place += chosen.size

    extractor = Gemma4AudioFeatureExtractor()
    for kind, count in SOUNDS:
        out = extractor([sound(kind, count)])
        features, mask = out["input_features"][0], out["input_features_mask"][0]
        valid = int(mask.sum())
        assert mask[:valid].all() and (features[valid:] == 0).all()
        # The class transforms in f32, which shows where a mel beside a loud tone is nearly 0. So keep what the same
        # method gives for f64, too, and how far the class is from it.
        padded = np.zeros((1, -(-count // 128) * 128))
        padded[0, :count] = sound(kind, count)
        exact, _ = extractor._extract_spectrogram(padded, np.arange(padded.shape[1]) < count)
        exact = np.where(mask[:, None], exact, 0.0)
        rounding = float(np.abs(exact - features).max()) if len(features) else 0.0
        keep(kind, count, "magnitude_ln", features, valid=valid, rounding=rounding)
        keep(kind, count, "magnitude_ln", exact, valid=valid, rounding=0.0)
    extractor = WhisperFeatureExtractor()
    for kind, count in [("chirp", 48001), ("click", 4001), ("faint", 2563)]:
        features = extractor(sound(kind, count), sampling_rate=16000, return_tensors="np")["input_features"][0].T
        assert features.shape == (3000, 80)
        keep(kind, count, "power_log10", features[: count // 160 + 4])
    for scale, norm, low in [("htk", None, 0.0), ("slaney", "slaney", 0.0), ("htk", "slaney", 125.0), ("slaney", None, 60.0)]:
        bank = mel_filter_bank(33, 12, low, 7600.0, 16000, norm=norm, mel_scale=scale)
        filters.append({"scale": scale, "area_norm": norm is not None, "min_hz": low, "values": decimals(bank.T)})
    hann = [decimals(window_function(9, "hann", periodic=periodic)) for periodic in (True, False)]
    ends = {f"{kind} {count}": int(round(float(sound(kind, count).astype(np.float64).sum()) * 32768)) for kind, count in SOUNDS}
    return {"sums": ends, "hann": {"periodic": hann[0], "symmetric": hann[1]}, "filters": filters, "cases": cases}, rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["vision", "audio", "lanczos"])
    parser.add_argument("out", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.kind == "vision":
        goldens = vision()
    elif arguments.kind == "lanczos":
        goldens = lanczos()
    else:
        goldens, rows = audio()
        (arguments.out / "audio.f32").write_bytes(np.concatenate(rows).astype("<f4").tobytes())
    (arguments.out / f"{arguments.kind}.json").write_text(compact(json.dumps(goldens, indent=1)))


def compact(text):
    """Lists of numbers on one line."""
    import re

    return re.sub(r"\[\s*([-\d.e,\s]*?)\s*\]", lambda m: "[" + re.sub(r"\s+", "", m.group(1)) + "]", text) + "\n"


if __name__ == "__main__":
    main()
