#!/usr/bin/env bash
# Installs the peers that the benchmarks compare with. Into .bench/ of the checkout go
#   jars from Maven Central: Kafka 4.1.0 and RocketMQ 5.3.3 (broker, name server and Java client);
#   an environment with the Python clients from PyPI (the list is below).
# As root, where they are missing, Debian packages: default-jdk-headless, maven, redis-server, nats-server,
# rabbitmq-server, beanstalkd. None of their services is started: each benchmark runs its own on loopback.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
target=$(cd "$here/../../.." && pwd)/.bench
need=()
for pair in javac:default-jdk-headless mvn:maven redis-server:redis-server nats-server:nats-server \
            rabbitmq-server:rabbitmq-server beanstalkd:beanstalkd; do
    PATH=$PATH:/usr/sbin:/usr/lib/rabbitmq/bin command -v "${pair%%:*}" >/dev/null || need+=("${pair##*:}")
done
if [ ${#need[@]} -gt 0 ]; then
    if [ "$(id -u)" -ne 0 ]; then echo "peers: please install ${need[*]} first" >&2; exit 1; fi
    echo "peers: installing ${need[*]}"
    if [ ! -e /usr/sbin/policy-rc.d ]; then   # Debian asks this file before a package starts its service.
        printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    DEBIAN_FRONTEND=noninteractive apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
fi
mkdir -p "$target"
for peer in kafka rocketmq; do
    echo "peers: the jars of $peer into $target/$peer"
    mvn -q -B -f "$here/$peer.xml" dependency:copy-dependencies -DoutputDirectory="$target/$peer"
done
echo "peers: the Python clients into $target/venv"
python3 -m venv "$target/venv"
"$target/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    confluent-kafka==2.16.1 kafka-python==3.0.12 redis nats-py pika rstream greenstalk
echo "peers: the Java client of RocketMQ into $target/classes"
javac -nowarn -cp "$target/rocketmq/*" -d "$target/classes" "$here/RocketMqClient.java"
echo "peers: done; python -m tools.bench --peers"
