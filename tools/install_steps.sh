# How tools/install.sh runs and shows its steps; sourced by it, and not run by itself.
#
# Uses its VENV, MODE, LOG, STEP_TIMEOUT_S, say and fail.

# Steps under way: leaders of their process groups, what they do, their own logs.
CHILDREN=() LABELS=() PARTS=()
FAILED=
# Which step is under way, of how many: `count_steps` sets the latter.
STEP=0 STEPS=0

# A step is a process group of its own, so that what it started ends with it.
end_children() {
    local child
    for child in ${CHILDREN[@]+"${CHILDREN[@]}"}; do
        kill -TERM -- "-$child" 2>/dev/null || true
    done
}

on_signal() {
    show_running
    end_children
    fail "interrupted; run the same command again"
}

limited() {
    timeout --foreground "$STEP_TIMEOUT_S" "$@"
}

# The steps of this mode; that of a new virtual environment is one of them.
count_steps() {
    local -A of_mode=([cpu]=3 [gpu]=4)
    STEPS=${of_mode[$MODE]}
    [ -x "$VENV/bin/pip" ] || STEPS=$((STEPS + 1))
}

# done_step LABEL STARTED: the one line that stays of a step.
done_step() {
    say "step $STEP of $STEPS: $1: $((SECONDS - $2)) s"
}

# show_running STARTED: on a terminal, one line that is written over: what is under way, and how
# long already; without arguments it goes.
show_running() {
    [ -t 1 ] || return 0
    printf '\r\033[K'
    [ $# -gt 0 ] || return 0
    local text labels
    labels=$(IFS=+ && echo "${LABELS[*]}")
    text="[install] step $STEP of $STEPS: ${labels//+/, } ... $((SECONDS - $1)) s"
    # A line that wraps could not be written over.
    printf '%s' "${text:0:$((${COLUMNS:-$(tput cols 2>/dev/null || echo 80)} - 1))}"
}

# begin LABEL COMMAND...: starts a step, beside those that have begun; `join` waits for them all.
begin() {
    LABELS+=("$1")
    PARTS+=("$VENV/.part-${#PARTS[@]}.log")
    printf '=== %s: %s\n' "$1" "${*:2}" >"${PARTS[-1]}"
    # The child inherits the lock (descriptor 9): killing only this script frees nothing too early.
    set -m # a process group each
    { "${@:2}" || { touch "${PARTS[-1]}.failed" && exit 1; }; } \
        >>"${PARTS[-1]}" 2>&1 </dev/null &
    set +m
    CHILDREN+=("$!")
}

# Waits for the steps that have begun and moves their logs into the log. When one fails, the others
# are ended and FAILED is its label.
join() {
    local i failed= started=$SECONDS shown=-1
    STEP=$((STEP + 1))
    while [ -n "$(jobs -rp)" ] && ! find_failed >/dev/null; do
        if [ "$shown" != "$SECONDS" ]; then
            shown=$SECONDS
            show_running "$started"
        fi
        sleep 0.1
    done
    show_running
    if failed=$(find_failed); then
        FAILED=${LABELS[failed]}
        end_children
    fi
    wait
    for i in "${!PARTS[@]}"; do
        [ "$i" = "$failed" ] || cat "${PARTS[i]}" >>"$LOG"
    done
    # Last, as the end of the log is what is shown.
    [ -z "$failed" ] || cat "${PARTS[failed]}" >>"$LOG"
    rm -f "${PARTS[@]}" "${PARTS[@]/%/.failed}"
    CHILDREN=() LABELS=() PARTS=()
    [ -z "$failed" ]
}

# The number of a step that failed.
find_failed() {
    local i
    for i in "${!PARTS[@]}"; do
        [ ! -e "${PARTS[i]}.failed" ] || { echo "$i" && return 0; }
    done
    return 1
}

# step LABEL COMMAND...: one line of output; the command's own output goes to the log.
step() {
    local started=$SECONDS
    begin "$1" limited "${@:2}"
    join || step_failed "$started"
    done_step "$1" "$started"
}

step_failed() {
    show_log
    fail "$FAILED failed after $((SECONDS - $1)) s; the whole log: $LOG"
}

show_log() {
    say "last lines of $LOG:" >&2
    grep -v "is neither a file nor a directory" "$LOG" | tail -n 25 >&2 || true
}
