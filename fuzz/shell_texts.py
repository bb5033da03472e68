"""Random command texts of bash and dash, from a grammar of what evaluates or re-reads text; pure.

Loops end by themselves and no function calls another one, so that a text ends however it is read.
"""

from __future__ import annotations

import random
import re
from typing import Final

#: `%NAME%` stands for one of the lines of NAME. A line that stands twice is chosen twice as often. Variables in
#: capitals hold texts that run the canary (`fuzz.shells`).
GRAMMAR: Final = {
    "list": r"""
%command%
%command%
%command%
%command%
%command%%separator%%command%
%command%%separator%%command%
%command%%separator%%command%%separator%%command%
""",
    "separator": "\n".join(
        ["; ", "; ", "; ", "; ", "; ", " && ", " || ", " | ", " & ", "; ! ", "%newline%", "%newline%"]
    ),
    "command": r"""
%simple%
%simple%
%simple%
%assignment%
%assignment%
%assignment%
%compound%
%evaluating%
%evaluating%
""",
    "evil": "D E F N V M C S X i j L K P Q O 1 2 @ * _".replace(" ", "\n"),
    "fresh": "x y a n m".replace(" ", "\n"),
    "counter": "i j x n".replace(" ", "\n"),
    "special": (
        "PATH IFS PS4 PS1 PS0 BASH_ENV ENV PROMPT_COMMAND MAILPATH MAIL RANDOM SECONDS LINENO OPTIND HISTCMD "
        "BASH_ARGV0 BASHPID FUNCNEST TMOUT REPLY _ UID OLDPWD PWD OPTARG BASH_COMPAT SHELLOPTS HISTFILE COLUMNS "
        "BASH_XTRACEFD PIPESTATUS"
    ).replace(" ", "\n"),
    "evil_name": "D E F N V M C S X L K P".replace(" ", "\n"),
    "name": "%evil_name%\n%fresh%\n%fresh%\n%counter%\n%special%",
    "digit": "0\n1\n2\n3\n7\n08\n10",
    "number": "%digit%\n%digit%\n$?\n$!\n${#x}\n$((1))\n-1\n$#",
    "text": r"""
'a[$(canary)]'
a[$D(canary)]
"a[$D(canary)]"
a[\$\(canary\)]
$'a[\x24(canary)]'
canary
'x[`canary`]'
$'\x{63}anary'
$'\x63anary'
$'\143anary'
$'\u0063anary'
$'c\anary'
$"canary"
c''anary
c\anary
"canary"
'$(canary)'
$S
"$S"
'([$(canary)]=1)'
'($(canary))'
~+
~canary
{canary,a}
*
a*
[a-c]*
c?nary
$C
${C}
"$C"
!
-v
-n
--
'PATH=.'
a=b
$X
"$X"
x
i
1
0
-1
a[0]
a[i]
a[E]
E
%1
''
@(canary)
""",
    "parameter": r"""
${!N}
${!E}
${E@P}
${S@P}
${S@E}
${E@Q}
${E:i}
${E:0:i}
${E:1}
${E: -1:E}
${#E}
${a[E]}
${a[$i]}
${a[i]}
${a[@]}
${!a[@]}
${a[0]}
${!E@}
${!P*}
${x:=$E}
${i:=1}
${PATH:=.}
${x:-$(canary)}
${x:-'$(canary)'}
"${x:-$(:)}"
${x/E/$E}
${E^^}
${E%%[*}
${#}
${@:i}
${@:1}
${*:2:E}
${a[@]:i}
${#a[i]}
${!1}
${x[`:`]}
${i}
${E[i]}
${a[x=1]}
${x:i?1:2}
${x:(i)}
${x:$i}
${x:${E}}
${x:%sum%}
${x[%sum%]}
${x@A}
${a[@]@P}
${!x-}
${x:\%newline%i}
${x[\%newline%i]}
${S@\%newline%P}
${ :; }
${| :; }
${!D}
${!#}
${!2}
${-:i}
${x-${!N}}
${i-}
${i+1}
${x:-$((%sum%))}
${x:-%word%}
""",
    "word": r"""
%text%
%text%
%parameter%
%digit%
%digit%
$?
b
'b c'
"b"
%s
$%evil%
"$%evil%"
"$%evil%"
"%parameter%"
$%fresh%
"$%fresh%"
$((%sum%))
$[%sum%]
$(%list%)
"$(%list%)"
`%command%`
<(%command%)
%word%%word%
%name%
%number%
""",
    "words": "%word%\n%word%\n%word% %word%\n%word% %word% %word%\n%word% %word% %word% %word%\n''",
    "sum": r"""
%digit%
%digit%
%name%
%counter%=%digit%
%counter%=%digit%
%name%=%digit%
%counter%++
--%counter%
%counter%+=1
%counter%=1/0
%counter%=
%counter%=$!
%counter%=$x
%sum% %operator% %sum%
%sum%,%sum%
(%sum%)
$%counter%
$E
${i}
a[i]
a[0]
E
$?
${#E}
$1
16#ff
a$i
$((i))
%word%
""",
    "operator": "+ - * / % < == && || , ** << | = += ?1:".replace(" ", "\n"),
    "assignment": r"""
%name%=%word%
%name%=%word%
%counter%=%digit%
%counter%=%digit%
%counter%=%number%
%name%+=%word%
%name%[%sum%]=%word%
%name%=(%words%)
%name%=([%sum%]=%word% %words%)
%name%=%word% %simple%
{%name%}>o1 %simple%
{a[%sum%]}>o1 %simple%
""",
    "comparison": "-eq\n-lt\n==\n=~\n<\n-gt\n=\n!=\n-a\n-o",
    "unary": "-v\n-n\n!\n-z\n-R\n-o\n! -v",
    "evaluating": r"""
((%sum%))
((%sum%))
((%sum%))
: $((%sum%))
let %sum%
let -- %word% %word%
[[ %word% %comparison% %word% ]]
[[ %sum% -eq %sum% ]]
[[ %unary% %word% ]]
[[ %unary% %word% && %word% %comparison% %word% ]]
[ %words% ]
test %words%
[ %word% %comparison% %word% ]
[ %unary% %word% ]
[ %digit% %comparison% %word% %text% ]
[ %unary% %word% %comparison% "$%evil%" %text% ]
[ %word% %comparison% %word% %comparison% %word% %comparison% %word% ]
for ((%sum%;%sum%;%sum%)); do %list%; break; done
for ((%sum%;;%sum%)); do %list%; break; done
for ((i=0; i<2; i++)); do %list%; ((i)) && break; done
echo %parameter%
unset %word%
unset -v %word%
unset -n %word%
printf -v %word% %words%
printf -v%name% %words%
printf -- %words%
printf %words%
read %words%
read -r %word%
read -a %word%
read -ra%name%
read -p %word% %word%
wait %words%
wait -n -p %word%
mapfile %words%
mapfile -t %word%
mapfile -C %word% -c1 x
getopts %words%
""",
    "declaring": "declare\ntypeset\nlocal\nexport\nreadonly\ndeclare\n\\declare\nbuiltin declare\ncommand export",
    "attribute": "-i\n-n\n-a\n-A\n-x\n-r\n-g\n-u\n-f\n-p\n-ai\n+i\n--\n''",
    "declared": "%name%=%word%\n%name%=%digit%\n%name%\na[%sum%]=%word%\n%word%",
    "signal": "EXIT\nDEBUG\nERR\n0\nRETURN\nUSR1\n%word%",
    "stream": "/dev/stdin\n//dev/stdin\n/dev/fd/0\n/proc/self/fd/0\n/./dev//stdin\n/dev/../dev/stdin",
    "wrapper": (
        "env\nnice\nxargs\ntimeout 1\nsetarch\nsetarch -R\nfind . -exec\nbash -c\nsh -c\nbash\ndash -c\nenv -i\n"
        "xargs -I{} sh -c\ncommand\nbuiltin\nexec\ncommand -p\nexec -a x\ncommand --\ntime\ntime -p\nenv x=$E"
    ),
    "option": "--\n-\n-x\n-k\n-o keyword\n-u\n-o posix\n-H\n-a\n+x\n-e\n''",
    "shell_option": (
        "extglob\nlastpipe\nexpand_aliases\nnullglob\nlocalvar_inherit\ncompat31\nassoc_expand_once\nfailglob"
    ),
    "builtin": (
        "hash -p\nenable -f\nenable\ncomplete -C\ncompgen -C\ncompgen -W\nbind -x\njobs -x\nfc -s\nhistory -s\n"
        "type\nhash\ncaller\nulimit -c\nshift\nreturn\numask\ndirs\nalias\nalias echo=canary;\nexit\nbreak\nhelp"
    ),
    "simple": r"""
echo %words%
echo %words%
echo %words%
: %words%
: %words%
: %words%
%word% %words%
%declaring% %declared%
%declaring% %attribute% %declared% %declared%
%declaring% %attribute% %declared%
%wrapper% %simple%
%wrapper% %words%
eval %words%
eval '%unquoted%'
eval "%unquoted%"
trap '%unquoted%' %signal%
trap %word% %signal%
. %stream%
source %stream% <<< canary
set %option% %words%
shopt -s %shell_option%
%builtin% %words%
cat %word%
f
f $E
wait $!
%simple% %redirection%
""",
    "unquoted": "%simple%\n%assignment%\n%evaluating%\n%list%",
    "redirection": r"""
<<< %word%
< /dev/null
> o1
2> o2
{%name%}> o1
{a[%sum%]}> o1
>&2
<<E%newline%%word% %parameter%%newline%E%newline%
<<'E'%newline%%word%%newline%E%newline%
""",
    "compound": r"""
{ %list%; }
( %list% )
if %command%; then %list%; else %list%; fi
if %command%; then %list%; fi
while %command%; do %list%; break; done
until %command%; do %list%; break; done
for %name% in %words%; do %list%; done
for %counter% in 1 2; do %list%; done
for %counter% in {1..2}; do %list%; done
for %counter% in 1 $x; do %list%; done
for %counter% in *; do %list%; done
for %counter% in {1..E}; do %list%; done
for %name%; do %list%; done
select %name% in %words%; do %list%; break; done
case %word% in *) %list%;; esac
case %word% in [a-z]*) %list%;; $E) %list%;; esac
%function%
%function%
coproc { %list%; }
coproc %name% { %list%; }
! %command%
time %command%
{ %list%; } %redirection%
""",
    "function": r"""
f() { %body%; }; f
f() { local %counter%; %body%; }; f
f() { %body%; }; %counter%=5; f; ((%counter%))
f() { %body%; }; %counter%=5; f $E; echo ${x:%counter%}
function f { %body%; }; f
echo() { %body%; }; echo
f() ( %body% ); f
""",
    "body": "%list%\nlocal %declared%; %list%\n%counter%=$E\nread %counter%\n%assignment%",
    "noise": "' \" \\ $ ` ( ) (( )) [ ] { } ; & | <<< < # ! = @ : %newline%".replace(" ", "\n"),
}
_PLACE: Final = re.compile(r"%([a-z_]+)%")
#: Below it, only the shortest line of each choice is taken, so that a text ends.
_DEPTH: Final = 9


class TextMaker:
    """Makes texts; the same generator makes the same ones."""

    def __init__(self, generator: random.Random) -> None:
        self._random = generator
        self._choices = {name: text.strip("\n").split("\n") for name, text in GRAMMAR.items()}
        self._choices["newline"] = ["\n"]
        self._ends = {
            name: min(lines, key=lambda line: ("%" in line, len(line))) for name, lines in self._choices.items()
        }
        self._ends |= {"command": ":", "list": ":", "compound": ":", "function": ":"}

    def text(self) -> str:
        # Evaluations alone: a short text is allowed more often than a long one.
        begin = self._random.choice(("list", "list", "evaluating", "assignment"))
        lines = [self._made(begin, 0) for _ in range(self._random.choice((1, 1, 1, 2, 3)))]
        made = "\n".join(lines)
        if self._random.random() < 0.1:
            for _ in range(self._random.randint(1, 2)):
                at = self._random.randrange(len(made) + 1)
                made = made[:at] + self._made("noise", 0) + made[at + self._random.randint(0, 1) :]
        return made

    def _made(self, name: str, depth: int) -> str:
        chosen = self._random.choice(self._choices[name]) if depth < _DEPTH else self._ends[name]
        made = _PLACE.sub(lambda location: self._made(location[1], depth + 1), chosen)
        if name == "body":
            made = re.sub(r"\bf\b", ":", made)
        return made.replace("'", "") if name == "unquoted" else made
