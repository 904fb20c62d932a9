"""Embeds JSON lines under Ray Data: each worker keeps one `qhx embed` process.

    pip install "ray[data]"
    python ray_embed.py BUNDLE corpus.jsonl vectors.jsonl --workers 2

The vectors are those of one process, since an embedding depends on its text alone.
"""

import argparse
import json
import subprocess
import sys
import threading

import ray


class Embedder:
    """A `qhx embed` process that answers a line with a line."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def __call__(self, batch):
        def send():
            try:
                for text in batch["text"]:
                    self.process.stdin.write(json.dumps({"text": str(text)}) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass  # The process has ended; why is found below.

        # A pipe holds less than a batch of vectors: write and read at the same time.
        writer = threading.Thread(target=send)
        writer.start()
        vectors = []
        for text in batch["text"]:
            line = self.process.stdout.readline()
            answer = json.loads(line) if line else {}
            if "embedding" not in answer:
                message = answer.get("error", {}).get("message", "it ended")
                raise RuntimeError(f"qhx embed: {message}")
            assert answer["text"] == str(text)
            vectors.append(answer["embedding"])
        writer.join()
        return {"index": batch["index"], "text": batch["text"], "embedding": vectors}

    def __del__(self):
        process = getattr(self, "process", None)
        if process is not None:
            process.stdin.close()
            process.wait()


def rows(path):
    with open(path, encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            row = json.loads(line)
            yield {"index": index, "text": row if isinstance(row, str) else row["text"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("input")
    parser.add_argument("output")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--qhx", default="qhx", help="the program")
    # What stands after -- is for qhx embed.
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    args = parser.parse_args(own[:cut])

    command = [args.qhx, "embed", args.bundle, "--input", "-", "--json", *own[cut + 1 :]]
    ray.init(num_cpus=args.workers, include_dashboard=False, log_to_driver=True)
    texts = ray.data.from_items(list(rows(args.input)), override_num_blocks=4 * args.workers)
    vectors = texts.map_batches(
        Embedder,
        fn_constructor_args=[command],
        batch_size=args.batch,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=1,
    )
    done = sorted(vectors.take_all(), key=lambda row: row["index"])
    with open(args.output, "w", encoding="utf-8") as out:
        for row in done:
            embedding = [float(v) for v in row["embedding"]]
            line = {"index": int(row["index"]), "text": str(row["text"]), "embedding": embedding}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{len(done)} vectors in {args.output}")


if __name__ == "__main__":
    main()
