#!/bin/sh
# Runs the demo with the command that the arguments are, then serves its bundle, asks it over HTTP, and ends it as
# systemd does. Prints the path of the bundle for the command, whose root is the folder ROOT.
set -eu
scratch=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -KILL "$server" 2>/dev/null; rm -rf "$scratch"' EXIT
text=$("$@" demo --backend cpu --json | jq --exit-status .text)
case $text in *Paris*) ;; *) echo "qhx demo: found $text, expected the capital of France" >&2; exit 1 ;; esac
bundle=/root/.cache/qhx/models/demo/cpu
"$@" serve --port 0 --backend cpu "$bundle" >"$scratch/address" &
server=$!
while [ ! -s "$scratch/address" ]; do
    kill -0 "$server" || { echo 'qhx serve: it printed no address' >&2; exit 1; }
    sleep 0.1
done
body='{"prompt": "The capital of France is", "max_tokens": 23, "temperature": 0}'
answer=$(curl --silent --show-error --fail-with-body --header 'content-type: application/json' \
    --data "$body" "$(cat "$scratch/address")/v1/completions" | jq --exit-status '.choices[0].text')
[ "$answer" = "$text" ] || { echo "qhx serve: found $answer, expected $text" >&2; exit 1; }
kill -TERM "$server"
wait "$server"
server=
echo "$bundle"
