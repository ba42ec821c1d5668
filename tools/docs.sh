#!/usr/bin/env bash
# The pages of docs/ as a site:  bash tools/docs.sh [build [FOLDER] | serve]
#
# build (default): into .cache/docs/site, or FOLDER. Broken links and anchors, pages missing in the
# navigation, and resources of other hosts are errors.
# serve: at http://127.0.0.1:8000, with a rebuild after each change.
# The programs are in .cache/docs/venv, made once (20 s) from requirements/docs.txt.
# MEGATRON_RL_PYTHON: its interpreter (3.11 or newer).
set -euo pipefail
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=$PWD/.cache/docs/venv
PINS=requirements/docs.txt

usage() {
    sed -n '2,8s/^# \{0,1\}//p' tools/docs.sh >&2
    exit 2
}

# Exit code 69: the programs cannot be installed, which says nothing about the pages.
prepare() {
    cmp -s "$PINS" "$VENV/.installed" || install || {
        echo "the programs of $PINS cannot be installed here: see above" >&2
        exit 69
    }
}

install() {
    local python=${MEGATRON_RL_PYTHON:-}
    [ -n "$python" ] || python=$(command -v python3.11 || command -v python3.12 || command -v python3)
    rm -rf "$VENV"
    timeout 120 "$python" -m venv "$VENV" || return
    timeout 300 "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install --quiet \
        --no-deps --no-compile --retries 2 --timeout 30 -r "$PINS" || return
    cp "$PINS" "$VENV/.installed"
}

build() {
    local log=$PWD/.cache/docs/build.log
    # Not --quiet, under which --strict counts nothing.
    NO_MKDOCS_2_WARNING=1 timeout 300 "$VENV/bin/mkdocs" build --strict --site-dir "$1" \
        >"$log" 2>&1 || { grep -v '^INFO' "$log" >&2; exit 1; }
    "$VENV/bin/python" tools/check_site.py "$1"
}

case ${1:-build} in
    build)
        [ $# -le 2 ] || usage
        FOLDER=$PWD/.cache/docs/site
        [ $# -lt 2 ] || FOLDER=$(realpath -m "$CALLED_FROM/$2")
        [[ ${2:-} != /* ]] || FOLDER=$2
        prepare
        build "$FOLDER"
        ;;
    serve)
        [ $# -eq 1 ] || usage
        prepare
        NO_MKDOCS_2_WARNING=1 exec "$VENV/bin/mkdocs" serve --strict --dev-addr 127.0.0.1:8000
        ;;
    *) usage ;;
esac
