"""Compares two outputs of `qhx embed`: the same texts and the same vectors, bit for bit.

    python same.py vectors.jsonl other.jsonl

Either may be a Parquet table (pip install pyarrow).
"""

import json
import struct
import sys


def rows(path):
    if path.endswith(".parquet"):
        from pyarrow import parquet

        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def read(path):
    found = {}
    for row in rows(path):
        assert row["index"] not in found, f"{path}: index {row['index']} appears twice"
        vector = struct.pack(f"{len(row['embedding'])}f", *row["embedding"])
        found[row["index"]] = (row["text"], vector)
    return found


def main():
    one, other = read(sys.argv[1]), read(sys.argv[2])
    assert one.keys() == other.keys(), f"{len(one)} and {len(other)} rows, or other indices"
    differing = [index for index in one if one[index] != other[index]]
    assert not differing, f"{len(differing)} rows differ, the first is {differing[0]}"
    print(f"{len(one)} rows, the same")


if __name__ == "__main__":
    main()
