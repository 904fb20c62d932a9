"""Tiny decoders with drawn weights in the layout of published checkpoints, and their logits by `transformers`, in
`../fixtures/drawn`.

    python drawn.py ../fixtures/drawn

A folder has no tokenizer. Its `logits.json` has the contexts that a bundle is made for, with a text of as many tokens and
the logits in f32 behind some of them, as in `switches.py`.

| folder | |
|---|---|
| `cosmos3` | Cosmos3-Edge with its tower, which a decoder of text leaves out |
| `gemma3n` | Gemma 3n: streams, low-rank residuals, sparse gates, per-layer inputs of a smaller vocabulary, donors |
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

EVERY = 5


def cosmos3():
    text = dict(
        hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=12, vocab_size=48, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 2, 2]},
    )
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4, num_patches=16,
    )
    config = transformers.Cosmos3EdgeConfig(text_config=text, vision_config=vision, projector_hidden_size=20)
    return transformers.Cosmos3EdgeForConditionalGeneration, config


def gemma3n():
    slides, sees = "sliding_attention", "full_attention"
    config = transformers.Gemma3nTextConfig(
        hidden_size=48, intermediate_size=56, num_hidden_layers=7, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, vocab_size=60, vocab_size_per_layer_input=48, hidden_size_per_layer_input=12,
        max_position_embeddings=64, sliding_window=8, layer_types=[slides, sees, slides, sees, slides, slides, sees],
        num_kv_shared_layers=3, laurel_rank=6, altup_num_inputs=3, final_logit_softcapping=9.0,
        activation_sparsity_pattern=[0.7, 0.9, 0.0, 0.5, 0.0, 0.3, 0.0], bos_token_id=1, eos_token_id=2, pad_token_id=0,
        # Larger than that of published ones, which the least of mean squares, 1e-5, would not show beside.
        rms_norm_eps=1e-3,
    )
    return transformers.Gemma3nForCausalLM, config


def published(name, out):
    """The names and keys of published checkpoints, where they differ from those that the class saves."""
    if name != "gemma3n":
        return
    file = out / "model.safetensors"
    tensors = load_file(file)
    rename = {key: key.replace("model.", "model.language_model.", 1) for key in tensors}
    save_file({rename[key]: value for key, value in tensors.items()}, file, metadata={"format": "pt"})
    path = out / "config.json"
    text = json.loads(path.read_text())
    ropes = text.pop("rope_parameters")
    text["rope_theta"], text["rope_local_base_freq"] = (ropes[k]["rope_theta"] for k in ("full_attention", "sliding_attention"))
    text["rope_scaling"] = None
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text,
        "dtype": text.pop("dtype"), "audio_token_id": 57, "image_token_id": 56,
    }
    path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


def main(out):
    torch.set_num_threads(1)
    for make, contexts in ((cosmos3, [40]), (gemma3n, [40])):
        name = make.__name__
        shutil.rmtree(out / name, ignore_errors=True)
        build, config = make()
        config._attn_implementation = "eager"
        model = build(config).float().eval()
        generator = torch.Generator().manual_seed(23)
        with torch.no_grad():
            for key, p in model.named_parameters():
                normal = torch.randn(p.shape, generator=generator)
                gain = 1 + 0.3 * normal if p.ndim == 1 and "bias" not in key else normal / p.shape[-1] ** 0.5
                # Routers divide by the width, and would leave streams as they are.
                factor = 1.5 if p.ndim > 1 else 1.0
                factor *= {"modality_router": p.shape[-1] ** 0.5, "prediction_coefs": 0.3, "correction_coefs": 0.3}.get(
                    key.split(".")[-2], 1.0)
                p.copy_((factor * gain).half().float())
        runs = []
        for ctx in contexts:
            size = config.get_text_config().vocab_size
            ids = torch.from_numpy(np.random.default_rng(ctx).integers(24, size, (1, ctx)))
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0]
            at = list(range(EVERY - 1, ctx, EVERY))
            rows = [[round(x, 6) for x in logits[i].tolist()] for i in at]
            runs.append({"ids": ids[0].tolist(), "at": at, "logits": rows})
        model.half().save_pretrained(out / name)
        (out / name / "generation_config.json").unlink(missing_ok=True)
        published(name, out / name)
        (out / name / "logits.json").write_text(json.dumps(runs, separators=(",", ":")) + "\n")
        for file in (out / name).iterdir():
            file.chmod(0o644)
        print(name, max(abs(x) for run in runs for row in run["logits"] for x in row))


main(pathlib.Path(sys.argv[1]))
