"""Directories: of the shell, of one command, with any name, and gone. Pure data."""

from __future__ import annotations

from tests.process.gauntlet.case import ALIVE, ALL, SH, Case, Step, case, like

DIRECTORIES: tuple[Case, ...] = (
    case(
        "a directory for one command",
        Step("mkdir d"),
        Step("pwd; /bin/pwd", b"@DIR@/d\n@DIR@/d\n", cwd="@DIR@/d"),
        Step("pwd", b"@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "cd in another directory",
        Step("mkdir -p d/e"),
        Step("cd e; pwd", b"@DIR@/d/e\n", cwd="@DIR@/d"),
        Step("pwd", b"@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "a relative directory",
        Step("mkdir -p d/e; cd d"),
        Step("pwd", b"@DIR@/d/e\n", cwd="e"),
        Step("pwd", b"@DIR@/d\n", at="@DIR@/d"),
        on=ALL,
    ),
    case(
        "a directory with a name like an option",
        Step("mkdir -- -d -"),
        Step("pwd", b"@DIR@/-d\n", cwd="-d"),
        Step("pwd", b"@DIR@\n"),
        on=ALL,
    ),
    case(
        "a directory that is not there",
        Step("x=1"),
        Step("echo no; x=2", b"", like("[^\n]*/no/such/place[^\n]*\n"), 1, cwd="/no/such/place"),
        Step("echo $x; pwd", b"1\n@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "a file as a directory",
        Step("touch f"),
        Step("echo no", b"", like("[^\n]*@DIR@/f[^\n]*\n"), 1, cwd="@DIR@/f"),
        ALIVE,
        on=ALL,
    ),
    case(
        "OLDPWD is not touched",
        Step("cd /; cd @DIR@"),
        Step("true", cwd="/usr"),
        Step("echo $OLDPWD", b"/\n"),
        on=ALL,
    ),
    case(
        "names with everything in them",
        Step(
            "for d in 'a b' \"it's\" '$x' '%s' 'a\\b' '*' '\"'; do mkdir \"$d\"; cd \"$d\"; pwd; cd ..; done",
            b"@DIR@/a b\n@DIR@/it's\n@DIR@/$x\n@DIR@/%s\n@DIR@/a\\b\n@DIR@/*\n@DIR@/\"\n",
        ),
        Step('cd "it\'s"', at="@DIR@/it's"),
        Step("pwd", b"@DIR@/a\\b\n", cwd="@DIR@/a\\b", at="@DIR@/it's"),
        Step("cd ../'$x'", at="@DIR@/$x"),
        Step("pwd", b'@DIR@/"\n', cwd='@DIR@/"', at="@DIR@/$x"),
        Step("cd ../'%s'", at="@DIR@/%s"),
        Step("cd ../'a\\b'", at="@DIR@/a\\b"),
        on=SH,
    ),
    case(
        "a name with a newline inside",
        Step("mkdir 'a\nb'; cd 'a\nb'", at="@DIR@/a\nb"),
        Step("pwd", b"@DIR@/a\nb\n", at="@DIR@/a\nb"),
        Step("cd ..; pwd", b"@DIR@\n", at="@DIR@"),
        Step("pwd", b"@DIR@/a\nb\n", cwd="@DIR@/a\nb", at="@DIR@"),
        on=ALL,
    ),
    case(
        "a name with a newline at its end",
        Step("mkdir 'd\n\n'; cd 'd\n\n'", at="@DIR@/d\n\n"),
        Step("pwd", b"@DIR@/d\n\n\n", at="@DIR@/d\n\n"),
        Step("pwd", b"/\n", cwd="/", at="@DIR@/d\n\n"),
        Step("pwd", b"@DIR@/d\n\n\n", at="@DIR@/d\n\n"),
        on=ALL,
    ),
    case(
        "a name that is not UTF-8",
        Step('n=$(printf \'x\\377\'); mkdir "$n"; cd "$n"', at="@DIR@/x\udcff"),
        Step("pwd", b"@DIR@/x\xff\n"),
        Step("pwd", b"/\n", cwd="/"),
        Step("pwd", b"@DIR@/x\xff\n"),
        on=SH,
    ),
    case(
        "files with newlines in their names",
        Step("touch 'a\nb' 'c\n'; for f in *; do printf '[%s]' \"$f\"; done", b"[a\nb][c\n]"),
        on=ALL,
    ),
    case(
        "a symbolic link",
        Step("mkdir d; ln -s d l; cd l; pwd; pwd -P", b"@DIR@/l\n@DIR@/d\n", at="@DIR@/l"),
        Step("pwd", b"/\n", cwd="/"),
        Step("pwd", b"@DIR@/l\n"),
        Step("cd ..; pwd", b"@DIR@\n"),
        on=ALL,
    ),
    case(
        "a directory that was removed",
        Step("mkdir d; cd d; rmdir ../d"),
        Step("echo hi", b"hi\n"),
        Step("(exit 3)", code=3),
        Step("cd @DIR@; pwd", b"@DIR@\n", at="@DIR@"),
        on=ALL,
    ),
    case(
        "another directory while one's own is gone",
        Step("mkdir d; cd d; rmdir ../d"),
        Step("pwd", b"/\n", cwd="/"),
        Step("cd @DIR@", at="@DIR@"),
        ALIVE,
        on=ALL,
    ),
)
