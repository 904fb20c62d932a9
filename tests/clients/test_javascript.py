"""OpenAI's client for JavaScript: openai.cjs."""

import os
import subprocess
from pathlib import Path


def test_the_client_of_javascript_goes_its_round(address, sky):
    question, text = sky
    environment = {**os.environ, "QHX_ADDRESS": address, "QHX_QUESTION": question, "QHX_ANSWER": text}
    script = Path(__file__).with_name("openai.cjs")
    done = subprocess.run(["node", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
