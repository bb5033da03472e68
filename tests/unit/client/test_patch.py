"""Unified diffs: parsing, exact places, and errors that name a file and a hunk; random diffs of difflib."""

from __future__ import annotations

import difflib
import random

import pytest

from holdfast.client.files.patch import FileState, apply_patches, parse_patch
from holdfast.errors import EditConflict, InvalidParams


def patched(patch: str, strip: int | None = None, **before: str) -> dict[str, str | None]:
    states = {name: FileState(text.encode()) for name, text in before.items()}
    patches = parse_patch(patch, strip)
    for each in patches:
        for name in (each.old, each.new):
            if name is not None:
                states.setdefault(name, FileState(None))
    after = apply_patches(patches, states)
    return {name: None if state.content is None else state.content.decode() for name, state in after.items()}


def diff(old: str, new: str, context: int = 3) -> str:
    """A diff by difflib, with git's mark of a last line without newline."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "a/f", "b/f", n=context)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def test_random_diffs_apply_to_their_old_text() -> None:
    chance = random.Random(18)
    for _ in range(300):
        lines = [f"{chance.randrange(8)}\n" for _ in range(chance.randrange(30))]
        changed = [line for line in lines if chance.random() > 0.2]
        for _ in range(chance.randrange(4)):
            changed.insert(chance.randrange(len(changed) + 1), "new\n")
        old, new = "".join(lines), "".join(changed)
        if chance.random() < 0.3:
            old = old.removesuffix("\n")
        if chance.random() < 0.3:
            new = new.removesuffix("\n")
        if text := diff(old, new, chance.randrange(4)):
            assert patched(text, f=old) == {"f": new}


def test_a_wrong_line_number_is_corrected_if_there_is_one_place() -> None:
    old = "a\nb\nc\nd\n"
    assert patched("--- a/f\n+++ b/f\n@@ -90,2 +90,2 @@\n c\n-d\n+D\n", f=old) == {"f": "a\nb\nc\nD\n"}


def test_several_places_are_refused_unless_one_has_the_line_of_the_header() -> None:
    old = "x\ny\nx\ny\n"
    body = "\n-x\n+X\n"
    assert patched("--- a/f\n+++ b/f\n@@ -3 +3 @@" + body, f=old) == {"f": "x\ny\nX\ny\n"}
    with pytest.raises(EditConflict, match=r"f: hunk 1 \(line 2\): its old lines occur at lines 1, 3"):
        patched("--- a/f\n+++ b/f\n@@ -2 +2 @@" + body, f=old)


def test_a_conflict_names_the_file_the_hunk_and_the_difference() -> None:
    text = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+A\n@@ -3 +3 @@\n-c\n+C\n"
    with pytest.raises(EditConflict, match=r"f: hunk 2 \(line 3\).*expected 'c\\n', found 'other\\n'") as caught:
        patched(text, f="a\nb\nother\n")
    assert caught.value.details == {"path": "f", "hunk": 2}


def test_files_are_created_removed_renamed_and_changed_twice() -> None:
    text = (
        "From 1 Mon Sep 17 00:00:00 2001\nSubject: a patch\n\n"
        "diff --git a/new.sh b/new.sh\nnew file mode 100755\nindex 0..1\n--- /dev/null\n+++ b/new.sh\n"
        "@@ -0,0 +1 @@\n+echo\n"
        "diff --git a/gone b/gone\ndeleted file mode 100644\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        "diff --git a/was b/is\nsimilarity index 100%\nrename from was\nrename to is\n"
        'diff --git "a/\\303\\274" "b/\\303\\274"\n--- "a/\\303\\274"\n+++ "b/\\303\\274"\n@@ -1 +1 @@\n-1\n+2\n'
        'diff --git "a/\\303\\274" "b/\\303\\274"\n--- "a/\\303\\274"\n+++ "b/\\303\\274"\n@@ -1 +1 @@\n-2\n+3\n'
        "diff --git a/empty b/empty\nnew file mode 100644\nindex 0..1\n"
        "-- \n2.39\n"
    )
    after = patched(text, gone="x\n", was="kept\n", ü="1\n")
    assert after == {"new.sh": "echo\n", "gone": None, "was": None, "is": "kept\n", "ü": "3\n", "empty": ""}
    assert [each.mode for each in parse_patch(text)] == [0o755, None, None, None, None, 0o644]


def test_a_file_of_diff_new_file_is_created() -> None:
    assert patched("--- f\t1970-01-01\n+++ f\t2026-01-01\n@@ -0,0 +1 @@\n+x\n") == {"f": "x\n"}


def test_carriage_returns_belong_to_the_line() -> None:
    assert patched("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\r\n+b\r\n", f="a\r\nc\rd\n") == {"f": "b\r\nc\rd\n"}


def test_strip_removes_leading_directories() -> None:
    assert patched("--- x/y/f\n+++ x/y/f\n@@ -1 +1 @@\n-a\n+b\n", strip=2, f="a\n") == {"f": "b\n"}


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ("", "no file in it"),
        ("nothing here\n", "no file in it"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1: a hunk without a file"),
        ("--- a/f\n+++ b/f\n", "no hunk, no rename"),
        ("--- a/f\n+++ b/f\n@@ something @@\n", "f: hunk 1: its header"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\n+b\n", "f: hunk 1: it ends before the 2 old and 1 new lines"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n+c\n", "f: hunk 1: more lines than its header counts"),
        ("--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n-a\n-b\n+c\n", "f: hunk 1: other lines than"),
        ("--- a/../../etc/x\n+++ b/../../etc/x\n@@ -1 +1 @@\n-a\n+b\n", "outside of the directory"),
        ("--- /etc/x\n+++ /etc/x\n@@ -1 +1 @@\n-a\n+b\n", "outside of the directory"),
        ("diff --git a/l b/l\nnew file mode 120000\n", "only regular files"),
        ("diff --git a/l b/l\nGIT binary patch\n", "is not supported"),
        ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "both names"),
    ],
)
def test_a_malformed_patch_is_refused(patch: str, problem: str) -> None:
    with pytest.raises(InvalidParams, match=problem):
        parse_patch(patch)


def test_a_patch_against_the_wrong_existence_is_refused() -> None:
    with pytest.raises(EditConflict, match="f: the patch creates it, and it exists"):
        patched("--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", f="")
    with pytest.raises(EditConflict, match="f: the patch changes it, and it does not exist"):
        patched("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(EditConflict, match="f: the patch removes it, and leaves"):
        patched("--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", f="a\nb\n")
