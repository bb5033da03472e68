"""`holdfast completion`: prints the script with which bash, zsh or fish complete verbs, options and ids.

The script has the verbs and their options as text, so only ids need a call: `holdfast completion ids KIND`, which
`process.quick` answers from this machine's server in tens of milliseconds.
"""

from __future__ import annotations

import importlib
import re
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer

from holdfast.cli import VERBS
from holdfast.cli.support.sandbox_option import LOCAL, SandboxOption

#: The kind of ids that a verb takes, by the name of its argument.
_KINDS: Final = {
    "process_id": "process",
    "terminal_id": "terminal",
    "shell_id": "shell",
    "ids": "all",
    "id": "sandbox",
}
#: Verbs whose argument has the name of another kind.
_EXCEPTIONS: Final = {"kill": "process", "sandbox": "sandbox"}

_BASH: Final = """\
_holdfast() {
    local cur verb sub word words i sandbox options subs kind
    cur="${COMP_WORDS[COMP_CWORD]}"
    verb="${COMP_WORDS[1]}"
    sub="${COMP_WORDS[2]}"
    sandbox="${HOLDFAST_SANDBOX:-local}" options="" subs="" kind=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=( $(compgen -W "@VERBS@" -- "$cur") )
        return
    fi
    i=2
    while [ "$i" -lt "$COMP_CWORD" ]; do
        word="${COMP_WORDS[i]}"
        case "$word" in
            --) return ;;
            --sandbox=*) sandbox="${word#--sandbox=}" ;;
            --sandbox) sandbox="${COMP_WORDS[i+1]}" ;;
        esac
        i=$((i + 1))
    done
    case "$verb" in
@CASES@
    esac
    case "$cur" in
        -*) words="$options" ;;
        *)
            words=""
            if [ "$COMP_CWORD" -eq 2 ]; then words="$subs"; fi
            if [ -n "$kind" ]; then
                words="$words $("${COMP_WORDS[0]}" completion ids "$kind" --sandbox "$sandbox" 2>/dev/null)"
            fi
            ;;
    esac
    COMPREPLY=( $(compgen -W "$words" -- "$cur") )
}
complete -o default -F _holdfast holdfast
"""
_ZSH: Final = """\
autoload -U +X compinit && compinit -C
autoload -U +X bashcompinit && bashcompinit
"""
#: By position: `__fish_seen_subcommand_from rm` also holds for `holdfast sandbox rm`.
_FISH: Final = """\
function __holdfast_at -d 'Whether the line has this verb, and one of these sub-verbs'
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"; or return 1
    test (count $argv) -eq 1; or contains -- "$words[3]" $argv[2..]
end"""


class CompletionWords(NamedTuple):
    """The words that complete a verb or a sub-verb."""

    options: tuple[str, ...]
    #: The kind of ids that it takes; empty if none.
    kind: str = ""


def command(
    shell: Annotated[
        Literal["bash", "zsh", "fish", "ids"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ],
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="After ids: process, terminal, shell, sandbox or all.")
    ] = None,
    sandbox: SandboxOption = LOCAL,
) -> int:
    """Print the script with which a shell completes verbs, options and ids.

    Load it with `source <(holdfast completion bash)`, or store it where the shell reads completions; store it again
    after an upgrade. `holdfast completion ids KIND` prints the ids of this machine's server; for another sandbox it
    prints none, because a connection takes too long.
    """
    if shell == "ids":
        return 0  # `process.quick` prints the ids of a server that runs
    print(script(shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    if shell == "fish":
        return _fish()
    cases = "\n".join(_case(verb) for verb in VERBS)
    text = _BASH.replace("@VERBS@", " ".join(VERBS)).replace("@CASES@", cases)
    return _ZSH + text if shell == "zsh" else text


def _case(verb: str) -> str:
    found, subs = completed(verb), sub_verbs(verb)
    lines = [f"        {verb})", f"            {_assignments(found)}"]
    if subs:
        lines.append(f'            subs="{" ".join(subs)}"')
        lines.append('            case "$sub" in')
        lines += [f"                {name}) {_assignments(each)} ;;" for name, each in subs.items()]
        lines.append("            esac")
    return "\n".join([*lines, "            ;;"])


def _assignments(found: CompletionWords) -> str:
    return f'options="{" ".join(found.options)}" kind="{found.kind}"'


def _fish() -> str:
    lines = [
        _FISH,
        "complete -c holdfast -n __fish_use_subcommand -f",
        *(
            f"complete -c holdfast -n __fish_use_subcommand -a {verb} -d {_quoted(VERBS[verb].help)}"
            for verb in VERBS
        ),
    ]
    for verb in VERBS:
        subs = sub_verbs(verb)
        names = " ".join(subs)
        seen = f"__holdfast_at {verb}"
        if subs:
            seen_none = f"{seen}; and not __holdfast_at {verb} {names}"
            lines.append(f"complete -c holdfast -n '{seen_none}' -f -a '{names}'")
            lines += _fish_lines(seen_none, completed(verb))
            for name, each in subs.items():
                lines += _fish_lines(f"{seen} {name}", each)
        else:
            lines += _fish_lines(seen, completed(verb))
    return "\n".join(lines) + "\n"


def _fish_lines(condition: str, found: CompletionWords) -> list[str]:
    start = f"complete -c holdfast -n '{condition}'"
    lines = [
        f"{start} -l {option[2:]}" if option.startswith("--") else f"{start} -s {option[1:]}"
        for option in found.options
    ]
    if found.kind:
        lines.append(f"{start} -f -a '(holdfast completion ids {found.kind} 2>/dev/null)'")
    return lines


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def completed(verb: str) -> CompletionWords:
    """Return the options and the kind of ids of a verb, from its definition."""
    module = importlib.import_module(f"holdfast.cli.verbs.{VERBS[verb].module}")
    if not VERBS[verb].plain:
        return _typed(module.command, verb)
    if hasattr(module, "parser"):
        return CompletionWords(tuple(sorted(module.parser()._option_string_actions)))
    return CompletionWords(tuple(sorted({"--help", *re.findall(r"--[a-z][a-z-]+", module.USAGE)})))


def sub_verbs(verb: str) -> dict[str, CompletionWords]:
    """Return the sub-verbs of a verb; empty if there are none."""
    if VERBS[verb].plain:
        return {}
    module = importlib.import_module(f"holdfast.cli.verbs.{VERBS[verb].module}")
    return {name: _typed(each, verb) for name, each in getattr(module, "SUB_VERBS", {}).items()}


def _typed(function: Any, verb: str) -> CompletionWords:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    parameters = typer.main.get_command(app).params
    options = {name for each in parameters for name in [*each.opts, *each.secondary_opts] if name.startswith("-")}
    kinds = [_KINDS[each.name] for each in parameters if each.name in _KINDS and not each.opts[0].startswith("-")]
    kind = _EXCEPTIONS.get(verb, kinds[0]) if kinds else ""
    return CompletionWords(tuple(sorted(options | {"--help"})), kind)
