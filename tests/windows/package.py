"""Runs the demo and a server with the programs of a package for x86-64 Windows, whose folder is the argument, under
Wine. They have to give the same answer.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import urllib.request

from wine import ENVIRONMENT, PATIENCE, ROOT, WINE, start, stop

FOLDER = ROOT / "package"


def run(*command, **more):
    more |= {"cwd": FOLDER, "env": ENVIRONMENT, "stdout": subprocess.PIPE}
    return subprocess.Popen([WINE, *command], **more)


def output(*command):
    with run(*command) as child:
        text, _ = child.communicate(timeout=PATIENCE)
        if child.returncode != 0:
            sys.exit(f"{command}: exit code {child.returncode}")
    return text.decode()


def main(programs):
    shutil.rmtree(FOLDER, ignore_errors=True)
    # As winget lays them out for its user, with a blank in the path.
    packages = FOLDER / "WinGet Packages"
    shutil.copytree(programs, packages / programs.name)
    qhx = packages / programs.name / "qhx.exe"
    for program in ("qhx_embed.exe", "qhx_generate.exe"):
        if "Usage: " not in output(qhx.with_name(program), "--help"):
            sys.exit(f"{program} --help: no usage")
    text = json.loads(output(qhx, "demo", "--backend", "cpu", "--json"))["text"]
    if "Paris" not in text:
        sys.exit(f"qhx demo: found {text!r}, expected the capital of France")
    bundle = FOLDER / "cache/models/demo/cpu"
    serve = run(qhx, "serve", "--port", "0", "--backend", "cpu", bundle.relative_to(FOLDER))
    try:
        address = serve.stdout.readline().decode().strip()
        body = {"prompt": "The capital of France is", "max_tokens": 23, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found = json.load(answer)["choices"][0]["text"]
    finally:
        serve.kill()
        serve.wait(PATIENCE)
    if found != text:
        sys.exit(f"qhx serve: found {found!r}, expected {text!r}")


if __name__ == "__main__":
    start()
    try:
        main(pathlib.Path(sys.argv[1]))
    finally:
        stop()
