"""Archives of NeMo with Canary, as `canary-180m-flash` is published: draws a model and records goldens by NeMo.

    python nemo_canary.py FIXTURES [--unseen OUT]

Needs `pip install nemo_toolkit[asr]` besides what the other scripts need. The clips are those of `whisper-tiny`.
Features are those of `Exact`: NeMo's own transform in f32 moves bands that hold next to nothing. `--unseen` draws one
of other shapes.
"""

import argparse
import json
import os
import random
import shutil
from pathlib import Path

import nemo
import numpy as np
import torch
from nemo.collections.asr.models import EncDecMultiTaskModel
from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import create_spt_model
from omegaconf import OmegaConf
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2

from parakeet import Exact, clip
from whisper import RATE, WORDS

SPECIAL = [
    "startofcontext", "itn", "noitn", "timestamp", "notimestamp", "diarize", "nodiarize", "spkchange", "audioseparator",
    "emo:undefined", "unklang", "en", "de", "es", "fr", "ja",
]
LANGUAGES = ["en", "de", "es", "fr"]
CASES = [("one", "en", "en", True), ("one", "de", "en", True), ("two", "fr", "fr", False)]
SHAPES = {
    "canary-flash-tiny": dict(
        encoder=dict(d_model=36, n_layers=2, n_heads=3, conv_kernel_size=5, subsampling_conv_channels=8, ff_expansion_factor=2, use_bias=False),
        decoder=dict(hidden_size=40, inner_size=60, num_layers=2, num_attention_heads=2, max_sequence_length=60),
        features=dict(features=32),
    ),
    "canary-flash-unseen": dict(
        encoder=dict(d_model=24, n_layers=3, n_heads=2, conv_kernel_size=9, subsampling_conv_channels=6, subsampling_factor=4, ff_expansion_factor=3, xscaling=True),
        decoder=dict(hidden_size=24, inner_size=44, num_layers=3, num_attention_heads=3, max_sequence_length=44),
        features=dict(features=40, n_fft=320, window_size=0.019, window_stride=0.008, preemph=0.9),
    ),
}
LIMIT = 5


def pieces(folder, words):
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(random.Random(i).sample(words, min(6, len(words)))) for i in range(200)))
    create_spt_model(str(text), vocab_size=72, sample_size=-1, do_lower_case=False, output_dir=str(folder), tokenizer_type="bpe")


def small(model):
    """Takes a table of normalization out, which is most of a small file."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.read_bytes())
    proto.normalizer_spec.name, proto.normalizer_spec.precompiled_charsmap = "identity", b""
    model.write_bytes(proto.SerializeToString())


def tokenizers(folder):
    """A tokenizer of special tokens and one of each language."""
    folder.mkdir(parents=True)
    CanaryTokenizer.build_special_tokenizer(SPECIAL, folder / "spl_tokens")
    langs = {"spl_tokens": {"dir": str(folder / "spl_tokens"), "type": "bpe"}}
    words = [w for some in WORDS.values() for w in some]
    for lang in LANGUAGES:
        (folder / lang).mkdir()
        pieces(folder / lang, words + [w[::-1] for w in words[: 8 + 3 * LANGUAGES.index(lang)]])
        langs[lang] = {"dir": str(folder / lang), "type": "bpe"}
    for lang in langs:
        small(folder / lang / "tokenizer.model")
    return langs


def build(kind, langs, seed):
    torch.manual_seed(seed)
    shape = SHAPES[kind]
    hidden = shape["decoder"]["hidden_size"]
    module = "nemo.collections.asr"
    config = {
        "sample_rate": RATE,
        "prompt_format": "canary2",
        "prompt_defaults": [{"role": "user", "slots": {"decodercontext": "", "source_lang": "<|en|>", "target_lang": "<|en|>"}}],
        "model_defaults": {"asr_enc_hidden": shape["encoder"]["d_model"], "lm_enc_hidden": hidden, "lm_dec_hidden": hidden},
        "tokenizer": {
            "dir": None, "type": "agg", "langs": langs,
            "custom_tokenizer": {"_target_": "nemo.collections.common.tokenizers.canary_tokenizer.CanaryTokenizer", "tokenizers": None},
        },
        "preprocessor": {
            "_target_": f"{module}.modules.AudioToMelSpectrogramPreprocessor", "sample_rate": RATE, "normalize": "per_feature",
            "window_size": 0.025, "window_stride": 0.01, "window": "hann", "n_fft": 512, "log": True, "frame_splicing": 1,
            "dither": 1e-5, "pad_to": 0, "pad_value": 0.0, **shape["features"],
        },
        "spec_augment": {"_target_": f"{module}.modules.SpectrogramAugmentation", "freq_masks": 2, "time_masks": 10, "freq_width": 27, "time_width": 0.05},
        "encoder": {
            "_target_": f"{module}.modules.ConformerEncoder", "feat_in": shape["features"]["features"], "feat_out": -1,
            "subsampling": "dw_striding", "subsampling_factor": 8, "causal_downsampling": False, "reduction": None,
            "reduction_position": None, "reduction_factor": 1, "self_attention_model": "rel_pos", "att_context_size": [-1, -1],
            "xscaling": False, "untie_biases": True, "pos_emb_max_len": 5000, "conv_norm_type": "batch_norm", "conv_context_size": None,
            "dropout": 0.1, "dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1, **shape["encoder"],
        },
        "transf_encoder": {
            "_target_": f"{module}.modules.transformer.transformer_encoders.TransformerEncoder", "num_layers": 0,
            "hidden_size": hidden, "inner_size": 4 * hidden, "num_attention_heads": 2,
        },
        "transf_decoder": {
            "_target_": f"{module}.modules.transformer.get_nemo_transformer", "model_name": None, "pretrained": False,
            "encoder": None, "pre_ln_final_layer_norm": True,
            "config_dict": {
                "num_token_types": 0, "embedding_dropout": 0.1, "learn_positional_encodings": False, "ffn_dropout": 0.1,
                "attn_score_dropout": 0.1, "attn_layer_dropout": 0.1, "hidden_act": "relu", "pre_ln": True, "vocab_size": None,
                **shape["decoder"],
            },
        },
        "head": {
            "_target_": f"{module}.parts.submodules.token_classifier.TokenClassifier", "num_layers": 1, "activation": "relu",
            "log_softmax": True, "hidden_size": hidden, "num_classes": None, "dropout": 0.0, "use_transformer_init": True,
        },
        "decoding": {"strategy": "beam", "return_best_hypothesis": True, "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 50}},
        "loss": {"_target_": "nemo.collections.common.losses.smoothed_cross_entropy.SmoothedCrossEntropyLoss", "label_smoothing": 0.0, "pad_id": None},
        "restore_timestamps_model": False,
    }
    model = EncDecMultiTaskModel(cfg=OmegaConf.create(config))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.normal_(1, 0.2)
            elif "bias" in name:
                p.normal_(0, 0.15)
            elif "token_embedding" in name:
                p.normal_(0, 0.9)
            elif p.dim() > 1:
                p.normal_(0, (1.0 if name.startswith("encoder.") else 1.2 if "key_net" in name else 2.2) / p[0].numel() ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        # Bundles have weights of 16 bits.
        for values in model.parameters():
            values.copy_(values.half())
    return model.eval()


def prompt(model, source, target, punctuation):
    turn = {"role": "user", "slots": {
        "prompt_language": "spl_tokens",
        "decodercontext": "", "emotion": "<|emo:undefined|>", "source_lang": f"<|{source}|>", "target_lang": f"<|{target}|>",
        "pnc": "<|pnc|>" if punctuation else "<|nopnc|>", "itn": "<|noitn|>", "timestamp": "<|notimestamp|>", "diarize": "<|nodiarize|>",
    }}
    return model.prompt.encode_dialog([turn])["context_ids"].tolist()


@torch.no_grad()
def answer(model, kind, case, fixtures):
    name, source, target, punctuation = case
    own = model.cfg.preprocessor
    made = Exact(
        feature_size=own.features, hop_length=int(own.window_stride * RATE), n_fft=own.n_fft, win_length=int(own.window_size * RATE),
        preemphasis=own.get("preemph", 0.97),
    )(clip(fixtures, name), sampling_rate=RATE, return_tensors="pt")
    frames = int(made["attention_mask"].sum())
    mels = made["input_features"].float()[:, :frames].transpose(1, 2)
    samples = torch.tensor(clip(fixtures, name))[None]
    theirs, length = model.preprocessor(input_signal=samples, length=torch.tensor([samples.shape[1]]))
    assert int(length) == frames
    apart = (theirs[0, :, :frames] - mels[0]).abs()
    assert apart.median() < 1e-4, apart.median()
    encoded, rows = model.encoder(audio_signal=mels, length=torch.tensor([frames]))
    rows = model.encoder_decoder_proj(encoded.transpose(1, 2)[:, : int(rows)])
    head, said, logits = prompt(model, source, target, punctuation), [], []
    mask = torch.ones(rows.shape[:2])
    while len(said) < LIMIT:
        ids = torch.tensor([head + said])
        hidden = model.transf_decoder(input_ids=ids, decoder_mask=torch.ones(ids.shape), encoder_embeddings=rows, encoder_mask=mask)
        logits.append(model.log_softmax.mlp.layer0(hidden)[0, -1])
        said.append(int(logits[-1].argmax()))
        if said[-1] == model.tokenizer.eos_id:
            break
    logits = torch.stack(logits)
    best = logits.topk(2).values
    return rows[0], head, said, logits, float((best[:, 0] - best[:, 1]).min())


@torch.no_grad()
def record(fixtures, out, model, kind, seed):
    tensors, cases, worst = {}, [], 9.0
    for case in CASES:
        name, source, target, punctuation = case
        rows, head, ids, logits, margin = answer(model, kind, case, fixtures)
        worst, id = min(worst, margin), f"{name}-{source}-{target}"
        attention = model.transf_decoder._decoder.layers[-1].second_sub_layer
        keys = attention.key_net(rows).view(len(rows), attention.num_attention_heads, attention.attn_head_size)
        tensors[f"{name}.cross_k"] = keys.permute(1, 2, 0).contiguous()
        tensors[f"{id}.logits"] = logits.contiguous()
        special = set(model.tokenizer.special_tokens.values())
        cases.append({
            "id": id, "clip": f"{name}.wav", "language": source, "into": target, "punctuation": punctuation, "prompt_ids": head,
            "output_ids": ids, "text": model.tokenizer.ids_to_text([i for i in ids if i not in special]).strip(), "rows": len(rows),
            "min_margin": round(margin, 4),
        })
    text = json.dumps({
        "schema": "qhx-goldens/1", "model": out.name, "nemo": nemo.__version__, "torch": torch.__version__.split("+")[0], "seed": seed,
        "min_margin": round(worst, 4), "cases": cases,
    }, indent=1, ensure_ascii=False)
    (out / "goldens.json").write_text(text + "\n")
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)
    return worst, cases


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("--unseen", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kind = "canary-flash-unseen" if args.unseen else "canary-flash-tiny"
    fixtures = args.fixtures.resolve()
    out = (args.unseen or args.fixtures / kind).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # NeMo notes the path in the archive.
    os.chdir(out)
    langs = tokenizers(Path("tokenizers"))
    for seed in range(1, 400):
        model = build(kind, langs, seed)
        said = [answer(model, kind, case, fixtures) for case in CASES]
        various = len(set(said[2][2])) > 1 and said[0][2] != said[1][2] and any(i >= len(SPECIAL) + 8 for one in said for i in one[2])
        if min(one[4] for one in said) < 0.06 or not various:
            continue
        file = out / f"{kind}.nemo"
        model.save_to(str(file))
        shutil.rmtree(out / "tokenizers")
        model = EncDecMultiTaskModel.restore_from(str(file), map_location="cpu").eval()
        worst, cases = record(fixtures, out, model, kind, seed)
        print(kind, seed, worst, cases, sum(f.stat().st_size for f in out.iterdir()))
        break


if __name__ == "__main__":
    main()
