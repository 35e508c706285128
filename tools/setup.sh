#!/usr/bin/env bash
# Makes .venv in the checkout and installs tfmq with its development tools into it. Touches nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted='import sys; sys.exit(sys.version_info < (3, 11))'
python=""
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && "$candidate" -c "$wanted" 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "tfmq needs Python 3.11 or newer; none was found. Install one (Debian: apt-get install python3 python3-venv) or say PYTHON=/path/to/python3." >&2
    exit 1
fi
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c "$wanted"; then
    echo "setup: making .venv with $($python --version)"
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        echo "Python's venv module is missing. On Debian: apt-get install python3-venv" >&2
        exit 1
    fi
fi
echo "setup: installing tfmq and its development tools into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint tools/constraints.txt --editable '.[dev]'
touch .venv/.complete
