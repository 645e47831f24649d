_megalith() {
    local current="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ help version" -- "$current"))
    elif [ "${COMP_WORDS[1]}" = help ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$current"))
    elif [ "${current:0:2}" = "--" ]; then
        case "${COMP_WORDS[1]}" in
            train|config) COMPREPLY=($(compgen -W "@FLAGS@" -- "$current")) ;;
            *) COMPREPLY=($(compgen -W "--help" -- "$current")) ;;
        esac
    fi
}
complete -o default -F _megalith megalith
