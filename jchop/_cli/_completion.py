"""``jchop completion``: a script for a shell that completes commands, options and the words that options take."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jchop._cli._command import Command, argument
from jchop._cli._function_commands import NEAREST_METHOD, PTQ_STEPS
from jchop._insight.tune._tune import ERROR_METRICS, GRANULARITIES
from jchop.formats import ALIASES, CATALOGUE, SCALED_CATALOGUE
from jchop.formats.rounding import Overflow, Rounding

#: The words that arguments without choices take, by the argument's name.
_OPTION_WORDS = {
    **dict.fromkeys(("format", "formats", "to"), (*CATALOGUE, *ALIASES, *SCALED_CATALOGUE)),
    **dict.fromkeys(("rounding", "modes"), tuple(mode.value for mode in Rounding)),
    "overflow": [rule.value for rule in Overflow],
    "metric": [*ERROR_METRICS],
    "by": GRANULARITIES,
    "cost": ("bits", "bytes"),
    "method": (NEAREST_METHOD, *PTQ_STEPS),
}


def words_by_command(commands: Iterable[Command]) -> dict[str, dict[str, list[str]]]:
    """By command: its long options, each with the words that it takes; "" holds the words of its other arguments."""
    table: dict[str, dict[str, list[str]]] = {}
    for command in commands:
        options = table.setdefault(command.name, {"--help": []})
        for name, fields in command.arguments:
            place = fields.get("dest", name.strip("-").replace("-", "_"))
            words = map(str, fields.get("choices") or _OPTION_WORDS.get(place, ()))
            text = name if name.startswith("--") else ""
            options[text] = [*options.get(text, []), *words]
    return table


def _bash_script(table: dict[str, dict[str, list[str]]]) -> str:
    cases = []
    for name, options in table.items():
        word_cases = [f"            {o}) words='{' '.join(words)}' ;;" for o, words in options.items() if o and words]
        flags = " ".join(option for option in options if option)
        others = f"            *) words='{' '.join(options.get('', []))}' ;;"
        lines = [f"    {name})", "        case $before in", *word_cases, others, "        esac"]
        cases += [*lines, f"        options='{flags}' ;;"]
    return f"""_jchop() {{
    local now=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words= options=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{" ".join(table)} --help --version' -- "$now"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{chr(10).join(cases)}
    esac
    case $now in
    -*) COMPREPLY=($(compgen -W "$options" -- "$now")) ;;
    *) COMPREPLY=($(compgen -W "$words" -- "$now")) ;;
    esac
}}
complete -o default -F _jchop jchop
"""


def _fish_script(table: dict[str, dict[str, list[str]]]) -> str:
    lines = [f"complete -c jchop -n __fish_use_subcommand -f -a '{' '.join(table)}'"]
    for name, options in table.items():
        prefix = f"complete -c jchop -n '__fish_seen_subcommand_from {name}'"
        for option, words in options.items():
            if option:
                lines.append(f"{prefix} -l {option[2:]}" + (f" -x -a '{' '.join(words)}'" if words else ""))
            elif words:
                lines.append(f"{prefix} -a '{' '.join(words)}'")
    return "\n".join(lines) + "\n"


_ZSH_START = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SHELL_SCRIPTS: dict[str, Callable[[dict[str, dict[str, list[str]]]], str]] = {
    "bash": _bash_script,
    "zsh": lambda table: _ZSH_START + _bash_script(table),
    "fish": _fish_script,
}


COMPLETION = Command(
    "completion",
    lambda options: print(_SHELL_SCRIPTS[options.shell](words_by_command(options.commands)), end=""),
    "print a script that completes commands and options in a shell",
    [argument("shell", help="the shell", choices=tuple(_SHELL_SCRIPTS))],
    epilog='to use it now:\n  eval "$(jchop completion bash)"\n  eval "$(jchop completion zsh)"\n'
    "  jchop completion fish | source",
)
