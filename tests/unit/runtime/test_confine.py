"""The parts of a confinement: the filter, run by an interpreter of it; options of bwrap; rules of Landlock."""

from __future__ import annotations

import errno
import os
import struct
import time
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import CommandNotFound, Forbidden, InvalidParams, PermissionRefused
from holdfast.runtime.confine import bubblewrap, features, landlock, launch_plan
from holdfast.runtime.confine.paths import VisiblePaths, is_beneath, unreadable_for_others, visible_paths
from holdfast.runtime.confine.resource_groups import NEW_SECONDS, CgroupHierarchy, sweep
from holdfast.runtime.confine.rights import PathRight, confinement_for, was_denied
from holdfast.runtime.confine.seccomp import AF_INET, AF_UNIX, ARCHITECTURES, filter_program, refused_calls
from holdfast.runtime.process.environment import Account
from holdfast.types import Confinement, ExitStatus

ALLOWED = 0x7FFF0000
REFUSED = 0x00050000


def run(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """The kernel's decision: classic BPF, as far as the assembler uses it."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    instructions = list(struct.iter_unpack("=HBBI", program))
    accumulator = counter = 0
    while True:
        code, if_true, if_false, value = instructions[counter]
        counter += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x06:
                return int(value)
            case 0x15:
                counter += if_true if accumulator == value else if_false
            case 0x35:
                counter += if_true if accumulator >= value else if_false
            case 0x45:
                counter += if_true if accumulator & value else if_false
            case _:
                raise AssertionError(f"instruction {code:#x}")


# --- seccomp ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ARCHITECTURES)
class TestFilter:
    def ask(self, machine: str, name: str, *arguments: int, families: tuple[int, ...] = (AF_UNIX,)) -> int:
        audit, calls = ARCHITECTURES[machine]
        return run(filter_program(machine, families), audit, calls[name], *arguments)

    def test_every_call_of_the_list_is_refused(self, machine: str) -> None:
        assert {"mount", "keyctl", "bpf", "userfaultfd", "kexec_load", "init_module"} <= set(refused_calls(machine))
        for name in refused_calls(machine):
            assert self.ask(machine, name) == REFUSED | errno.EPERM, name

    def test_others_are_allowed(self, machine: str) -> None:
        audit, calls = ARCHITECTURES[machine]
        program = filter_program(machine, ())
        for number in set(range(600)) - set(calls.values()):
            assert run(program, audit, number) == ALLOWED, number

    def test_processes_are_made_and_namespaces_are_not(self, machine: str) -> None:
        assert self.ask(machine, "clone", 0x01200011) == ALLOWED  # as fork(3) does it
        assert self.ask(machine, "clone", 0x003D0F00) == ALLOWED  # a thread
        assert self.ask(machine, "clone", 0x10000011) == REFUSED | errno.EPERM
        assert self.ask(machine, "clone", 0xFFFFFFFF_00020011) == REFUSED | errno.EPERM
        assert self.ask(machine, "unshare", 0x40000000) == REFUSED | errno.EPERM
        assert self.ask(machine, "unshare", 0x00000400) == ALLOWED  # its own descriptors
        assert self.ask(machine, "clone3", 0) == REFUSED | errno.ENOSYS

    def test_sockets_of_the_families_that_were_given(self, machine: str) -> None:
        families = (AF_UNIX, AF_INET)
        assert [self.ask(machine, "socket", family, families=families) for family in families] == [ALLOWED] * 2
        assert self.ask(machine, "socket", 40, families=families) == REFUSED | errno.EPERM  # AF_VSOCK
        assert self.ask(machine, "socket", AF_UNIX, families=()) == REFUSED | errno.EPERM

    def test_terminals_are_not_typed_into_nor_others_traced(self, machine: str) -> None:
        assert self.ask(machine, "ioctl", 0, 0x5412) == REFUSED | errno.EPERM
        # The kernel reads 32 bits of it, and so does this interpreter.
        assert self.ask(machine, "ioctl", 0, 0x1_0000_5412) == REFUSED | errno.EPERM
        assert self.ask(machine, "ioctl", 0, 0x5413) == ALLOWED
        assert self.ask(machine, "ptrace", 0) == ALLOWED
        assert self.ask(machine, "ptrace", 16) == self.ask(machine, "ptrace", 0x4206) == REFUSED | errno.EPERM

    def test_limits_of_others_are_not_set(self, machine: str) -> None:
        assert self.ask(machine, "prlimit64", 0, 7) == ALLOWED
        assert self.ask(machine, "prlimit64", 4711, 0) == REFUSED | errno.EPERM

    def test_no_file_gets_a_set_id_bit(self, machine: str) -> None:
        calls = ARCHITECTURES[machine].calls
        modes = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1}
        modes |= {"mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2}
        oldest = {"chmod", "creat", "mkdir", "mknod", "open"}
        assert oldest & calls.keys() == (oldest if machine == "x86_64" else set())
        for name in modes.keys() & calls.keys():
            before = [0o6000] * modes[name]
            for mode in (0o4755, 0o2755, 0o6000, 0o104755):
                assert self.ask(machine, name, *before, mode) == REFUSED | errno.EPERM, (name, mode)
            for mode in (0, 0o1777, 0o100644):
                assert self.ask(machine, name, *before, mode) == ALLOWED, (name, mode)
        for name in {"open", "openat"} & calls.keys():
            before = [0o6000] * (1 if name == "open" else 2)
            for flags in (0x40, 0x41, 0x410000):  # O_CREAT, and O_TMPFILE
                assert self.ask(machine, name, *before, flags, 0o4755) == REFUSED | errno.EPERM, (name, flags)
                assert self.ask(machine, name, *before, flags, 0o755) == ALLOWED, (name, flags)
            # Without these flags the mode is no mode: whatever was in the register.
            assert self.ask(machine, name, *before, 0x10000, 0o4755) == ALLOWED
        assert self.ask(machine, "openat2", 0, 0, 0, 24) == REFUSED | errno.ENOSYS

    def test_another_architecture_is_refused_every_call(self, machine: str) -> None:
        program = filter_program(machine, (AF_UNIX,))
        assert run(program, 0x40000003, 1) == REFUSED | errno.EPERM  # i386
        if machine == "x86_64":
            assert run(program, ARCHITECTURES[machine].audit, 0x40000000 + 1) == REFUSED | errno.EPERM  # x32


# --- paths -----------------------------------------------------------------------------------------------------


def test_beneath() -> None:
    assert is_beneath("/a/b", "/a")
    assert is_beneath("/a", "/a")
    assert is_beneath("/a", "/")
    assert not is_beneath("/ab", "/a")


def test_the_longest_path_decides() -> None:
    visible = VisiblePaths(("/usr",), ("/spool/own", "/work"), ("/spool", "/work/kept"))
    assert visible.shows("/spool/own/file")
    assert not visible.shows("/spool/other")
    assert visible.shows("/work/file")
    assert not visible.shows("/work/kept/file")
    assert not visible.shows("/root")


def test_what_is_hidden_counts_only_where_it_could_be_seen(tmp_path: Path) -> None:
    for name in ("work/kept", "server"):
        (tmp_path / name).mkdir(parents=True)
    confinement = Confinement(
        "bubblewrap", writable=(f"{tmp_path}/work",), hidden=(f"{tmp_path}/work/kept", "/root")
    )
    visible = visible_paths(confinement, (f"{tmp_path}/server",))
    assert visible.writable == (f"{tmp_path}/work",)
    assert f"{tmp_path}/work/kept" in visible.hidden
    assert not {"/root", f"{tmp_path}/server"} & set(visible.hidden)
    with pytest.raises(InvalidParams, match="files of the server itself"):
        visible_paths(confinement, (f"{tmp_path}/work",))


def test_a_file_that_is_removed_meanwhile_is_passed_over(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).touch(0o600)
    found = unreadable_for_others(str(tmp_path))
    first = Path(next(found))
    for path in tmp_path.iterdir():
        if path != first:
            path.unlink()
    assert list(found) == []


def test_files_that_not_all_may_read(tmp_path: Path) -> None:
    (tmp_path / "open").write_text("")
    (tmp_path / "secret").write_text("")
    (tmp_path / "secret").chmod(0o640)
    (tmp_path / "closed").mkdir(0o700)
    (tmp_path / "below").mkdir(0o755)
    (tmp_path / "below/secret").write_text("")
    (tmp_path / "below/secret").chmod(0o600)
    (tmp_path / "link").symlink_to("secret")
    found = {os.path.relpath(path, tmp_path) for path in unreadable_for_others(str(tmp_path))}
    assert found == {"secret", "closed", "below/secret"}


# --- bubblewrap ------------------------------------------------------------------------------------------------


def jail(confinement: Confinement, visible: VisiblePaths, **changes: object) -> list[str]:
    given = {
        "environment": {"HOME": "/home/me"},
        "cwd": "/work",
        "as_root": True,
        "own_network": False,
        "directories": frozenset(visible.hidden),
        "proc": ("/proc/sys",),
        "opened": {},
        **changes,
    }
    return bubblewrap.options(confinement, visible, **given)  # type: ignore[arg-type]


def test_what_lies_above_is_mounted_first() -> None:
    visible = VisiblePaths(("/usr", "/work/read"), ("/tmp/mine", "/work"), ("/work/kept",))
    words = jail(Confinement("bubblewrap"), visible)
    order = [word for before, word in pairwise(words) if before.endswith(("bind", "fs", "proc"))]
    locations = ["/proc", "/proc/sys", "/tmp", "/tmp/mine", "/usr", "/work", "/work/kept", "/work/read"]
    assert [word for word in order if word in locations] == locations
    assert words[words.index("/work/read") - 1] == "--ro-bind"
    assert words[words.index("/work") - 1] == "--bind"


def test_the_root_is_read_only_and_scratch_has_a_size() -> None:
    words = jail(Confinement("bubblewrap", scratch_bytes=7), VisiblePaths((), ("/work",), ()))
    for location in ("/tmp", "/dev/shm", "/home/me"):
        assert words[words.index(location) - 3 : words.index(location)] == ["--size", "7", "--tmpfs"]
    remounted = [words[index + 1] for index, word in enumerate(words) if word == "--remount-ro"]
    assert remounted == ["/dev", "/"]


def test_a_root_that_was_given_to_be_written_stays_so() -> None:
    words = jail(Confinement("bubblewrap"), VisiblePaths((), ("/",), ()))
    assert [words[index + 1] for index, word in enumerate(words) if word == "--remount-ro"] == ["/dev"]


def test_namespaces_of_the_jail() -> None:
    nothing = VisiblePaths((), (), ())
    closed = Confinement("bubblewrap", network="none")
    assert "--unshare-net" in jail(closed, nothing)
    assert "--unshare-net" not in jail(closed, nothing, own_network=True)
    assert "--unshare-net" not in jail(Confinement("bubblewrap"), nothing)
    assert "--unshare-user" not in jail(closed, nothing)
    assert "--unshare-user" in jail(closed, nothing, as_root=False)
    assert {"--unshare-pid", "--unshare-ipc", "--unshare-uts", "--clearenv"} <= set(jail(closed, nothing))


def test_a_jail_of_another_user_is_left_open_to_that_user() -> None:
    """bwrap makes the directories above a private one private as well: the user would not get to its own."""
    words = jail(
        Confinement("bubblewrap"), VisiblePaths((), ("/srv/a/work",), ()), changes_user=True, written={"/x": 7}
    )
    for above in ("/srv", "/srv/a", "/home"):
        at = words.index(above)
        assert words[at - 3 : at] == ["--perms", "0755", "--dir"]
        assert at < words.index("/srv/a/work")
    home = words.index("/home/me")
    assert words[home - 5 : home - 3] == ["--perms", "1777"]
    assert words[words.index("/x") - 4 : words.index("/x")] == ["--perms", "0644", "--ro-bind-data", "7"]
    assert words.index("--cap-drop") < words.index("--cap-add")
    assert "--cap-add" not in jail(Confinement("bubblewrap"), VisiblePaths((), ("/srv/a/work",), ()))


def test_a_jail_of_another_user_sets_what_libc_reads_behind_the_change(tmp_path: Path) -> None:
    """Before it, a library that the user names would be loaded into a program that is root."""
    environment = {"LD_PRELOAD": "/mine.so", "GLIBC_TUNABLES": "x", "LC_ALL": "C", "SECRET": "s"}
    for uid in (54321, 0):
        composed = launch_plan.plan_launch(
            Confinement("bubblewrap", writable=(str(tmp_path),)),
            path="/bin/sh",
            argv=["sh"],
            environment=environment,
            cwd=str(tmp_path),
            as_root=True,
            own=(),
            account=Account(str(uid), uid, uid, (uid,), "/", "/bin/sh", listed=False),
        )
        set_by_bwrap = composed.orders["options"].split(b"\0")
        command = composed.orders["command"]
        if uid == 0:
            assert b"LD_PRELOAD" in set_by_bwrap
            assert command == ["/bin/sh"]
            continue
        assert b"SECRET" in set_by_bwrap
        assert not {b"LD_PRELOAD", b"GLIBC_TUNABLES", b"LC_ALL"} & set(set_by_bwrap)
        after = command[command.index("--") + 1 :]
        assert command[0].endswith("/setpriv")
        assert after == ["/usr/bin/env", "LD_PRELOAD=/mine.so", "GLIBC_TUNABLES=x", "LC_ALL=C", "/bin/sh"]


def test_a_user_database_that_is_hidden_has_its_own_user_alone() -> None:
    account = Account("agent", 7, 7, (7,), "/home/agent", "/bin/sh", listed=False)
    hidden = launch_plan._user_database(account, VisiblePaths(("/etc",), (), ("/etc/passwd",)))
    assert hidden["/etc/passwd"] == b"agent:x:7:7::/home/agent:/bin/sh\n"
    assert hidden["/etc/group"].startswith(b"agent:x:7:\n")
    assert b"root:" in hidden["/etc/group"]
    assert launch_plan._user_database(account, VisiblePaths(("/etc",), ("/etc/passwd",), ())).keys() == {
        "/etc/group"
    }


def test_composing_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(confinement: Confinement, path: str = "/bin/sh") -> launch_plan.LaunchPlan:
        return launch_plan.plan_launch(
            confinement, path=path, argv=["sh"], environment={}, cwd=str(tmp_path), as_root=True, own=()
        )

    own = Confinement("bubblewrap", writable=(str(tmp_path),))
    assert compose(own).argv == ["bwrap"]
    with pytest.raises(CommandNotFound):
        compose(own, "/root/program")
    with pytest.raises(InvalidParams, match="needs `seccomp`"):
        compose(Confinement("landlock", writable=(str(tmp_path),), network="none", seccomp=False))
    monkeypatch.setattr(launch_plan, "find_bwrap", lambda: None)
    with pytest.raises(PermissionRefused, match="not installed"):
        compose(own)


def test_variables_of_a_confined_process() -> None:
    proxied = launch_plan.environment_for(Confinement(network="proxy", proxy="/x"), {"A": "b"})
    assert proxied["A"] == "b"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    assert {proxied[name] for name in names} == {"http://127.0.0.1:3128"}
    jailed = Confinement("bubblewrap", writable=("/work",))
    assert launch_plan.environment_for(jailed, {"TMPDIR": "/elsewhere"}) == {}
    assert launch_plan.environment_for(jailed, {"TMPDIR": "/work/tmp"}) == {"TMPDIR": "/work/tmp"}
    assert launch_plan.environment_for(Confinement("landlock", writable=("/work",)), {}) == {"TMPDIR": "/work"}


# --- Landlock --------------------------------------------------------------------------------------------------


def test_a_directory_with_something_hidden_is_given_entry_by_entry(tmp_path: Path) -> None:
    for name in ("open", "kept", "some"):
        (tmp_path / name).mkdir()
    (tmp_path / "some/secret").write_text("")
    (tmp_path / "some/plain").write_text("")
    hidden = (f"{tmp_path}/kept", f"{tmp_path}/some/secret")
    rules = dict(landlock.rules(VisiblePaths((str(tmp_path),), (), hidden), hide_processes=True))
    below = {
        os.path.relpath(path, tmp_path): given for path, given in rules.items() if path.startswith(str(tmp_path))
    }
    assert below == {".": "l", "open": "rx", "some": "l", "some/plain": "rx"}
    assert "/proc" not in rules
    assert "/dev/pts" not in rules


# --- cgroups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("controller", "version", "written"),
    [
        ("memory", 2, {"memory.max": "1000000", "memory.swap.max": "0", "memory.oom.group": "1"}),
        ("memory", 1, {"memory.limit_in_bytes": "1000000", "memory.memsw.limit_in_bytes": "1000000"}),
        ("pids", 2, {"pids.max": "7"}),
        ("pids", 1, {"pids.max": "7"}),
        ("cpu", 2, {"cpu.max": "50000 100000"}),
        ("cpu", 1, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
    ],
)
def test_limits_in_the_words_of_each_version(
    tmp_path: Path, controller: str, version: int, written: dict[str, str]
) -> None:
    for name in written:
        (tmp_path / name).touch()
    limits = Confinement(total_memory_bytes=1_000_000, total_processes=7, cpu_cores=0.5)
    CgroupHierarchy(controller, "", version).limit(str(tmp_path), limits)  # type: ignore[arg-type]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == written


# --- rights ----------------------------------------------------------------------------------------------------


class TestRights:
    def test_no_restriction_needs_no_confinement(self) -> None:
        assert confinement_for(None, network=True) is None

    def test_the_network_alone(self) -> None:
        expected = Confinement(mode="none", network="none", unix_sockets=False)
        assert confinement_for(None, network=False) == expected

    def test_read_only_shows_the_tmp_of_the_machine(self) -> None:
        found = confinement_for([PathRight("/", "read")], network=False)
        expected = Confinement(mode="bubblewrap", readable=("/", "/tmp"), network="none", unix_sockets=False)
        assert found == expected

    def test_a_path_below_another_has_other_rights(self, tmp_path: Path) -> None:
        work, kept, secret = tmp_path / "work", tmp_path / "work/.git", tmp_path / "work/.env"
        kept.mkdir(parents=True)
        secret.touch()
        rights = [
            PathRight("/", "read"),
            PathRight(str(secret), "deny"),
            PathRight(str(kept), "read"),
            PathRight(str(work), "write"),
            PathRight(str(work / "redundant"), "write"),
        ]
        found = confinement_for(rights, network=True)
        assert found is not None
        assert (found.writable, found.hidden, found.network) == ((str(work),), (str(secret),), "host")
        assert str(kept) in found.readable

    def test_of_two_rights_on_one_path_the_stronger_counts(self, tmp_path: Path) -> None:
        path = str(tmp_path)
        rights = [PathRight("/", "read"), PathRight(path, "read"), PathRight(path, "write")]
        found = confinement_for(rights, network=True)
        assert found is not None
        assert found.writable == (path,)
        found = confinement_for([*rights, PathRight(path, "deny")], network=True)
        assert found is not None
        assert (found.writable, found.hidden) == ((), (path,))

    def test_what_is_missing_is_left_out_where_that_gives_no_more(self, tmp_path: Path) -> None:
        path, missing = str(tmp_path), str(tmp_path / "none")
        base = [PathRight("/", "read"), PathRight(path, "write")]
        plain = confinement_for(base, network=True)
        for right in (PathRight(missing, "read", optional=True), PathRight(missing, "deny", optional=True)):
            assert confinement_for([*base, right], network=True) == plain
        assert confinement_for([base[0], PathRight(missing, "write")], network=True) == confinement_for(
            base[:1], network=True
        )
        for right in (PathRight(missing, "read"), PathRight(missing, "deny")):
            with pytest.raises(Forbidden, match="cannot be restricted"):
                confinement_for([*base, right], network=True)

    @pytest.mark.parametrize("rights", [[], [PathRight("/tmp", "write")], [PathRight("/", "deny")]])
    def test_a_root_that_cannot_be_read_is_refused(self, rights: list[PathRight]) -> None:
        with pytest.raises(Forbidden):
            confinement_for(rights, network=True)

    def test_a_symbolic_link_is_refused_with_its_real_path(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/etc")
        with pytest.raises(Forbidden, match="name /etc"):
            confinement_for([PathRight("/", "read"), PathRight(str(tmp_path / "link"), "write")], network=True)


# --- denials ---------------------------------------------------------------------------------------------------


class TestDenials:
    JAIL = Confinement(mode="bubblewrap", network="none")

    @pytest.mark.parametrize(
        "text", [b"touch: Read-only file system\n", b"EPERM: operation not permitted", b"x: Permission denied"]
    )
    def test_a_refusal_in_the_output_of_one_that_failed(self, text: bytes) -> None:
        assert was_denied(self.JAIL, ExitStatus(1), [b"", text])
        assert not was_denied(self.JAIL, ExitStatus(0), [text])
        assert not was_denied(self.JAIL, ExitStatus(143, "SIGTERM"), [text])
        assert not was_denied(None, ExitStatus(1), [text])

    def test_a_network_that_is_not_there(self) -> None:
        text = b"curl: (6) Could not resolve host: example.com"
        assert was_denied(self.JAIL, ExitStatus(6), [text])
        assert not was_denied(Confinement(mode="bubblewrap", network="host"), ExitStatus(6), [text])

    def test_a_failure_without_a_refusal(self) -> None:
        assert not was_denied(self.JAIL, ExitStatus(2), [b"No such file or directory"])


def test_no_unix_sockets_need_the_filter() -> None:
    with pytest.raises(InvalidParams, match="seccomp"):
        launch_plan.plan_launch(
            Confinement(unix_sockets=False, seccomp=False),
            path="/bin/sh",
            argv=["sh"],
            environment={},
            cwd="/",
            as_root=True,
            own=(),
        )


def test_a_jail_that_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["bwrap: Can't find source path /etc/removed", ""]
    monkeypatch.setattr(features, "_try_jail_once", lambda user: answers.pop(0))
    assert features._try_jail() == ""
    assert answers == []
    monkeypatch.setattr(features, "_try_jail_once", lambda user: "bwrap: No permissions")
    assert features._try_jail() == "bwrap: No permissions"


def test_a_sweep_leaves_new_cgroups_to_servers_of_other_pid_namespaces(tmp_path: Path) -> None:
    """Their pids do not exist here, and a process may be about to join the cgroup that was made for it."""
    parent = tmp_path / f"holdfast-{2**22 + 1}-kept"  # more than the largest pid
    (parent / "1").mkdir(parents=True)
    (parent / "2").mkdir()
    before = time.time() - NEW_SECONDS
    os.utime(parent / "1", (before, before))
    sweep(str(tmp_path))
    assert [path.name for path in parent.iterdir()] == ["2"]
    os.utime(parent / "2", (before, before))
    sweep(str(tmp_path))
    # A removal changes the time of the parent on this file system, which is not that of cgroups.
    os.utime(parent, (before, before))
    sweep(str(tmp_path))
    assert not parent.exists()
