"""Instructions of matmuls on aarch64, by the instructions that the processor has.

    python3 benches/cpu_instructions.py

It needs qemu-aarch64 with plugins, a C compiler, a cross compiler with its libraries (Debian, Ubuntu: qemu-user, gcc,
gcc-aarch64-linux-gnu, libc6-dev-arm64-cross), and `rustup target add aarch64-unknown-linux-gnu`. A count is the
difference to a program that executes the matmuls eight times more. Pools have one thread, as those that wait for work
would be counted, too; two runs differ by less than a hundredth.
"""

import argparse
import os
import pathlib
import subprocess
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
TARGET = "aarch64-unknown-linux-gnu"
BUILD = ["cargo", "build", "--package", "qhx-cpu", "--example", "matmuls", "--target", TARGET, "--release"]
FORMS = ["f16", "int8", "int8-blocks", "int4"]
SHAPES = {"square": 4096 * 4096, "layer": 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)}
# The first has no instructions for products of int8, the second those of four bytes, the third those of matrices, too.
PROCESSORS = {"f32": "cortex-a57", "sdot": "cortex-a76", "smmla": "max"}
# What is counted, as a processor and what it rounds activations to.
COLUMNS = {
    "f32": ("f32", "int16"),
    "sdot": ("sdot", "int16"),
    "smmla": ("smmla", "int16"),
    "sdot, int8": ("sdot", "int8"),
    "smmla, int8": ("smmla", "int8"),
}
MORE = 8


def count(plugin, processor, arguments, program):
    command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, "-plugin", plugin, program]
    command = [str(part) for part in (*command, *arguments)]
    one = os.environ | {"RAYON_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} on {processor}: {done.stderr}")
    return int(done.stderr.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="tokens of a step")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    linker = {f"CARGO_TARGET_{TARGET.upper().replace('-', '_')}_LINKER": "aarch64-linux-gnu-gcc"}
    subprocess.run(BUILD, cwd=FOLDER.parent, env=os.environ | linker, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", FOLDER.parent / "target"))
    program = target / TARGET / "release/examples/matmuls"
    with tempfile.TemporaryDirectory() as folder:
        plugin = pathlib.Path(folder) / "count.so"
        source = FOLDER / "count_instructions.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, source], check=True)
        print("| shapes | tokens | weights | " + " | ".join(COLUMNS) + " | times fewer |")
        print("|---" * (len(COLUMNS) + 4) + "|")
        for shape in options.shapes:
            for rows in options.rows:
                for form in FORMS:
                    counts = []
                    for processor, activations in COLUMNS.values():
                        first, last = (
                            count(plugin, PROCESSORS[processor], [form, shape, times, rows, activations], program)
                            for times in (1, 1 + MORE)
                        )
                        counts.append((last - first) / MORE)
                    each = [n / SHAPES[shape] for n in counts]
                    cells = [shape, str(rows), form, *(f"{n:.3f}" for n in each)]
                    cells.append(", ".join(f"{each[0] / n:.2f}" for n in each[1:]))
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
