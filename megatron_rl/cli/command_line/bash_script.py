"""The script by which bash asks for completions. Used by `cli.py`, which gives it to typer.

Bash takes `=` for the end of a word, typer's own script lets it, and adds a blank after what it
completes. This one hands over whole words, so that `section.key=value` is one, and adds no blank
after a key that waits for its value.
"""

BASH_SCRIPT = """
%(complete_func)s() {
    local IFS=$' \\t\\n' line="${COMP_LINE:0:$COMP_POINT}" words count
    read -ra words <<< "$line"
    count=$((${#words[@]} - 1))
    [[ "$line" == *[[:space:]] ]] && count=$((count + 1))
    local word="${words[$count]-}"
    IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="$line" COMP_CWORD=$count \\
                   %(autocomplete_var)s=complete_bash $1 ) )
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#"${word%%=*}="}" )
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./] ]]; then
        compopt -o nospace
    fi
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""
