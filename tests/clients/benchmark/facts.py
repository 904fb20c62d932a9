"""The task `facts` of lm-eval, asked of `transformers` or of a server.

    python tests/clients/benchmark/facts.py

writes golden.json, of the checkpoint llama3-tiny in transformers; for that lm_eval, torch and transformers are needed.
"""

import json
import logging
import os
from pathlib import Path

# The texts lie here, and so does the tokenizer.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval
import yaml

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.json"
CHECKPOINT = HERE.parents[1] / "fixtures" / "llama3-tiny"


def evaluate(kind, **arguments):
    """What lm-eval makes of a model: its scores, and the log-likelihood of each choice of each question."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    task = yaml.safe_load((HERE / "facts.yaml").read_text(encoding="utf-8"))
    task["dataset_kwargs"] = {"data_files": {"test": str(HERE / "facts.jsonl")}}
    found = lm_eval.simple_evaluate(model=kind, model_args=arguments, tasks=[task], bootstrap_iters=0)
    scores = found["results"]["facts"]
    samples = sorted(found["samples"]["facts"], key=lambda sample: sample["doc_id"])
    return {
        "acc": scores["acc,none"],
        "acc_norm": scores["acc_norm,none"],
        # Log-likelihood, and whether it is what the model would have said.
        "choices": [[[float(sum), greedy] for (sum, greedy), in sample["resps"]] for sample in samples],
    }


if __name__ == "__main__":
    golden = evaluate("hf", pretrained=str(CHECKPOINT), dtype="float32", device="cpu")
    GOLDEN.write_text(json.dumps(golden) + "\n", encoding="utf-8")
    print(golden)
