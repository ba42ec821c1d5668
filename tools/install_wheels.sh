# Installs from a folder instead of an index; sourced by tools/install.sh and tools/fetch_wheels.sh.
#
# Uses its ROOT, MODE, UV_PIN, say and fail.

# Files with the pins of a mode.
pin_files() {
    local files=("$ROOT/requirements/$1"*.txt "$ROOT/requirements/dev.txt")
    printf '%s\n' "${files[@]}"
}

# use_wheels PYTHON: with MEGATRON_RL_WHEELS, pip and uv take packages only from that folder. Refuses
# a folder that lacks a package.
use_wheels() {
    local folder=${MEGATRON_RL_WHEELS:-} missing count
    [ -n "$folder" ] || return 0
    [ -d "$folder" ] || fail "MEGATRON_RL_WHEELS=$folder is not a folder"
    folder=$(cd "$folder" && pwd)
    mapfile -t missing < <(pin_files "$MODE" | missing_wheels "$1" "$folder")
    count=${#missing[@]}
    [ "$count" -eq 0 ] || fail "$folder lacks $count of the packages of mode $MODE" \
        "for example: ${missing[*]:0:5}" \
        "where there is network: bash tools/fetch_wheels.sh FOLDER $MODE, with this Python and system"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$folder
    export UV_NO_INDEX=1 UV_OFFLINE=1 UV_FIND_LINKS=$folder
    say "packages come from $folder alone"
}

# add_hashes FILE: adds the recorded hashes to pins, so that pip and uv refuse other files. A folder of
# wheels has files that tools/fetch_wheels.sh compiled, whose hashes are not recorded.
add_hashes() {
    awk -v has_compiled="${MEGATRON_RL_WHEELS:+yes}" '
        FILENAME == ARGV[1] { hashes[$1] = $0; next }
        ($1 in hashes) && !(has_compiled && hashes[$1] ~ /# compiled$/) { print hashes[$1]; next }
        { print }
    ' "$ROOT/requirements/hashes.txt" "$1" >"$1.new" && mv "$1.new" "$1"
}

# missing_wheels PYTHON FOLDER: prints the pins without a file in FOLDER; stdin: names of pin files.
missing_wheels() {
    "$1" -I -c 'import pathlib, re, sys

def canonical(text):
    return re.sub(r"[-_.]+", "-", text.strip()).lower()

def parts(path):
    if path.suffix == ".whl":
        name, version = path.name.split("-")[:2]
    else:
        name, _, version = path.name.removesuffix(".tar.gz").rpartition("-")
    # A build for one device has a suffix after a plus, which a pin may omit.
    return canonical(name), {version, version.partition("+")[0]}

held = {}
for path in pathlib.Path(sys.argv[1]).iterdir():
    name, versions = parts(path)
    held.setdefault(name, set()).update(versions)
for file in sys.stdin.read().splitlines():
    for line in pathlib.Path(file).read_text().splitlines():
        name, _, version = line.partition("==")
        if version and not line.startswith("#"):
            if version.strip() not in held.get(canonical(name), ()):
                print(line)
' "$2"
}
