#!/bin/sh
# Builds the image with buildah, without a daemon or a registry, and runs the demo, a server and its health check in it:
# prove.sh BASE PROGRAMS MACHINE SCRATCH. BASE is the folder of a bare system, which stands in for the image of Debian.
# PROGRAMS has bin-amd64 or bin-arm64, as MACHINE says.
set -eu
base=$1 programs=$2 machine=$3 scratch=$4
here=$(cd "$(dirname "$0")" && pwd)
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
images() { command=$1; shift; buildah --root "$scratch/images" --runroot "$scratch/run" "$command" "$@"; }

container=$(images from --arch "$machine" scratch)
images add --quiet "$container" "$base" / >/dev/null
images commit --quiet --rm "$container" localhost/base >/dev/null
images build --quiet --format docker --pull-never --platform "linux/$machine" --build-arg TARGETARCH="$machine" \
    --build-arg BASE=localhost/base --build-context programs="$programs" --file "$here/Dockerfile" \
    --ignorefile "$here/Dockerfile.dockerignore" --tag localhost/qhx "$here/../.." >&2
container=$(images from --arch "$machine" --pull-never localhost/qhx)
# Here the container's first process is not what it runs, so that the health check is given another one.
images run "$container" -- sh -euc '
    [ "$(id -un)" = qhx ] || { echo "the user is $(id -un), expected qhx" >&2; exit 1; }
    text=$(qhx demo --backend cpu)
    case $text in *Paris*) ;; *) echo "qhx demo: found $text, expected the capital of France" >&2; exit 1 ;; esac
    health() { python3 /usr/local/share/qhx/health.py "$1"; }
    health "/proc/$$/cmdline"
    port=$(python3 -c "import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 0)); print(s.getsockname()[1])")
    printf "qhx\\0serve\\0--port\\0%s\\0" "$port" >/tmp/none
    health /tmp/none 2>/dev/null && { echo "the health check passes without a server" >&2; exit 1; }
    qhx serve --port "$port" --backend cpu /var/cache/qhx/models/demo/cpu >/tmp/address &
    server=$!
    while [ ! -s /tmp/address ]; do kill -0 "$server"; sleep 0.1; done
    health "/proc/$server/cmdline"
    kill -TERM "$server"
    wait "$server"' >&2
du -sm "$(images mount "$container")" | cut -f 1
