"""lm-eval asks the server what it asks transformers, and finds the same."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="cargo xtask clients --full installs it")


def test_a_benchmark_finds_what_it_finds_with_transformers(exact_address):
    sys.path.insert(0, str(Path(__file__).parent / "benchmark"))
    from facts import CHECKPOINT, GOLDEN, evaluate

    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = evaluate(
        "local-completions",
        model="language",
        base_url=f"{exact_address}/v1/completions",
        tokenizer=str(CHECKPOINT),
        # As transformers does for this tokenizer.
        add_bos_token=True,
        num_concurrent=2,
        max_retries=1,
    )
    assert (found["acc"], found["acc_norm"]) == (golden["acc"], golden["acc_norm"])
    for question, (ours, theirs) in enumerate(zip(found["choices"], golden["choices"], strict=True)):
        for (ours, greedy), (theirs, expected) in zip(ours, theirs, strict=True):
            assert abs(ours - theirs) < 1e-4, f"question {question}: {ours} and {theirs}"
            assert greedy == expected, f"question {question}"
