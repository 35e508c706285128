#!/usr/bin/env bash
# Installs the Debian packages that the tests use, where they are missing and we may. Says what it does.
#   e2fsprogs   mkfs.ext4 for the power-cut images      mount, util-linux   losetup, mount, umount
#   strace      a real EIO or ENOSPC at the Nth call    postgresql          a database with two-phase commit
#   promtool            checks the alert rules; only this program of the package prometheus, in .venv/bin
#   curl                a customer of the tutorials' services
#   systemd             systemd-analyze, which checks conf/tfmq.service
#   chromium, fonts     a browser that shows the page, and letters for it
#   a JRE               Spark, from Java 17 on; a ZooKeeper server
#   libzookeeper-java   a ZooKeeper server; the jars inside pyspark do as well
# Nothing of it runs when the tests do not: they start what they need, and end it.
set -euo pipefail
shopt -s nullglob
declare -A package=(
    [mkfs.ext4]=e2fsprogs [losetup]=mount [mount]=mount [strace]=strace [initdb]=postgresql [postgres]=postgresql
    [curl]=curl [systemd-analyze]=systemd [chromium]=chromium
)
# Debian keeps the programs of a PostgreSQL server out of the PATH, each release in a folder of its own.
PATH=$PATH:/usr/sbin:/sbin:$(printf '%s:' /usr/lib/postgresql/*/bin)
declare -A missing=()
for program in "${!package[@]}"; do command -v "$program" >/dev/null || missing[${package[$program]}]=1; done
[ -n "${missing[chromium]:-}" ] && missing[fonts-dejavu-core]=1
[ -x .venv/bin/promtool ] || command -v promtool >/dev/null || missing[promtool]=1
jars=(/usr/share/java/zookeeper.jar .venv/lib/python*/site-packages/pyspark/jars/zookeeper-[0-9]*.jar)
[ -e "${jars[0]}" ] || [ ${#jars[@]} -gt 1 ] || missing[libzookeeper-java]=1
JAVA_MIN=17  # what Spark 4 asks for
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
# The first number of the version that a java tells, 0 where there is none: 17 of "17.0.15", 1 of "1.8.0_402".
java_release() { "$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | grep . || echo 0; }
[ "$(java_release "$java")" -ge "$JAVA_MIN" ] || missing[default-jre-headless]=1
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "setup: without ${!missing[*]} some tests are skipped (no root, or no apt-get); with CI=true that fails" >&2
    exit 0
fi
echo "setup: installing ${!missing[*]} (Debian packages for the tests)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null || echo "setup: apt-get update failed; trying with the lists at hand" >&2
if [ -n "${missing[default-jre-headless]:-}" ]; then
    # An older Debian's default is an older Java: then one that is new enough, by its own name. 2:1.17-74 is Java 17.
    default=$(apt-cache policy default-jre-headless | sed -n 's/ *Candidate: \([0-9]*:\)\?1\.\([0-9]*\).*/\2/p')
    if [ "${default:-0}" -lt "$JAVA_MIN" ]; then
        for release in 21 25 17; do
            apt-cache policy "openjdk-$release-jre-headless" | grep -q 'Candidate: [0-9]' || continue
            unset 'missing[default-jre-headless]'
            missing[openjdk-$release-jre-headless]=1
            break
        done
    fi
fi
if [ -n "${missing[promtool]:-}" ]; then
    # The package would start a server, so only the program is taken out of it.
    unset 'missing[promtool]'
    folder=$(mktemp -d)
    if (cd "$folder" && apt-get download -qq prometheus >/dev/null 2>&1 && dpkg-deb --fsys-tarfile prometheus_*.deb |
        tar x ./usr/bin/promtool) && [ -d .venv/bin ]; then
        cp "$folder/usr/bin/promtool" .venv/bin/promtool
    else
        echo "setup: promtool could not be had from the package prometheus: a test of the alert rules is skipped" >&2
    fi
    rm -rf "$folder"
fi
[ ${#missing[@]} -eq 0 ] && exit 0
install() { apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
if [ -n "${missing[postgresql]:-}" ] && ! [ -e /etc/postgresql-common/createcluster.conf ]; then
    # The tests make a cluster of their own in a temporary folder: none is to be made and started beside it.
    install postgresql-common &&
        sed -ri 's/^#?\s*create_main_cluster\s*=.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
fi
if ! install "${!missing[@]}"; then
    echo "setup: apt-get could not install ${!missing[*]}: the tests that want them are skipped" >&2
    [ "${CI:-}" != true ]  # there a skip is a failure, and here is the better place to see it
fi
if [ "$(java_release "$java")" -lt "$JAVA_MIN" ]; then
    echo "setup: $java is still older than Java $JAVA_MIN, which Spark asks for: let JAVA_HOME name a newer one" \
        "(they are in /usr/lib/jvm); the tests find it by themselves" >&2
fi
