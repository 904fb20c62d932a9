"""The Moonshine tiny models: draws checkpoints and records goldens by `transformers`.

    python moonshine.py FIXTURES [--unseen OUT]

The clips are those of `whisper-tiny`, see `whisper.py`. `--unseen` draws one of other shapes.
"""

import json
import random
import shutil

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import GenerationConfig, MoonshineConfig, MoonshineForConditionalGeneration, Wav2Vec2FeatureExtractor

import recogniser
from parakeet import clip
from whisper import RATE, WORDS

# Tokens of a second, the first one of an answer among them.
PER_SECOND = 6.5
SHAPES = {
    "moonshine-tiny": dict(
        hidden_size=44, intermediate_size=76, encoder_num_hidden_layers=3, decoder_num_hidden_layers=2, heads=4, rotary=0.6,
        pad_head_dim_to_multiple_of=8, max_position_embeddings=40, tie_word_embeddings=True,
    ),
    "moonshine-unseen": dict(
        hidden_size=42, intermediate_size=52, encoder_num_hidden_layers=2, decoder_num_hidden_layers=3, heads=3, rotary=0.9,
        pad_head_dim_to_multiple_of=None, max_position_embeddings=64, tie_word_embeddings=False, theta=500.0,
    ),
}


def tokenizer():
    """Pieces with bytes behind them, in the order of the published file: <unk>, <s>, </s>."""
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])
    words = [w for some in WORDS.values() for w in some]
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False, special_tokens=special)
    tok.train_from_iterator([" ".join(random.Random(i).sample(words, 6)) for i in range(200)], trainer)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tok


def build(kind, tok, seed):
    torch.manual_seed(seed)
    shape = dict(SHAPES[kind])
    heads, rotary, theta = shape.pop("heads"), shape.pop("rotary"), shape.pop("theta", 10000.0)
    config = MoonshineConfig(
        vocab_size=tok.get_vocab_size(), encoder_num_attention_heads=heads, decoder_num_attention_heads=heads,
        rope_parameters={"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary},
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **shape,
    )
    config._attn_implementation = "eager"
    model = MoonshineForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.normal_(1, 0.2)
            elif name.endswith("bias"):
                p.normal_(0, 0.2)
            elif name.endswith("conv1.weight"):
                p.normal_(0, 0.5)
            elif "embed_tokens" in name:
                p.normal_(0, 0.4)
            else:
                p.normal_(0, (1.1 if "encoder." in name else 2.0) / p[0].numel() ** 0.5)
        if not config.tie_word_embeddings:
            model.proj_out.weight.normal_(0, 0.5)
    return model.eval()


def save(model, tok, out):
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stored = MoonshineForConditionalGeneration(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.float16)
    stored.config.dtype = torch.float16
    stored.generation_config = GenerationConfig(
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, max_length=model.config.max_position_embeddings,
    )
    stored.save_pretrained(out)
    if out.name == "moonshine-tiny":
        # As published files spell it.
        config = json.loads((out / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"], "rope_scaling": None}
        config["torch_dtype"] = config.pop("dtype")
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tok.save(str(out / "tokenizer.json"))
    Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False).save_pretrained(out)


@torch.no_grad()
def answer(model, samples):
    """Rows of the encoder, tokens behind the first one, and logits."""
    values = torch.tensor(samples)[None]
    encoded = model.model.encoder(values).last_hidden_state
    most = int(len(samples) * PER_SECOND / RATE)
    made = model.generate(values, max_length=max(most, 2), return_dict_in_generate=True, output_logits=True)
    logits = torch.stack([row[0] for row in made.logits])
    return encoded[0], made.sequences[0].tolist()[1:], logits


@torch.no_grad()
def record(fixtures, out, tok, seed):
    model = MoonshineForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, cases = {}, []
    for name in ("one", "two"):
        encoded, ids, logits = answer(model, clip(fixtures, name))
        last = model.config.decoder_num_hidden_layers - 1
        attention = model.model.decoder.layers[last].encoder_attn
        heads = lambda x: x.view(len(encoded), model.config.decoder_num_attention_heads, -1)
        tensors |= {
            f"{name}.cross_k": heads(attention.k_proj(encoded)).permute(1, 2, 0).contiguous(),
            f"{name}.logits": logits.float().contiguous(),
        }
        if name == "one":
            sound = model.model.encoder
            rows = torch.tanh(sound.conv1(torch.tensor(clip(fixtures, name))[None, None]))
            tensors["one.frames"] = sound.groupnorm(rows)[0].T.contiguous()
        cases.append({
            "clip": f"{name}.wav", "output_ids": ids, "text": tok.decode(ids), "rows": len(encoded), "min_margin": round(recogniser.margin(logits), 4),
        })
    return recogniser.write(out, seed, cases, tensors)


def draw(kind, out, fixtures, seed):
    tok = tokenizer()
    model = build(kind, tok, seed)
    least = [answer(model, clip(fixtures, name)) for name in ("one", "two")]
    various = len(set(least[1][1])) > 4 and least[0][1] != least[1][1][: len(least[0][1])]
    if min(recogniser.margin(one[2]) for one in least) < 0.15 or not various:
        return False
    save(model, tok, out)
    return record(fixtures, out, tok, seed)


if __name__ == "__main__":
    recogniser.main(__doc__, "moonshine", draw)
