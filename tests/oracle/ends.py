"""Texts with the tokens around them that `add_bos_token` and `add_eos_token` of `tokenizer_config.json` ask for, as
`update_post_processor` of `transformers` puts them there, in `../fixtures/ends.json`.

    python ends.py ../fixtures        # needs transformers==5.24.0

The tokenizers are those of tiny models; a token that their own post-processor puts there stays.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

TEXT = "The capital of France"


def main(fixtures):
    cases = []
    for model in ["llama3-tiny", "qwen2-tiny", "embed-mistral-tiny"]:
        tokenizer = AutoTokenizer.from_pretrained(fixtures / model)
        own = tokenizer(TEXT)["input_ids"]
        if tokenizer.bos_token is None:
            tokenizer.bos_token = "<|endoftext|>"
        for bos in [False, True]:
            for eos in [False, True]:
                tokenizer._add_bos_token = bos or own[0] == tokenizer.bos_token_id
                tokenizer._add_eos_token = eos or own[-1] == tokenizer.eos_token_id
                tokenizer.update_post_processor()
                ids = tokenizer(TEXT)["input_ids"]
                case = {"model": model, "bos_token": tokenizer.bos_token, "add_bos_token": bos, "add_eos_token": eos}
                cases.append(case | {"ids": ids})
    (fixtures / "ends.json").write_text(json.dumps({"text": TEXT, "cases": cases}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
