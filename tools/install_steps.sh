# Runs and shows the steps of tools/install.sh, which sources it.
#
# Uses its VENV, MODE, LOG, STEP_TIMEOUT_S, say and fail.

# Running steps: leaders of their process groups, labels, logs.
CHILDREN=() LABELS=() PARTS=()
FAILED=
STEP=0 STEPS=0 # number of the running step, and of all (`count_steps`)

# Ends the process group of each step.
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

# Sets STEPS: a new virtual environment is a step.
count_steps() {
    local -A of_mode=([cpu]=3 [gpu]=4)
    STEPS=${of_mode[$MODE]}
    [ -x "$VENV/bin/pip" ] || STEPS=$((STEPS + 1))
}

# done_step LABEL STARTED: prints the line of a finished step.
done_step() {
    say "step $STEP of $STEPS: $1: $((SECONDS - $2)) s"
}

# show_running STARTED: on a terminal, overwrites a line with the running step and its seconds;
# without arguments, clears it.
show_running() {
    [ -t 1 ] || return 0
    printf '\r\033[K'
    [ $# -gt 0 ] || return 0
    local text labels
    labels=$(IFS=+ && echo "${LABELS[*]}")
    text="[install] step $STEP of $STEPS: ${labels//+/, } ... $((SECONDS - $1)) s"
    # A wrapped line could not be overwritten.
    printf '%s' "${text:0:$((${COLUMNS:-$(tput cols 2>/dev/null || echo 80)} - 1))}"
}

# begin LABEL COMMAND...: starts a parallel step; `join` waits for all.
begin() {
    LABELS+=("$1")
    PARTS+=("$VENV/.part-${#PARTS[@]}.log")
    printf '=== %s: %s\n' "$1" "${*:2}" >"${PARTS[-1]}"
    # The child inherits the lock (descriptor 9), so that killing only this script does not free it.
    set -m # a process group per child
    { "${@:2}" || { touch "${PARTS[-1]}.failed" && exit 1; }; } \
        >>"${PARTS[-1]}" 2>&1 </dev/null &
    set +m
    CHILDREN+=("$!")
}

# Waits for the begun steps and appends their logs to the log. When one fails, ends the others and
# sets FAILED to its label.
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
    # Last, because the end of the log is shown.
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

# step LABEL COMMAND...: prints one line; the command's output goes to the log.
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
