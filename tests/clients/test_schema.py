"""Requests that schemathesis draws from the server's own description of itself, right ones and wrong ones."""

import os
import subprocess
import sys
from pathlib import Path

import requests

FULL = os.environ.get("QHX_FULL") == "1"
# Right by the description may still be wrong: a text longer than the context, an image for a model that takes none.
NOT_CHECKED = "positive_data_acceptance"
# No served bundle transcribes or ranks.
CONFIGURATION = """[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501"]
"""


def test_no_drawn_request_breaks_the_server(unlisted_address, tmp_path):
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    program = Path(sys.executable).with_name("schemathesis")
    command = [program, "run", f"{unlisted_address}/openapi.json", "--checks", "all", "--exclude-checks", NOT_CHECKED]
    drawn = ["coverage,fuzzing", "1000"] if FULL else ["fuzzing", "10"]
    # Without a database of examples, Hypothesis does not look for the smallest ones behind the last draw.
    command += ["--generation-database", "none"]
    command += ["--phases", drawn[0], "--max-examples", drawn[1], *([] if FULL else ["--seed", "1", "--no-shrink"])]
    command += ["--request-timeout", "120", "--warnings", "off", "--no-color"]
    run = subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert requests.get(f"{unlisted_address}/health", timeout=10).json() == {"status": "ok"}
