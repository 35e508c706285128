#!/usr/bin/env bash
# Installs the peers that the benchmarks compare with into .bench/ of the checkout:
#   Kafka 4.1.0 as jars from Maven Central; confluent-kafka and kafka-python from PyPI, in an environment of their own.
# Debian packages where they are missing and we are root: a Java runtime (default-jre-headless) and maven.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=$(cd "$here/../../.." && pwd)/.bench
need=()
command -v java >/dev/null || need+=(default-jre-headless)
command -v mvn >/dev/null || need+=(maven)
if [ ${#need[@]} -gt 0 ]; then
    if [ "$(id -u)" -ne 0 ]; then echo "peers: please install ${need[*]} first" >&2; exit 1; fi
    echo "peers: installing ${need[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
fi
mkdir -p "$target"
echo "peers: Kafka's jars into $target/kafka"
mvn -q -B -f "$here/pom.xml" dependency:copy-dependencies -DoutputDirectory="$target/kafka"
echo "peers: the Python clients into $target/venv"
python3 -m venv "$target/venv"
"$target/venv/bin/python" -m pip install --quiet --disable-pip-version-check confluent-kafka==2.16.1 kafka-python==3.0.12
echo "peers: done; python -m tools.bench --peers"
