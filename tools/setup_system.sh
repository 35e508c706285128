#!/usr/bin/env bash
# Installs the Debian packages that the crash rigs use, where they are missing and we may. Says what it does.
#   e2fsprogs   mkfs.ext4 for the power-cut images      mount, util-linux   losetup, mount, umount
#   strace      a real EIO or ENOSPC at the Nth call
set -euo pipefail
declare -A package=([mkfs.ext4]=e2fsprogs [losetup]=mount [mount]=mount [strace]=strace)
PATH=$PATH:/usr/sbin:/sbin
missing=()
for program in "${!package[@]}"; do command -v "$program" >/dev/null || missing+=("${package[$program]}"); done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: without ${missing[*]} some crash tests are skipped (no root, or no apt-get)" >&2
    exit 0
fi
echo "setup: installing ${missing[*]} (Debian packages for the crash rigs)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null || echo "setup: apt-get update failed; trying with the lists at hand" >&2
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
