#!/bin/sh
# Embeds a corpus in one run, in one that is killed and resumed, in two shards and, where pyarrow and ray are
# installed, from and to Parquet and under Ray: all give the same rows. usage: check.sh QHX [ROWS]
set -eu
qhx=$1
rows=${2:-10000}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}

"$python" - "$rows" "$here/../../tests/fixtures/embed-mistral-tiny/goldens_embed.json" > "$work/in.jsonl" <<'PY'
import json, sys
texts = [t["text"] for t in json.load(open(sys.argv[2], encoding="utf-8"))["texts"]]
short = [t for t in texts if len(t) < 60]
for i in range(int(sys.argv[1])):
    print(json.dumps({"text": f"{short[i % len(short)]} {i}"}, ensure_ascii=False))
PY

"$qhx" forge "$here/../../tests/fixtures/embed-mistral-tiny" --task embed --max-ctx 48 --cpu-only --out "$work/bundle" > /dev/null
# The rows are compared bit by bit, so no text shares a graph with those that happen to be beside it.
embed() { "$qhx" embed "$work/bundle" --backend cpu --truncate --no-pack --input "$work/in.jsonl" "$@"; }

embed --output "$work/one.jsonl"

: > "$work/resumed.jsonl"
# Not through the function: the process itself is to be killed, not a shell around it.
"$qhx" embed "$work/bundle" --backend cpu --truncate --no-pack --input "$work/in.jsonl" --output "$work/resumed.jsonl" &
run=$!
while [ "$(wc -l < "$work/resumed.jsonl")" -lt $((rows / 3)) ] && kill -0 $run 2> /dev/null; do sleep 0.1; done
kill -9 $run 2> /dev/null || true
wait $run 2> /dev/null || true
echo "killed after $(wc -l < "$work/resumed.jsonl") of $rows rows"
embed --output "$work/resumed.jsonl" --resume
cmp "$work/one.jsonl" "$work/resumed.jsonl"
echo "resumed: byte for byte the same file"

embed --shard 0/2 --output "$work/0.jsonl" &
embed --shard 1/2 --output "$work/1.jsonl"
wait
cat "$work/0.jsonl" "$work/1.jsonl" > "$work/joined.jsonl"
echo "two shards: $("$python" "$here/same.py" "$work/one.jsonl" "$work/joined.jsonl")"

if ! "$python" -c 'import pyarrow' 2> /dev/null; then
    echo "skipped: Parquet (pyarrow is not installed)"
elif ! "$qhx" embed "$work/bundle" --backend cpu --input "$work/in.parquet" 2>&1 | grep -q 'in.parquet: No such file'; then
    echo "skipped: Parquet (this qhx is built without --features parquet)"
else
    "$python" -c 'import sys; from pyarrow import json, parquet; parquet.write_table(json.read_json(sys.argv[1]), sys.argv[2])' \
        "$work/in.jsonl" "$work/in.parquet"
    "$qhx" embed "$work/bundle" --backend cpu --truncate --no-pack --input "$work/in.parquet" --output "$work/out.parquet"
    echo "Parquet in and out: $("$python" "$here/same.py" "$work/one.jsonl" "$work/out.parquet")"
fi

if "$python" -c 'import ray.data' 2> /dev/null; then
    "$python" "$here/ray_embed.py" "$work/bundle" "$work/in.jsonl" "$work/ray.jsonl" --workers 2 --qhx "$qhx" -- --backend cpu --truncate --no-pack --threads 1
    echo "ray, two workers: $("$python" "$here/same.py" "$work/one.jsonl" "$work/ray.jsonl")"
else
    echo "skipped: ray (not installed)"
fi
