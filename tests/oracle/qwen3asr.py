"""The Qwen3-ASR tiny model: draws a checkpoint and records goldens by `transformers`.

    python qwen3asr.py FIXTURES [--unseen OUT]

The clips are those of `whisper-tiny`, see `whisper.py`. `--unseen` draws one of other shapes.
"""

import json
import random
import shutil

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration, Qwen3Config
from transformers.models.qwen3_asr.configuration_qwen3_asr import Qwen3ASREncoderConfig

import recogniser
from parakeet import clip
from whisper import RATE, WORDS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
PLAIN = ["<asr_text>"]
CASES = [("one", None), ("two", "English")]
LIMIT = 8
SHAPES = {
    "qwen3asr-tiny": (
        dict(d_model=36, encoder_layers=2, encoder_attention_heads=3, encoder_ffn_dim=52, downsample_hidden_size=6, num_mel_bins=32,
             n_window_infer=100),
        dict(hidden_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=14, intermediate_size=60),
    ),
    "qwen3asr-unseen": (
        dict(d_model=40, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=44, downsample_hidden_size=5, num_mel_bins=40,
             n_window_infer=200),
        dict(hidden_size=36, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, head_dim=10, intermediate_size=52,
             attention_bias=True),
    ),
}


def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    words = [f" {w}" for some in WORDS.values() for w in some] + [" language English", " assistant user system"]
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator([" ".join(random.Random(i).sample(words, 6)) for i in range(200)], trainer)
    tok.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    tok.add_tokens([AddedToken(t, normalized=False) for t in PLAIN])
    return tok


def build(kind, tok, seed):
    torch.manual_seed(seed)
    audio, text = SHAPES[kind]
    one = tok.token_to_id
    config = Qwen3ASRConfig(
        audio_config=Qwen3ASREncoderConfig(**audio, output_dim=text["hidden_size"]).to_dict(),
        text_config=Qwen3Config(
            vocab_size=tok.get_vocab_size() + 3, max_position_embeddings=400, tie_word_embeddings=kind == "qwen3asr-tiny",
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0}, **text,
        ).to_dict(),
        audio_token_id=one("<|audio_pad|>"), pad_token_id=one("<|im_end|>"), eos_token_id=[one("<|endoftext|>"), one("<|im_end|>")],
        tie_word_embeddings=kind == "qwen3asr-tiny",
    )
    config._attn_implementation = "eager"
    model = Qwen3ASRForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight") or "ln_post.weight" in name:
                p.normal_(1, 0.2)
            elif name.endswith("bias"):
                p.normal_(0, 0.15)
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(0, 0.9)
            else:
                p.normal_(0, (1.4 if "audio" in name or "projector" in name else 1.8) / p[0].numel() ** 0.5)
    return model.eval()


def save(model, kind, tok, out):
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    stored = Qwen3ASRForConditionalGeneration(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.bfloat16)
    stored.config.dtype = torch.bfloat16
    stored.save_pretrained(out)
    tok.save(str(out / "tokenizer.json"))
    features = json.loads(Qwen3ASRFeatureExtractor(feature_size=SHAPES[kind][0]["num_mel_bins"]).to_json_string())
    (out / "processor_config.json").write_text(json.dumps({"feature_extractor": features, "processor_class": "Qwen3ASRProcessor"}, indent=2) + "\n")


@torch.no_grad()
def answer(model, kind, tok, case, fixtures):
    name, language = case
    extractor = Qwen3ASRFeatureExtractor(feature_size=SHAPES[kind][0]["num_mel_bins"])
    made = extractor(clip(fixtures, name), sampling_rate=RATE, padding=True, truncation=False, return_attention_mask=True)
    features, mask = made["input_features"], made["attention_mask"]
    rows = model.model.get_audio_features(features, mask, return_dict=True).pooler_output
    suffix = f"language {language}<asr_text>" if language else ""
    text = (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|>" + "<|audio_pad|>" * len(rows)
        + "<|audio_end|><|im_end|>\n<|im_start|>assistant\n" + suffix
    )
    ids = tok.encode(text, add_special_tokens=False).ids
    said = model.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), input_features=features,
        input_features_mask=mask, max_new_tokens=LIMIT, do_sample=False, return_dict_in_generate=True, output_logits=True,
    )
    logits = torch.stack([row[0] for row in said.logits])
    valid = int(mask.sum())
    return rows, features[0, :, :valid].T, ids, said.sequences[0].tolist()[len(ids) :], logits


@torch.no_grad()
def record(fixtures, out, kind, tok, seed):
    model = Qwen3ASRForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, cases = {}, []
    for case in CASES:
        name, language = case
        rows, mel, ids, said, logits = answer(model, kind, tok, case, fixtures)
        tensors |= {f"{name}.rows": rows.float().contiguous(), f"{name}.logits": logits.float().contiguous()}
        if name == "one":
            tensors["one.mel"] = mel.float().contiguous()
        cases.append({
            "clip": f"{name}.wav", "language": language, "prompt_ids": ids, "output_ids": said, "text": tok.decode(said),
            "min_margin": round(recogniser.margin(logits), 4),
        })
    return recogniser.write(out, seed, cases, tensors)


def draw(kind, out, fixtures, seed):
    tok = tokenizer()
    model = build(kind, tok, seed)
    said = [answer(model, kind, tok, case, fixtures) for case in CASES]
    plain = all(id < tok.get_vocab_size() - len(SPECIAL + PLAIN) for one in said for id in one[3])
    various = all(len(set(one[3])) > 3 for one in said) and plain
    if min(recogniser.margin(one[4]) for one in said) < 0.12 or not various:
        return False
    save(model, kind, tok, out)
    return record(fixtures, out, kind, tok, seed)


if __name__ == "__main__":
    recogniser.main(__doc__, "qwen3asr", draw)
