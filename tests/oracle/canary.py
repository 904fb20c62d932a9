"""The Canary tiny model: draws a checkpoint and records goldens by `transformers`.

    python canary.py FIXTURES [--unseen OUT]

The clips are those of `whisper-tiny`, see `whisper.py`. `--unseen` draws one of other shapes.
"""

import random
import shutil

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CanaryConfig, CanaryForConditionalGeneration, GenerationConfig, ParakeetEncoderConfig, ParakeetFeatureExtractor,
)
from transformers.models.canary.configuration_canary import CanaryDecoderConfig

import recogniser
from parakeet import Exact, clip
from whisper import RATE, WORDS

# In the order of the published file.
SPECIAL = [
    "<unk>", "<|nospeech|>", "<pad>", "<|endoftext|>", "<|startoftranscript|>", "<|pnc|>", "<|nopnc|>", "<|startofcontext|>",
    "<|itn|>", "<|noitn|>", "<|timestamp|>", "<|notimestamp|>", "<|diarize|>", "<|nodiarize|>", "<|spkchange|>",
    "<|audioseparator|>", "<|emo:undefined|>", "<|unklang|>", "<|en|>", "<|de|>", "<|fr|>", "<|ja|>",
]
CASES = [("one", "en", "en", True), ("one", "de", "en", True), ("two", "fr", "fr", False)]
SHAPES = {
    "canary-tiny": (
        dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=76, conv_kernel_size=5, subsampling_conv_channels=10),
        dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=20, intermediate_size=92, max_position_embeddings=60),
        dict(feature_size=64),
    ),
    "canary-unseen": (
        dict(hidden_size=36, num_hidden_layers=3, num_attention_heads=2, intermediate_size=52, conv_kernel_size=7, subsampling_conv_channels=6,
             subsampling_factor=4, scale_input=True, convolution_bias=False),
        dict(num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3, head_dim=14, intermediate_size=40, max_position_embeddings=44,
             attention_bias=False),
        dict(feature_size=36, hop_length=128, n_fft=320, win_length=300, preemphasis=0.9),
    ),
}
LIMIT = 8


def tokenizer():
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    words = [w for some in WORDS.values() for w in some]
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False, special_tokens=[AddedToken(t, normalized=False) for t in SPECIAL])
    tok.train_from_iterator([" ".join(random.Random(i).sample(words, 6)) for i in range(200)], trainer)
    return tok


def prompt(tok, source, target, punctuation):
    text = (
        f"<|startofcontext|><|startoftranscript|><|emo:undefined|><|{source}|><|{target}|>"
        f"<|{'pnc' if punctuation else 'nopnc'}|><|noitn|><|notimestamp|><|nodiarize|>"
    )
    return tok.encode(text, add_special_tokens=False).ids


def build(kind, tok, seed):
    torch.manual_seed(seed)
    encoder, decoder, features = SHAPES[kind]
    config = CanaryConfig(
        vocab_size=tok.get_vocab_size(),
        encoder_config=ParakeetEncoderConfig(**({"scale_input": False, "layerdrop": 0.0} | encoder), num_mel_bins=features["feature_size"]),
        decoder_config=CanaryDecoderConfig(vocab_size=tok.get_vocab_size(), hidden_size=encoder["hidden_size"], **decoder),
        tie_word_embeddings=kind == "canary-tiny",
    )
    config._attn_implementation = "eager"
    model = CanaryForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.normal_(1, 0.2)
            elif "bias" in name:
                p.normal_(0, 0.15)
            elif "embed_tokens" in name or "proj_out" in name:
                p.normal_(0, 1.2)
            elif p.dim() > 1:
                p.normal_(0, (1.3 if "encoder." in name else 2.2) / p[0].numel() ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def save(model, kind, tok, out):
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stored = CanaryForConditionalGeneration(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.float16)
    stored.config.dtype = torch.float16
    stored.generation_config = GenerationConfig(decoder_start_token_id=7, bos_token_id=4, eos_token_id=3, pad_token_id=2)
    stored.save_pretrained(out)
    tok.save(str(out / "tokenizer.json"))
    ParakeetFeatureExtractor(**SHAPES[kind][2]).save_pretrained(out)


@torch.no_grad()
def answer(model, kind, tok, case, fixtures):
    name, source, target, punctuation = case
    made = Exact(**SHAPES[kind][2])(clip(fixtures, name), sampling_rate=RATE, return_tensors="pt")
    batch = {"input_features": made["input_features"].float(), "attention_mask": made["attention_mask"]}
    encoded = model.model.encoder(**batch).last_hidden_state
    rows = int(model.model.encoder._get_subsampling_output_length(batch["attention_mask"].sum(-1))[0])
    head = prompt(tok, source, target, punctuation)
    said = model.generate(
        **batch, decoder_input_ids=torch.tensor([head]), max_new_tokens=LIMIT, return_dict_in_generate=True, output_logits=True,
    )
    logits = torch.stack([row[0] for row in said.logits])
    return encoded[0, :rows], head, said.sequences[0].tolist()[len(head) :], logits


@torch.no_grad()
def record(fixtures, out, kind, tok, seed):
    model = CanaryForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, cases = {}, []
    for case in CASES:
        name, source, target, punctuation = case
        encoded, head, ids, logits = answer(model, kind, tok, case, fixtures)
        id = f"{name}-{source}-{target}"
        attention = model.model.decoder.layers[-1].encoder_attn
        heads = lambda x: x.view(len(encoded), -1, attention.head_dim)
        tensors[f"{name}.cross_k"] = heads(attention.k_proj(encoded)).permute(1, 2, 0).contiguous()
        tensors[f"{id}.logits"] = logits.float().contiguous()
        cases.append({
            "id": id, "clip": f"{name}.wav", "language": source, "into": target, "punctuation": punctuation, "prompt_ids": head,
            "output_ids": ids, "text": tok.decode(ids), "rows": len(encoded), "min_margin": round(recogniser.margin(logits), 4),
        })
    return recogniser.write(out, seed, cases, tensors)


def draw(kind, out, fixtures, seed):
    tok = tokenizer()
    model = build(kind, tok, seed)
    said = [answer(model, kind, tok, case, fixtures) for case in CASES]
    various = len(set(said[2][2])) > 3 and said[0][2] != said[1][2]
    if min(recogniser.margin(one[3]) for one in said) < 0.12 or not various:
        return False
    save(model, kind, tok, out)
    return record(fixtures, out, kind, tok, seed)


if __name__ == "__main__":
    recogniser.main(__doc__, "canary", draw)
