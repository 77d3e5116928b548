#!/usr/bin/env bash
# Installs requirements/dev.lock and this checkout in .venv. Usage: scripts/setup.sh [PYTHON]
# Uses pip's variables PIP_* for the package index and its certificates, if set. The CPU build of torch is from
# PIP_FIND_LINKS, if set, otherwise from the PyTorch project's index.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
lock=requirements/dev.lock

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "expected Python 3.11 or newer, got $("$python" --version 2>&1). Name another one: make setup PYTHON=python3.12" >&2
    exit 2
}

pinned() { sed -n "s/^$1==\([^ ]*\).*/\1/p" "$lock"; }

# --without-pip: some distributions ship venv without ensurepip. The outer pip installs into the new environment.
.venv/bin/python -c '' 2>/dev/null || "$python" -m venv --clear --without-pip .venv
[ "$(.venv/bin/uv --version 2>/dev/null | cut -d' ' -f2)" = "$(pinned uv)" ] ||
    "$python" -m pip --python .venv/bin/python install --quiet "uv==$(pinned uv)"

[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}"
[ -z "${PIP_EXTRA_INDEX_URL:-}" ] || export UV_INDEX="${UV_INDEX:-$PIP_EXTRA_INDEX_URL}"
[ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"
[ -z "${PIP_DEFAULT_TIMEOUT:-}" ] || export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-$PIP_DEFAULT_TIMEOUT}"

torch=()
for place in ${PIP_FIND_LINKS:-}; do torch+=(--find-links "$place"); done
[ ${#torch[@]} -gt 0 ] || torch=(--torch-backend cpu)

echo "installing $lock into .venv: about 5 GB, some minutes the first time"
# sync installs exactly the lock file and resolves no dependencies, so torchvision and similar packages stay out.
# Bytecode is compiled here: with PYTHONDONTWRITEBYTECODE set, every process would compile vLLM again, half of its start.
.venv/bin/uv pip sync --compile-bytecode --quiet --python .venv/bin/python "${torch[@]}" "$lock"
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-build-isolation --no-deps --editable .
