"""Modules of sentence-transformers behind the encoder `../fixtures/embed-mistral-tiny`, and the vectors that they make.

    pip install -r requirements.txt sentence-transformers==6.2.0
    python embed_modules.py ../fixtures/embed-modules

Three ways to pool, a Dense with tanh, a LayerNorm, a Dense without bias and activation, Normalize: drawn from a seed and
saved by their own `save`. `vectors.json` has the vectors of the first texts of the encoder's goldens.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling

import embed

BASE = Path(__file__).parent / "../fixtures/embed-mistral-tiny"
TEXTS = 5


def main(out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.manual_seed(3)
    hidden = json.loads((BASE / "config.json").read_text())["hidden_size"]
    ways = ("max", "mean_sqrt_len_tokens", "weightedmean")
    modules = [
        Pooling(hidden, pooling_mode=ways),
        Dense(len(ways) * hidden, 20, activation_function=torch.nn.Tanh()),
        LayerNorm(20),
        Dense(20, 12, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ]
    with torch.no_grad():
        modules[2].norm.weight.uniform_(0.5, 1.5)
        modules[2].norm.bias.uniform_(-0.5, 0.5)
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, module in enumerate(modules, 1):
        name = type(module).__name__
        folder = f"{index}_{name}"
        (out / folder).mkdir()
        module.save(str(out / folder))
        listed.append({"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{name}"})
    (out / "modules.json").write_text(json.dumps(listed, indent=1) + "\n")
    model = embed.reference(BASE)[1]
    vectors = []
    for text in json.loads((BASE / "goldens_embed.json").read_text())["texts"][:TEXTS]:
        ids = torch.tensor([text["ids"]])
        mask = torch.ones_like(ids)
        with torch.no_grad():
            rows = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            features = {"token_embeddings": rows, "attention_mask": mask}
            for module in modules:
                features = module(features)
        vectors.append({"ids": text["ids"], "vector": features["sentence_embedding"][0].tolist()})
    (out / "vectors.json").write_text(json.dumps(vectors) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
