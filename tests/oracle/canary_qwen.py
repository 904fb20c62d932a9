"""Canary-Qwen, NeMo's class `SALM`: draws a tiny checkpoint and records goldens by NeMo.

    python canary_qwen.py FIXTURES [--unseen OUT]

Needs `pip install nemo_toolkit[asr] peft accelerate` besides what the other scripts need. The clips are those of
`whisper-tiny`, and features those of `Exact`, see `nemo_canary.py`. `--unseen` draws one of other shapes.
"""

import argparse
import json
import os
import random
import shutil
from pathlib import Path

import nemo
import torch
from nemo.collections.common.prompts import PromptFormatter
from nemo.collections.speechlm2.models import SALM
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from parakeet import Exact, clip
from whisper import RATE, WORDS

TAG = "<|audioplaceholder|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CASES = ["one", "two"]
LIMIT = 8
SHAPES = {
    "canary-qwen-tiny": (
        dict(d_model=36, n_layers=2, n_heads=3, conv_kernel_size=5, subsampling_conv_channels=8, ff_expansion_factor=2, use_bias=False),
        dict(features=32),
        dict(hidden_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=14, intermediate_size=60, tie_word_embeddings=True),
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    ),
    "canary-qwen-unseen": (
        dict(d_model=24, n_layers=3, n_heads=2, conv_kernel_size=9, subsampling_conv_channels=6, subsampling_factor=4, ff_expansion_factor=3, xscaling=True),
        dict(features=40),
        dict(hidden_size=36, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=3, head_dim=10, intermediate_size=52, tie_word_embeddings=False),
        dict(r=3, lora_alpha=9, target_modules=["q_proj", "o_proj", "down_proj"]),
    ),
}


def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    words = [f" {w}" for some in WORDS.values() for w in some] + [" Transcribe the following:", " assistant user system"]
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator([" ".join(random.Random(i).sample(words, 6)) for i in range(200)], trainer)
    tok.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    return tok


def folder(kind, tok, out):
    """The decoder's configuration and tokenizer, as they lie beside the weights."""
    out.mkdir(parents=True)
    (out / "llm_backbone").mkdir()
    text = Qwen3Config(
        vocab_size=tok.get_vocab_size() + 5, rope_theta=1e6, eos_token_id=tok.token_to_id("<|im_end|>"),
        bos_token_id=tok.token_to_id("<|endoftext|>"), max_position_embeddings=400, architectures=["Qwen3ForCausalLM"], **SHAPES[kind][2],
    )
    text.save_pretrained(out / "llm_backbone")
    PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(out)


def build(kind, seed):
    """The model, whose parts lie in the folder of the process."""
    torch.manual_seed(seed)
    encoder, features, text, lora = SHAPES[kind]
    module = "nemo.collections.asr.modules"
    model = SALM({
        "pretrained_llm": "llm_backbone", "tokenizer_path": ".", "pretrained_asr": "nvidia/canary-1b-flash", "pretrained_weights": False,
        "audio_locator_tag": TAG, "prompt_format": "qwen", "freeze_params": [], "prevent_freeze_params": [],
        "lora": {"task_type": "CAUSAL_LM", "lora_dropout": 0.01, **lora},
        "perception": {
            "target": "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule", "output_dim": text["hidden_size"],
            "modality_adapter": {"_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector", "d_model": encoder["d_model"]},
            "preprocessor": {
                "_target_": f"{module}.AudioToMelSpectrogramPreprocessor", "sample_rate": RATE, "normalize": "per_feature",
                "window_size": 0.025, "window_stride": 0.01, "window": "hann", "n_fft": 512, "log": True, "frame_splicing": 1,
                "dither": 1e-5, "pad_to": 0, "pad_value": 0.0, **features,
            },
            "encoder": {
                "_target_": f"{module}.ConformerEncoder", "feat_in": features["features"], "feat_out": -1, "subsampling": "dw_striding",
                "subsampling_factor": 8, "causal_downsampling": False, "reduction": None, "reduction_position": None,
                "reduction_factor": 1, "self_attention_model": "rel_pos", "att_context_size": [-1, -1], "xscaling": False,
                "untie_biases": True, "pos_emb_max_len": 5000, "conv_norm_type": "batch_norm", "conv_context_size": None,
                "dropout": 0.1, "dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1, **encoder,
            },
        },
    })
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.normal_(1, 0.2)
            elif "bias" in name:
                p.normal_(0, 0.15)
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(0, 0.5)
            elif p.dim() > 1:
                p.normal_(0, (1.0 if "perception." in name else 1.6) / p[0].numel() ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        # Bundles have weights of 16 bits.
        for values in model.parameters():
            values.copy_(values.half())
    return model.eval()


def loaded(checkpoint, work):
    """A drawn checkpoint; its parts are put into `work`."""
    shutil.rmtree(work, ignore_errors=True)
    folder(checkpoint.name, tokenizer(), work)
    before = os.getcwd()
    os.chdir(work)
    model = build(checkpoint.name, 1)
    os.chdir(before)
    missing = model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and all("lm_head" in key for key in missing.missing_keys), missing
    return model


@torch.no_grad()
def answer(model, kind, samples, limit=LIMIT, known=None):
    """Rows of the encoder, prompt, at most `limit` tokens of the first `known`, logits and the least margin."""
    made = Exact(feature_size=SHAPES[kind][1]["features"], hop_length=160, n_fft=512, win_length=400, preemphasis=0.97)(
        samples, sampling_rate=RATE, return_tensors="pt"
    )
    frames = int(made["attention_mask"].sum())
    mels = made["input_features"].float()[:, :frames].transpose(1, 2)
    encoded, length = model.perception.encoder(audio_signal=mels, length=torch.tensor([frames]))
    rows = model.perception.proj(encoded.transpose(1, 2)[0, : int(length)])
    formatter = PromptFormatter.resolve("qwen")(model.tokenizer)
    turn = {"role": "user", "slots": {"message": f"Transcribe the following: {TAG}"}}
    ids = formatter.encode_dialog(turns=[turn])["context_ids"].tolist()
    at = ids.index(model.audio_locator_tag_id)
    embed = lambda some: model.embed_tokens(torch.tensor(some))
    given = torch.cat([embed(ids[:at]), rows, embed(ids[at + 1 :])])[None]
    said, logits, end = [], [], model.text_eos_id
    while len(said) < limit:
        logits.append(model(given)["logits"][0, -1, :known].float())
        said.append(int(logits[-1].argmax()))
        if said[-1] == end:
            break
        given = torch.cat([given, embed([said[-1]])[None]], 1)
    logits = torch.stack(logits)
    best = logits.topk(2).values
    prompt = ids[:at] + [model.audio_locator_tag_id] * len(rows) + ids[at + 1 :]
    return rows, prompt, said, logits, float((best[:, 0] - best[:, 1]).min())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("--unseen", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tok = tokenizer()
    kind = "canary-qwen-unseen" if args.unseen else "canary-qwen-tiny"
    fixtures = args.fixtures.resolve()
    out = (args.unseen or args.fixtures / kind).resolve()
    shutil.rmtree(out, ignore_errors=True)
    folder(kind, tok, out)
    os.chdir(out)
    for seed in range(1, 400):
        model = build(kind, seed)
        said = [answer(model, kind, clip(fixtures, name)) for name in CASES]
        plain = all(id < tok.get_vocab_size() - len(SPECIAL) for one in said for id in one[2])
        if not plain or min(one[4] for one in said) < 0.1 or any(len(set(one[2])) < 4 for one in said):
            continue
        model.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)
        config = json.loads((out / "config.json").read_text())
        # As the published file has them.
        config |= {"pretrained_llm": "Qwen/Qwen3-1.7B"}
        config.pop("tokenizer_path")
        (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        tensors, cases = {}, []
        for name, (rows, prompt, ids, logits, margin) in zip(CASES, said):
            tensors |= {f"{name}.rows": rows.contiguous(), f"{name}.logits": logits.contiguous()}
            cases.append({
                "clip": f"{name}.wav", "language": None, "prompt_ids": prompt, "output_ids": ids, "text": tok.decode(ids),
                "min_margin": round(margin, 4),
            })
        text = json.dumps({
            "schema": "qhx-goldens/1", "model": kind, "nemo": nemo.__version__, "torch": torch.__version__.split("+")[0], "seed": seed,
            "min_margin": min(one["min_margin"] for one in cases), "cases": cases,
        }, indent=1, ensure_ascii=False)
        (out / "goldens.json").write_text(text + "\n")
        save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
        for file in out.iterdir():
            file.chmod(0o755 if file.is_dir() else 0o644)
        print(kind, seed, cases, sum(f.stat().st_size for f in out.rglob("*") if f.is_file()))
        break


if __name__ == "__main__":
    main()
