"""Adapters of PEFT for a Llama of one layer, and what `merge_and_unload` makes of its weights, in `../fixtures/lora`.

    pip install torch==2.15.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2 gguf==0.19.0
    python adapters.py ../fixtures/lora

The base model has the weights of `quantised.py`, and biases. `merged.json` has, for each adapter and for two with
weights, some elements of each tensor that changes, in steps of `STEP`, from a merge in f32.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quantised import HIDDEN, tensors, write_config

STEP = 97
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "plain": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"down_proj": 2}, alpha_pattern={r"layers\.\d+\.self_attn\.v_proj": 3}),
    "stabilised": dict(r=3, lora_alpha=5, target_modules=LINEAR, use_rslora=True),
    "whole": dict(r=2, lora_alpha=2, target_modules=["embed_tokens", "o_proj"], modules_to_save=["lm_head"]),
    "dora": dict(r=4, lora_alpha=4, target_modules=["o_proj", "gate_proj"], use_dora=True),
    "biases": dict(r=2, lora_alpha=4, target_modules=["k_proj"], bias="all"),
}


def base():
    config = json.loads((OUT / "base/config.json").read_text())
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    stored = {name: torch.from_numpy(values).half() for name, values in WEIGHTS.items()}
    model.load_state_dict({name: values.float() for name, values in stored.items()})
    return model, stored


def make(name, options):
    torch.manual_seed(5)
    model = get_peft_model(base()[0], LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, values in model.named_parameters():
            if values.requires_grad:
                values.copy_(values + 0.05 * torch.randn(values.shape))
    model.save_pretrained(OUT / name, save_embedding_layers=False)
    (OUT / name / "README.md").unlink(missing_ok=True)


def merge(names):
    model, _ = base()
    for n, (name, weight) in enumerate(names.items()):
        if n == 0:
            model = PeftModel.from_pretrained(model, OUT / name, adapter_name=name)
        else:
            model.load_adapter(OUT / name, adapter_name=name)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, weight in names.items():
                if name in layer.scaling:
                    layer.scaling[name] *= weight
    merged = model.merge_and_unload(adapter_names=list(names)).state_dict()
    before = base()[0].state_dict()
    changed = {name: values for name, values in merged.items() if not torch.equal(values, before[name])}
    return {name: {"shape": list(v.shape), "values": v.flatten()[::STEP].tolist()} for name, v in changed.items()}


def main():
    (OUT / "base").mkdir(parents=True, exist_ok=True)
    write_config(OUT / "base", None)
    path = OUT / "base/config.json"
    config = json.loads(path.read_text()) | {"attention_bias": True}
    config.pop("quantization_config")
    path.write_text(json.dumps(config, indent=1) + "\n")
    save_file(base()[1], OUT / "base/model.safetensors")
    for name, options in ADAPTERS.items():
        make(name, options)
    merged = {name: merge({name: 1.0}) for name in ADAPTERS}
    merged["plain=0.5 stabilised=-1.5"] = merge({"plain": 0.5, "stabilised": -1.5})
    (OUT / "merged.json").write_text(json.dumps(merged, indent=1) + "\n")


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    rng = np.random.default_rng(7)
    WEIGHTS = tensors(rng)
    for name, size in {"q_proj": HIDDEN, "k_proj": HIDDEN // 2, "v_proj": HIDDEN // 2, "o_proj": HIDDEN}.items():
        WEIGHTS[f"model.layers.0.self_attn.{name}.bias"] = 0.1 * rng.standard_normal(size).astype(np.float32)
    main()
