#!/usr/bin/env bash
# Makes .venv with every component:  bash tools/install.sh [cpu|gpu] [--with vllm]
#
# --with vllm: also .venv/vllm, for generator.engine = "vllm" on the CPU (3.1 GiB).
# Default mode: the mode of an existing .venv, else cpu.
# Safe to repeat: an unchanged installation only prints its versions, and an interrupted one starts
# over. Parallel runs wait for each other. Environment:
#   MEGATRON_RL_PYTHON       interpreter (default: the first found of Python 3.11 to 3.13; with gpu
#                            3.11 or 3.12)
#   MEGATRON_RL_WHEELS       folder with every package (tools/fetch_wheels.sh), instead of an index
#   MEGATRON_RL_APT=0        never call apt-get; list missing packages instead
#   MEGATRON_RL_LOCK_WAIT_S  seconds to wait for another installation (default 1800)
set -euo pipefail

# First, because bash 3.2 of macOS lacks later syntax.
case "$OSTYPE $HOSTTYPE" in
    linux*" x86_64"*) ;;
    *)
        echo "[install] error: this host is $OSTYPE on $HOSTTYPE: megatron-rl needs Linux on x86-64; a container or a virtual machine works too" >&2
        exit 1
        ;;
esac
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
MODE_FILE=$VENV/.mode # also in an incomplete .venv
WITH=
case "${*: -2}" in
    "--with vllm") WITH=vllm && set -- "${@:1:$#-2}" ;;
esac
UNKNOWN=${*:2}
MODE=${1:-$(cat "$MODE_FILE" 2>/dev/null || echo cpu)}
LOG=$VENV/install.log
STAMP=$VENV/.installed    # fingerprint, then the version table; written last
BROKEN=$VENV/.installing  # present while packages are being changed
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# .venv takes 2.6 GiB (cpu) or 10.1 GiB (gpu), unpacking the rest.
declare -A NEEDED_GIB=([cpu]=5 [gpu]=14)
# First refused version: some packages have no wheels for it.
declare -A PYTHON_BELOW=([cpu]=3.14 [gpu]=3.13)
declare -A PYTHONS=([cpu]="3.11 to 3.13" [gpu]="3.11 or 3.12")
BUILT_HERE=transformer-engine-torch # compiled on this host, against its torch
TOOLKIT=
UV_PIN=uv==0.13.9 # installs the components in a third of pip's time
STEP_TIMEOUT_S=1800
# The first import writes bytecode: compiling every file of every package takes a minute. The imports
# at the end must write it, because a sandbox cannot, and SymPy without bytecode takes most of a
# test's time.
unset PYTHONDONTWRITEBYTECODE
PIP_INSTALL=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input install
    --no-compile --progress-bar off --retries 2 --timeout 30)

say() { printf '[install] %s\n' "$*"; }

fail() {
    printf '[install] error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '[install]   %s\n' "$@" >&2
    exit 1
}

. "$ROOT/tools/install_steps.sh"
. "$ROOT/tools/install_wheels.sh"

find_python() {
    local candidate
    for candidate in ${MEGATRON_RL_PYTHON:-python3.11 python3 python3.12 python3.13}; do
        # Run it: a version manager's stub may exist without its version.
        if "$candidate" -c 'import sys
below = tuple(map(int, sys.argv[1].split(".")))
sys.exit(not (3, 11) <= sys.version_info < below)' "${PYTHON_BELOW[$MODE]}" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

# Missing Debian packages, one per line.
missing_packages() {
    local python
    if python=$(find_python); then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
        "$python" -c 'import os, sysconfig
raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || echo python3-dev
        # The sandbox of programs filters system calls.
        "$python" -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")' 2>/dev/null || echo libseccomp2
    else
        printf '%s\n' python3 python3-venv python3-dev
    fi
    command -v gcc >/dev/null || echo gcc
    command -v g++ >/dev/null || echo g++
}

ensure_system() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && [ "${MEGATRON_RL_APT:-1}" != 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian packages: ${missing[*]}"
        timeout 300 apt-get -qq update >/dev/null &&
            DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -qq install -y \
                --no-install-recommends "${missing[@]}" >/dev/null || say "apt-get failed"
        mapfile -t missing < <(missing_packages)
        [ ${#missing[@]} -gt 0 ] || return 0
    fi
    fail "this needs Python ${PYTHONS[$MODE]} with venv and headers, a C and a C++ compiler, libseccomp" \
        "missing Debian packages: ${missing[*]}" \
        "as root: apt-get install -y ${missing[*]}" \
        "or name another interpreter: MEGATRON_RL_PYTHON=/path/to/python3.11 bash tools/install.sh"
}

# Refuses a host with another Python version: Debian's package would not change it.
check_python() {
    local other=${MEGATRON_RL_PYTHON:-python3}
    if find_python >/dev/null || ! command -v "$other" >/dev/null; then
        return 0
    fi
    fail "$other is $("$other" -V 2>&1); mode $MODE needs Python ${PYTHONS[$MODE]}" \
        "without root: python3 -m pip install --user uv && python3 -m uv python install 3.12" \
        "then: MEGATRON_RL_PYTHON=\$(python3 -m uv python find 3.12) bash tools/install.sh $MODE"
}

# Checks the GPU driver and compiler before any download; sets TOOLKIT.
check_gpu_host() {
    [ "$MODE" = gpu ] || return 0
    TOOLKIT=$("$1" -I "$ROOT/megatron_rl/backend/gpu_host.py") ||
        fail "this host cannot build what GPUs need: see above"
}

check_disk() {
    local free_kb used_kb needed_kb=$((NEEDED_GIB[$MODE] * 1024 * 1024))
    free_kb=$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')
    used_kb=$(du -sk "$VENV" 2>/dev/null | cut -f1 || true)
    [ $((free_kb + ${used_kb:-0})) -ge "$needed_kb" ] ||
        fail "$ROOT has $((free_kb / 1024)) MiB free; mode $MODE needs $((needed_kb / 1024))" \
            "make room there, or move the clone to another disk"
}

# Hash of everything that decides the content of .venv, and its path: a virtual environment cannot
# move.
fingerprint() {
    {
        echo "$MODE $ROOT"
        "$1" -c 'import sys; print(sys.version, sys.base_prefix)'
        cd "$ROOT"
        cat "requirements/$MODE"*.txt requirements/{dev,hashes}.txt setup.py \
            tools/install.sh tools/install_steps.sh tools/install_wheels.sh tools/versions.py
    } | sha256sum | cut -d' ' -f1
}

is_current() {
    [ -f "$STAMP" ] && [ ! -e "$BROKEN" ] && [ "$(head -n 1 "$STAMP")" = "$1" ] &&
        "$VENV/bin/python" -c '' 2>/dev/null
}

finish_unchanged() {
    tail -n +2 "$STAMP"
    say "nothing changed; $VENV is ready"
    install_with
    exit 0
}

# Keeps a complete .venv; replaces a broken or incomplete one.
make_venv() {
    local want have mode
    want=$("$1" -c 'import sys; print(sys.version_info[:3])')
    have=$("$VENV/bin/python" -c 'import pip, sys; print(sys.version_info[:3])' 2>/dev/null || true)
    mode=$(cat "$MODE_FILE" 2>/dev/null || echo cpu)
    if [ -e "$BROKEN" ] || [ "$have" != "$want" ]; then
        [ ! -e "$VENV" ] || say "replacing the unusable $VENV"
        rm -rf "$VENV"
    elif [ "$mode" != "$MODE" ]; then
        say "replacing $VENV, which is of mode $mode"
        rm -rf "$VENV"
    fi
    mkdir -p "$VENV"
    : >"$BROKEN"
    echo "$MODE" >"$MODE_FILE"
    rm -f "$STAMP"
    printf '\n=== %s, mode %s\n' "$(date -u +%FT%TZ)" "$MODE" >>"$LOG"
    count_steps
    [ -x "$VENV/bin/pip" ] || step "virtual environment" "$1" -m venv "$VENV"
}

torch_pin() {
    grep '^torch==' "$ROOT/requirements/cpu.txt"
}

install_torch_cpu() {
    limited "${PIP_INSTALL[@]}" --no-deps "$(torch_pin)" ||
        limited "${PIP_INSTALL[@]}" --no-deps --index-url "$TORCH_CPU_INDEX" "$(torch_pin)"
}

# Fails when uv cannot be installed, or lacks a package that pip finds by its configuration.
install_by_uv() {
    [ -x "$VENV/bin/uv" ] || limited "${PIP_INSTALL[@]}" "$UV_PIN" || return
    limited "$VENV/bin/uv" pip install --quiet --no-cache --no-deps --python "$VENV/bin/python" \
        -r "$1"
}

install_sglang_only() {
    local pins=$ROOT/requirements/cpu-sglang-only.txt folder=$VENV/sglang-only
    ! cmp -s "$pins" "$folder/pins.txt" || return 0
    rm -rf "$folder" "$folder.new"
    cp "$pins" "$VENV/.sglang-only.txt" && add_hashes "$VENV/.sglang-only.txt" || return
    limited "${PIP_INSTALL[@]}" --no-deps --target "$folder.new" -r "$VENV/.sglang-only.txt" ||
        return
    rm "$VENV/.sglang-only.txt"
    cp "$pins" "$folder.new/pins.txt" && mv "$folder.new" "$folder"
}

install_cpu() {
    local started=$SECONDS pins=$VENV/.components.txt
    cat "$ROOT/requirements/"{cpu,cpu-nodeps,dev}.txt | grep -v '^torch==' >"$pins"
    begin "torch (CPU build)" install_torch_cpu
    begin "components (about 200 packages)" install_pins "$pins"
    begin "torchvision, for SGLang alone" install_sglang_only
    if ! join; then
        [ "$FAILED" = "torch (CPU build)" ] || step_failed "$started"
        show_log
        fail "no source has the CPU build $(torch_pin) for $("$VENV/bin/python" -V)" \
            "tried pip's configured indexes and $TORCH_CPU_INDEX" \
            "with the wheel in a folder: PIP_FIND_LINKS=/that/folder bash tools/install.sh cpu"
    fi
    done_step "torch, components (about 200 packages), torchvision" "$started"
}

install_gpu() {
    local started=$SECONDS pins=$VENV/.components.txt
    grep -hv "^$BUILT_HERE==" "$ROOT/requirements/"{gpu,dev}.txt >"$pins"
    begin "components (about 260 packages)" install_pins "$pins"
    join || step_failed "$started"
    done_step "torch, components (about 260 packages)" "$started"
    started=$SECONDS
    begin "TransformerEngine's part for torch" build_engine
    join || step_failed "$started"
    done_step "TransformerEngine's part for torch" "$started"
}

# install_pins FILE: the file pins all dependencies. Unpacks on the disk of .venv: /tmp may be small.
install_pins() {
    mkdir -p "$VENV/.tmp"
    export TMPDIR=$VENV/.tmp
    add_hashes "$1" || return
    install_by_uv "$1" || limited "${PIP_INSTALL[@]}" --no-deps -r "$1" || return
    rm -r "$1" "$VENV/.tmp"
}

# Its build finds the toolkit's headers, but not cuDNN's and NCCL's, which are Python packages.
# Without FORCE_BUILD it would look for a wheel of this torch in the network.
build_engine() {
    local headers pin
    pin=$(grep "^$BUILT_HERE==" "$ROOT/requirements/gpu.txt") || return
    headers=$("$VENV/bin/python" -c 'import glob, sysconfig
print(":".join(sorted(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/include"))))') || return
    limited env "PATH=$VENV/bin:$PATH" "CUDA_HOME=$TOOLKIT" \
        "CPLUS_INCLUDE_PATH=$headers${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" \
        NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
        "${PIP_INSTALL[@]}" --no-deps --no-build-isolation --no-cache-dir "$pin"
}

install_with() {
    [ "$WITH" = vllm ] || return 0
    say "vLLM, in a separate environment"
    limited env -C "$ROOT" "$VENV/bin/python" -m tools.install_vllm ||
        fail "vLLM could not be installed; $VENV itself is ready"
}

finish() {
    local table=$VENV/.versions started=$SECONDS
    begin "import of every component" limited \
        env -C "$ROOT" "$VENV/bin/python" -m tools.versions "$MODE" --out "$table"
    begin "loops in C++" limited \
        env -C "$ROOT" "$VENV/bin/python" -m megatron_rl.backend.cpu.kernels.build
    join || step_failed "$started"
    done_step "import of every component, loops in C++" "$started"
    { echo "$1"; cat "$table"; } >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    rm -f "$BROKEN" "$table"
    tail -n +2 "$STAMP"
    say "$VENV is ready after $SECONDS s"
}

main() {
    [ -z "$UNKNOWN" ] || fail "unknown arguments '$UNKNOWN'" \
        "usage: bash tools/install.sh [cpu|gpu] [--with vllm]"
    case $MODE in
        cpu | gpu) ;;
        *) fail "unknown mode '$MODE'" "usage: bash tools/install.sh [cpu|gpu] [--with vllm]" ;;
    esac
    local python want
    trap on_signal INT TERM
    if python=$(find_python) && want=$(fingerprint "$python") && is_current "$want"; then
        finish_unchanged
    fi
    exec 9>"$ROOT/.venv.lock"
    flock -w "${MEGATRON_RL_LOCK_WAIT_S:-1800}" 9 ||
        fail "another installation holds $ROOT/.venv.lock; wait for it, or end it"
    check_python
    ensure_system
    python=$(find_python)
    want=$(fingerprint "$python")
    ! is_current "$want" || finish_unchanged
    check_gpu_host "$python"
    check_disk
    use_wheels "$python"
    say "mode $MODE, $("$python" -V) at $python, into $VENV"
    make_venv "$python"
    "install_$MODE"
    step "megatron-rl itself" "${PIP_INSTALL[@]}" --no-deps --no-build-isolation --editable "$ROOT"
    finish "$want"
    install_with
}

main
