#!/bin/sh
# Runs a command as root within a system of AArch64 that lies in a folder: enter.sh FOLDER PROGRAM [ARGUMENT…]. The
# kernel (Linux 6.7 or newer) starts all programs for AArch64 with qemu-aarch64-static, in a user namespace of this
# command alone: nothing is registered on this machine. The process that is started becomes PROGRAM, so that signals
# reach it.
set -eu
outer=$(readlink /proc/$$/ns/user)
# Users keep their numbers. Only a process outside of the namespace may say so.
(
    until [ "$(readlink "/proc/$$/ns/user")" != "$outer" ]; do sleep 0.01; done
    echo "0 0 65536" >"/proc/$$/gid_map"
    echo "0 0 65536" >"/proc/$$/uid_map"
) </dev/null >/dev/null &
exec unshare --user --mount sh -euc '
    until [ "$(cat /proc/self/uid_map)" ]; do sleep 0.01; done
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    printf %s ":qemu-aarch64:M::$magic:$mask:/usr/bin/qemu-aarch64-static:F" >/proc/sys/fs/binfmt_misc/register
    mount --rbind /proc "$0/proc"
    exec chroot "$0" "$@"' "$@"
