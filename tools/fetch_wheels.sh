#!/usr/bin/env bash
# Downloads the packages of tools/install.sh into a folder, for hosts without an index:
#   bash tools/fetch_wheels.sh FOLDER [cpu|gpu]
#
# Run it where an index is reachable, with the same Python (3.11 or 3.12) and a system that is no
# newer. Copy the folder to the host, and there
#   MEGATRON_RL_WHEELS=FOLDER bash tools/install.sh gpu
# Needs no GPU. Mode gpu needs nvcc, like the installation: reading the metadata of the source
# package that each host compiles takes torch, temporarily in FOLDER/.read.
# Environment: MEGATRON_RL_PYTHON, the interpreter (default: python3).
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MODE=${2:-gpu}
PYTHON=${MEGATRON_RL_PYTHON:-python3}
BUILT_HERE=transformer-engine-torch

say() { printf '[wheels] %s\n' "$*"; }

fail() {
    printf '[wheels] error: %s\n' "$*" >&2
    exit 1
}

. "$ROOT/tools/install_wheels.sh"

pip() { "$PYTHON" -m pip --disable-pip-version-check --no-input "$@"; }

# Builds wheels of source packages, except of BUILT_HERE.
fetch_pins() {
    local pins=$FOLDER/.pins.txt
    pin_files "$MODE" | xargs cat | grep -v "^$BUILT_HERE==" >"$pins"
    sed -n 's/^UV_PIN=\([^ ]*\).*/\1/p' "$ROOT/tools/install.sh" >>"$pins"
    pip wheel --quiet --no-deps --wheel-dir "$FOLDER" --find-links "$FOLDER" -r "$pins"
    rm "$pins"
}

# pip reads the metadata of BUILT_HERE by running its setup.py, which needs torch and build tools.
fetch_source() {
    local pin torch read=$FOLDER/.read
    pin=$(grep "^$BUILT_HERE==" "$ROOT/requirements/gpu.txt")
    torch=$(grep '^torch==' "$ROOT/requirements/gpu.txt")
    [ -z "$(ls "$FOLDER/${BUILT_HERE//-/_}"-*.tar.gz 2>/dev/null)" ] || return 0
    rm -rf "$read"
    "$PYTHON" -m venv "$read"
    "$read/bin/python" -m pip install --quiet --no-index --find-links "$FOLDER" \
        "$torch" setuptools wheel pybind11 packaging
    NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE "$read/bin/python" -m pip download --quiet \
        --no-deps --no-build-isolation --no-binary :all: --dest "$FOLDER" "$pin"
    rm -rf "$read"
}

[ $# -ge 1 ] || fail "usage: bash tools/fetch_wheels.sh FOLDER [cpu|gpu]"
mkdir -p "$1"
FOLDER=$(cd "$1" && pwd)
say "$("$PYTHON" -V), mode $MODE, into $FOLDER"
fetch_pins
[ "$MODE" != gpu ] || fetch_source
missing=$(pin_files "$MODE" | missing_wheels "$PYTHON" "$FOLDER")
[ -z "$missing" ] || fail "not found: $missing"
say "$(ls "$FOLDER" | wc -l) files, $(du -sm "$FOLDER" | cut -f1) MiB"
