#!/usr/bin/env bash
# Forges CHECKPOINT for the emulator, or prepares the portable BUNDLE there, verifies what it made, and compares the
# figures with those of BASELINE. The inputs are environment variables, docs/ci.md lists them. Everything is written into
# the folder OUT.
set -euo pipefail

# Sets an array to the words of a text.
words() { read -r -d '' -a "$1" <<<"$2" || true; }
words forge "${FORGE:-qhx forge}"
words forge_args "${FORGE_ARGS:-}"
words plugins "${PLUGINS:-}"
words tolerances "${TOLERANCES:-}"
plugins=("${plugins[@]/#/--plugin=}")
tolerances=("${tolerances[@]/#/--tolerance=}")

out=${OUT:-qhx-check}
rm -rf "$out" && mkdir -p "$out"
if [ -n "${BUNDLE:-}" ]; then
    bundle=$BUNDLE
    bundles=("$bundle")
    qhx prepare "$bundle" --target "${TARGET:-v81}" >&2
else
    bundle=$out/bundle
    "${forge[@]}" "${CHECKPOINT:?no checkpoint and no bundle is given}" --out "$bundle" --for-emulator \
        --target "${TARGET:-v81}" --precision "${PRECISION:-w4a16}" --estimate ${MAX_CTX:+--max-ctx "$MAX_CTX"} \
        "${plugins[@]}" "${forge_args[@]}" >&2
    bundles=("$bundle")
    # Several targets have a folder each.
    case ${TARGET:-} in *,*) bundles=("$bundle"/*/) ;; esac
fi

failed=0
# Exit code 1 is a check that failed; any other one ends the run.
check() { "$@" || { code=$?; [ "$code" = 1 ] || exit "$code"; failed=1; return 1; }; }
for one in "${bundles[@]}"; do
    check qhx verify "$one" --backend qnn --json --summary "$out/summary.md" --write-baseline "$out/baseline.json" \
        ${BASELINE:+--baseline "$BASELINE"} "${tolerances[@]}" "${plugins[@]}" >>"$out/report.jsonl" || true
    [ -n "${SUITE:-}" ] || continue
    check qhx verify "$one" "$SUITE" --backend qnn "${plugins[@]}" >"$out/suite.txt" ||
        echo "- **$SUITE: other answers than the reference's**" >>"$out/summary.md"
    { echo '```text' && cat "$out/suite.txt" && echo '```'; } >>"$out/summary.md"
done

cat "$out/summary.md" >>"${GITHUB_STEP_SUMMARY:-/dev/stdout}"
for name in bundle report=report.jsonl baseline=baseline.json summary=summary.md; do
    case $name in *=*) path=$out/${name#*=} ;; *) path=$bundle ;; esac
    echo "${name%=*}=$path" >>"${GITHUB_OUTPUT:-/dev/null}"
done
# GitHub shows such lines beside the commit.
sed -n "s/^- \*\*\(.*\)\*\*$/${GITHUB_ACTIONS:+::error::}\1/p" "$out/summary.md"
exit "$failed"
