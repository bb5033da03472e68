"""The command line and the files with which an interactive bash or zsh prints OSC 133 marks at its prompts.

A terminal gets its prompt and the end of a command from the marks; the user's own files, prompt and hooks keep
working. Pure: nothing here touches the operating system, and the shell has read all files at its first prompt.
"""

from __future__ import annotations

import os.path
import shlex
from collections.abc import Mapping
from typing import Literal, NamedTuple

_LOGIN_FLAGS = frozenset({"-l", "--login"})
_FLAGS = _LOGIN_FLAGS | {"-i"}


class IntegratedShell(NamedTuple):
    """A shell that prints marks: the files go into a private directory (0700, files 0600) of the shell's user."""

    kind: Literal["bash", "zsh"]
    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str]


def integrate(
    path: str,
    argv: tuple[str, ...],
    *,
    directory: str,
    nonce: str,
    login: bool,
    environment: Mapping[str, str],
) -> IntegratedShell | None:
    """The integration of the shell at `path`; None for other programs, and for arguments that rule it out.

    `environment` is the shell's environment; `env` of the result is added to it.
    """
    flags = argv[1:]
    if not argv or not _FLAGS.issuperset(flags):
        return None
    dashed = argv[0].startswith("-")
    login = login or dashed or not _LOGIN_FLAGS.isdisjoint(flags)
    # The dash of argv[0] already means login, without a flag.
    login_flag = ("--login",) if login and not dashed else ()
    interactive = ("-i",) if "-i" in flags else ()
    match os.path.basename(path):
        case "bash":
            if "POSIXLY_CORRECT" in environment or "posix" in environment.get("SHELLOPTS", "").split(":"):
                return None  # such a bash reads $ENV alone and must stay in that mode
            if login:
                return _login_bash(argv[0], (*login_flag, *interactive), directory, nonce, environment)
            rc = _BASH_HOOKS.replace("@NONCE@", nonce) + _BASH_INTERACTIVE_FILES + _BASH_START
            # bash reads the distribution's rc file itself, if it was built to, and then ours in place of ~/.bashrc.
            options = ("--rcfile", os.path.join(directory, "rc"), *interactive, "+H")
            return IntegratedShell("bash", (argv[0], *options), {}, {"rc": rc})
        case "zsh":
            flag = ("-l",) if login_flag else ()
            zshenv = _ZSH_ENV.replace("@NONCE@", nonce).replace("@ZDOTDIR@", _restored("ZDOTDIR", environment))
            return IntegratedShell(
                "zsh", (argv[0], *flag, *interactive), {"ZDOTDIR": directory}, {".zshenv": zshenv}
            )
        case _:
            return None


def _login_bash(
    name: str, flags: tuple[str, ...], directory: str, nonce: str, environment: Mapping[str, str]
) -> IntegratedShell:
    """A login bash reads a file of our choice in POSIX mode alone: if interactive, the one that $ENV names."""
    undo = [
        "set +o posix +H",
        "shopt -u inherit_errexit 2>/dev/null",  # POSIX mode turns it on, and leaving the mode does not turn it off
        "unset _hold_rc POSIXLY_CORRECT",
        _restored("ENV", environment),
    ]
    if "HISTFILE" not in environment:
        undo.append("HISTFILE=~/.bash_history")
    if "MAILCHECK" not in environment:
        undo.append("MAILCHECK=60")
    rc = "\n".join(undo) + "\n" + _BASH_HOOKS.replace("@NONCE@", nonce) + _BASH_LOGIN_FILES + _BASH_START
    # bash expands the value of ENV, but not what the expansion gives: so any path is safe in a variable of its own.
    env = {"ENV": "$_hold_rc", "_hold_rc": os.path.join(directory, "rc")}
    return IntegratedShell("bash", (name, "--posix", *flags), env, {"rc": rc})


def _restored(variable: str, environment: Mapping[str, str]) -> str:
    if variable in environment:
        return f"export {variable}={shlex.quote(environment[variable])}"
    return f"unset {variable}"


# The variables of bash:
# - PROMPT_COMMAND[0] is `_hold_first;#USER`, USER being the user's own element 0, as a comment: scripts that search
#   $PROMPT_COMMAND for a command, or append to its text, keep working. Element 1 runs it, so that $? and PIPESTATUS
#   are the command's (bash restores both between elements). If USER has several lines, and before bash 5.1, which
#   has no array here, it is `_hold_first`, USER and `_hold_last`, one below the other.
# - PROMPT_COMMAND[999] is `_hold_last`, out of the reach of `PROMPT_COMMAND=x`; what `+=(x)` adds comes at 1000.
# - PS1 and PS0 name variables and not the nonce: exported, they are empty words in another shell. They also put
#   `_hold_last` back after `unset PROMPT_COMMAND`, and PS1 prints D if no hook did.
# - _hold_m is an array, since no array is ever exported, not even if assigned under `set -a`. 5 and 6: the halves
#   of D; 7: bash 5.1 or newer; 8: all prompts as we left them; 9: 1 while D is still to be printed.
# - _hold_t has every text that was put around a prompt, to find it again in a prompt that the user has changed.
# The hooks run at each prompt: no forks, no redirected blocks (10 us each), few commands if nothing changed.
_BASH_HOOKS = r"""
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)); then
_hold_a=$'\e]133;A;@NONCE@\a' _hold_b=$'\e]133;B;@NONCE@\a'
_hold_c=$'\e]133;C;@NONCE@\a' _hold_p=$'\e]133;P;@NONCE@\a'
_hold_m=([5]=$'\e]133;D;' [6]=$';@NONCE@\a' [7]=$((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)) [8]= [9]=)
if ((_hold_m[7])); then
  _hold_t='#${PROMPT_COMMAND[999]:=_hold_last}'
else
  _hold_t='#${PROMPT_COMMAND:=_hold_last}'
fi
_hold_t=(
  [1]='\[${_hold_m[9]:+${_hold_m[5]:+${_hold_m[5]}$?${_hold_m[6]'"$_hold_t"'}}}${_hold_a-}\]'
  [2]='${_hold_c:+${_hold_m[_hold_m[9]=1]-}${_hold_c'"$_hold_t"'}}' [3]='\[${_hold_b-}\]' [4]='\[${_hold_p-}\]'
  [5]='\[${_hold_m[9]:+${_hold_m[5]-}$?${_hold_m[6]-}}${_hold_a-}\]' [6]='${_hold_m[_hold_m[9]=1]-}${_hold_c-}'
  [7]='\[\e]133;A;@NONCE@\a\]' [8]='\e]133;C;@NONCE@\a' [9]='\[\e]133;B;@NONCE@\a\]' [10]='\[\e]133;P;@NONCE@\a\]'
)
_hold_first() {
  local _hold_s=$?
  if [[ $- == *[xT]* ]]; then
    _hold_quiet
    _hold_first
    return
  fi
  _hold_m[9]=
  builtin printf '%s' "${_hold_m[5]}$_hold_s${_hold_m[6]}" >&2
  # The rest of the same text gets the status; under errexit it would end the shell.
  [[ $- == *e* ]] || return "$_hold_s"
}
_hold_last() {
  local _hold_s=$?
  [[ ${_hold_m[9]}${PS1-}${PS0-}${PS2-}$BASHOPTS${PROMPT_COMMAND-}\
${PROMPT_COMMAND[999]-}${PROMPT_COMMAND[1000]-} == "${_hold_m[8]}" ]] || _hold_restore
}
# From the first prompt under xtrace or functrace (extdebug) on, the hooks hide what they do.
_hold_quiet() {
  _hold_first() {
    { local - _hold_s=$?; set +xT; } 2>/dev/null
    _hold_ended
    [[ $- == *e* ]] || return "$_hold_s"
  }
  _hold_last() {
    { local - _hold_s=$?; set +xT; } 2>/dev/null
    _hold_restore
  }
  return "$_hold_s"
}
_hold_ended() {
  _hold_m[9]=
  builtin printf '%s' "${_hold_m[5]}$_hold_s${_hold_m[6]}" >&2
}
_hold_restore() {
  local - IFS=$' \t\n'
  set +ua
  [[ -z ${_hold_m[9]} ]] || _hold_ended
  _hold_place
  _hold_wrap
  _hold_m[8]=$PS1$PS0$PS2$BASHOPTS$PROMPT_COMMAND${PROMPT_COMMAND[999]}${PROMPT_COMMAND[1000]}
  # bash-preexec takes the first command after its own last hook for the user's: let it wait again, each time.
  if [[ -n ${__bp_imported-} && ${PROMPT_COMMAND[*]} == *__bp_interactive_mode* ]]; then
    _hold_m[8]=
    __bp_preexec_interactive_mode=on
  fi
  # A read-only PS1 that was not wrapped in time: the marks come before it.
  if [[ $PS1 != *"${_hold_t[3]}" && $PS1 != *"${_hold_t[9]}" ]]; then
    _hold_m[8]=
    builtin printf '%s' "$_hold_a$_hold_b" >&2
  fi
}
_hold_place() {
  local _hold_i _hold_u=() _hold_e='\eval "${PROMPT_COMMAND[_hold_m[9]*999]##*_hold_first?#}"'
  [[ ${PROMPT_COMMAND@a}${PROMPT_COMMAND[*]@a} != *r* ]] || return 0
  for _hold_i in "${PROMPT_COMMAND[@]}"; do
    [[ $_hold_i != _hold_last && $_hold_i != "$_hold_e" ]] || continue
    _hold_i=${_hold_i//'_hold_first;#'}
    _hold_i=${_hold_i//_hold_first[$'\n;']}
    _hold_i=${_hold_i//[$'\n;']_hold_last}
    _hold_i=${_hold_i//_hold_first/:}
    _hold_i=${_hold_i//_hold_last/:}
    [[ $_hold_i == : || -z $_hold_i ]] || _hold_u+=("$_hold_i")
  done
  if ((!_hold_m[7])) || [[ ${_hold_u[0]} == *$'\n'* ]]; then
    _hold_u[0]=_hold_first$'\n'${_hold_u[0]:+${_hold_u[0]}$'\n'}_hold_last
  elif ((${#_hold_u[@]})); then
    _hold_u=("_hold_first;#${_hold_u[0]}" "$_hold_e" "${_hold_u[@]:1}")
  else
    _hold_u=(_hold_first)
  fi
  if ((_hold_m[7])); then
    PROMPT_COMMAND=("${_hold_u[@]}")
    PROMPT_COMMAND[999]=_hold_last
  else
    PROMPT_COMMAND=${_hold_u[0]}
  fi
}
_hold_wrap() {
  local _hold_i _hold_p=("$PS1" "$PS0" "$PS2") _hold_w=(1 2 3 4)
  for _hold_i in "${_hold_t[@]}"; do
    _hold_p=("${_hold_p[@]//"$_hold_i"}")
  done
  if [[ $BASHOPTS != *promptvars* ]]; then
    _hold_w=(7 8 9 10)
  elif [[ ${PROMPT_COMMAND@a}${PROMPT_COMMAND[*]@a} == *r* ]]; then
    # Without our hook in it, to put the hook back would be an error at each prompt.
    _hold_w=(5 6 3 4)
  fi
  # A backslash at the end would take the first character of ours.
  [[ ${_hold_p[0]} != *\\ ]] || _hold_p[0]+=' '
  [[ ${PS1@a} == *r* ]] || PS1=${_hold_t[_hold_w[0]]}${_hold_p[0]}${_hold_t[_hold_w[2]]}
  [[ ${PS0@a} == *r* ]] || PS0=${_hold_p[1]}${_hold_t[_hold_w[1]]}
  [[ ${PS2@a} == *r* ]] || PS2=${_hold_p[2]}${_hold_t[_hold_w[3]]}
}
_hold_start() {
  { local - IFS=$' \t\n'; set +xuaT; } 2>/dev/null
  _hold_place
  _hold_wrap
  unset -f _hold_start
}
# If Ctrl-C ends the files below half-way, the first command brings the hooks.
PS0=${_hold_t[2]}
else
_hold_start() { unset -f _hold_start; }
fi
"""

# Not in a function: there, `declare` in the user's files would make local variables.
_BASH_LOGIN_FILES = r"""
[ ! -r /etc/profile ] || . /etc/profile
if [ -r ~/.bash_profile ]; then
  . ~/.bash_profile
elif [ -r ~/.bash_login ]; then
  . ~/.bash_login
elif [ -r ~/.profile ]; then
  . ~/.profile
fi
"""
_BASH_INTERACTIVE_FILES = r"""
[ ! -r ~/.bashrc ] || . ~/.bashrc
"""
_BASH_START = "_hold_start\n"

# In zsh a function named precmd runs before those of precmd_functions, and the list is read after it has run: so
# `_hold_first`, at the head of both, restores the hooks if one of the two was replaced. zsh marks a line without
# an end (PROMPT_SP) before any hook; so that D comes first, PROMPT_CR, which PROMPT_SP needs, is off while a
# command runs. Code with an effect that must outlast a hook (an option), or that runs at each prompt, is in
# functions that keep the user's options; the others begin with `emulate -L zsh`.
_ZSH_ENV = r"""
@ZDOTDIR@
setopt no_bang_hist
typeset -g _hold_a=$'%{\e]133;A;@NONCE@\a%}' _hold_b=$'%{\e]133;B;@NONCE@\a%}' _hold_p=$'%{\e]133;P;@NONCE@\a%}'
typeset -g _hold_c=$'\e]133;C;@NONCE@\a' _hold_d=$'\e]133;D;' _hold_e=$';@NONCE@\a' _hold_ps1= _hold_ps2=
typeset -g _hold_line= _hold_key=
typeset -gi _hold_due=1 _hold_cr=0 _hold_fd=2
_hold_first() {
  local _hold_s=$?
  if [[ -o xtrace && $_hold_fd == 2 ]]; then
    _hold_quiet
    _hold_first "$@"
    return $_hold_s
  fi
  if (( _hold_due )); then
    _hold_due=0
    builtin print -rnu $_hold_fd -- "$_hold_d$_hold_s$_hold_e"
    if (( _hold_cr )); then
      _hold_cr=0
      if [[ ! -o prompt_cr && -o prompt_sp ]]; then
        [[ "$COLUMNS:${TERM-}${PROMPT_EOL_MARK+ own}" == "$_hold_key" ]] || _hold_eol
        builtin print -rnu $_hold_fd -- "$_hold_line"
      fi
      setopt prompt_cr
    fi
    [[ ${1-} == precmd && "${precmd_functions[*]-}" == _hold_first*_hold_last &&
      "${preexec_functions[*]-}" == *_hold_exec ]] || _hold_place
  fi
  return $_hold_s
}
_hold_last() {
  _hold_due=1
  [[ -o prompt_percent && "${PS1-}${PS2-}" == "$_hold_ps1$_hold_ps2" ]] || _hold_prompt
}
_hold_exec() {
  _hold_due=1
  if [[ -o prompt_cr ]]; then
    _hold_cr=1
    unsetopt prompt_cr
  fi
  builtin print -rnu $_hold_fd -- "$_hold_c"
}
# As zsh does it: the mark, then blanks to the right margin, so that the cursor wraps unless it was in column 0.
_hold_eol() {
  emulate -L zsh
  setopt extended_glob
  local mark=${PROMPT_EOL_MARK-%B%S%#%s%b} bare
  bare=${mark//(%[BbSsUufk]|%[FK]\{[^\}]#\}|%\{*%\})/}
  local -i width=${(m)#${(%)bare}} margin=1
  [[ ${terminfo[xenl]-} != yes ]] || margin=0
  _hold_line="${(%)mark}${(l:COLUMNS - width - margin:)}"$'\r'"${(l:width:)}"$'\r'
  _hold_key=$COLUMNS:$TERM
}
# From the first prompt under xtrace on, the hooks have nowhere to trace to, and print to another descriptor.
_hold_quiet() {
  emulate -L zsh
  setopt no_xtrace no_aliases
  _hold_fd=3
  local each
  for each in _hold_first _hold_last _hold_exec; do
    functions[$each]="{ $functions[$each] } 3>&2 2>/dev/null"
  done
  return $_hold_s
}
_hold_place() {
  emulate -L zsh
  setopt no_aliases
  if (( ! $+functions[precmd] )); then
    functions[precmd]='_hold_first precmd'
  elif [[ $functions[precmd] != *(_hold_first|autoload\ -X)* ]]; then
    functions[precmd]='_hold_first precmd'$'\n'$functions[precmd]
  fi
  if [[ ${(t)precmd_functions-} != *readonly* ]]; then
    typeset -ga precmd_functions
    precmd_functions=(_hold_first ${precmd_functions:#_hold_(first|last)} _hold_last)
  fi
  if [[ ${(t)preexec_functions-} != *readonly* ]]; then
    typeset -ga preexec_functions
    preexec_functions=(${preexec_functions:#_hold_exec} _hold_exec)
  fi
}
_hold_prompt() {
  local percent=0
  [[ ! -o prompt_percent ]] || percent=1
  emulate -L zsh
  setopt extended_glob
  [[ ${functions[zsh-newuser-install]-} != *_hold_due* ]] || unfunction zsh-newuser-install
  local bare=${${PS1//$_hold_a}//$_hold_b}
  # A lone % at the end would take the first character of ours.
  [[ $bare != (|*[^%])%(%%)# ]] || bare+=' '
  if [[ $percent == 1 && ( ${(t)PS1} != *readonly* || $PS1 == $_hold_ps1 ) ]]; then
    if [[ ${(t)PS1} != *readonly* ]]; then
      # The nonce stands in it: it does not go into the environment of programs.
      [[ ${(t)PS1} != *export* ]] || typeset -g +x PS1
      PS1=$_hold_a$bare$_hold_b
    fi
    if [[ ${(t)PS2} != *readonly* ]]; then
      [[ ${(t)PS2} != *export* ]] || typeset -g +x PS2
      PS2=${PS2//$_hold_p}$_hold_p
    fi
    _hold_ps1=$PS1 _hold_ps2=$PS2
  else
    # Nothing can be put around it: the marks come before it.
    [[ ${(t)PS1} == *readonly* ]] || PS1=$bare
    [[ ${(t)PS2} == *readonly* ]] || PS2=${PS2//$_hold_p}
    _hold_ps1=
    builtin print -rnu $_hold_fd -- "${${_hold_a#%\{}%\%\}}${${_hold_b#%\{}%\%\}}"
  fi
}
# Run by zsh right before the first prompt, even if .zshrc has removed the hooks.
_hold_late() {
  if [[ -z $_hold_ps1 ]]; then
    _hold_first
    _hold_last
  fi
  unfunction _hold_late
}
# zsh offers a user without any file to make some, and would block until a key is typed.
zsh-newuser-install() { : _hold_due }
[[ ! -r ${ZDOTDIR-$HOME}/.zshenv ]] || . "${ZDOTDIR-$HOME}/.zshenv"
_hold_place
! zmodload zsh/sched 2>/dev/null || sched +0 _hold_late
"""
