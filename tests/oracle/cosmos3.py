"""A tiny Cosmos3-Edge, drawn and not trained, and its logits by `transformers`, in `../fixtures/cosmos3`.

    python cosmos3.py ../fixtures/cosmos3

The checkpoint has its tower, which a decoder of text leaves out, and no tokenizer. `logits.json` has the contexts that a
bundle is made for, with a text of as many tokens and the logits in f32 behind some of them, as in `switches.py`."""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

VOCAB, EVERY, CONTEXTS = 48, 5, [40]
TEXT = dict(
    hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=12,
    vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 2, 2]},
)
VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4, num_patches=16)


def main(out):
    torch.set_num_threads(1)
    shutil.rmtree(out, ignore_errors=True)
    config = transformers.Cosmos3EdgeConfig(text_config=TEXT, vision_config=VISION, projector_hidden_size=20)
    config._attn_implementation = "eager"
    model = transformers.Cosmos3EdgeForConditionalGeneration(config).float().eval()
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            drawn = 1 + 0.3 * normal if name.endswith("norm.weight") else normal / p.shape[-1] ** 0.5
            p.copy_((1.5 * drawn if p.ndim > 1 else drawn).half().float())
    runs = []
    for ctx in CONTEXTS:
        ids = torch.from_numpy(np.random.default_rng(ctx).integers(24, VOCAB, (1, ctx)))
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        at = list(range(EVERY - 1, ctx, EVERY))
        rows = [[round(x, 6) for x in logits[i].tolist()] for i in at]
        runs.append({"ids": ids[0].tolist(), "at": at, "logits": rows})
    model.half().save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "logits.json").write_text(json.dumps(runs, separators=(",", ":")) + "\n")
    for file in out.iterdir():
        file.chmod(0o644)
    print(max(abs(x) for run in runs for row in run["logits"] for x in row))


main(pathlib.Path(sys.argv[1]))
