"""Runs inside a child, between the server's spawn and the user's program, for what posix_spawn cannot do.

Started as `python -I -S launcher.py`; reads its orders from descriptor 3, reports a failure on descriptor 4 (which
closes when the program is executed), and executes the program. Standard library only, and little of it: each start
with a user switch or limits pays for every import. Confinement is in `confine/applying.py`.
"""

# `signal` adds enums, which take longer to import than everything else here.
import _signal  # type: ignore[import-not-found]
import marshal
import os
import sys

ORDERS_FD = 3
REPORT_FD = 4


def main() -> None:
    """Apply the orders in the required order: limits while still privileged, groups before the user."""
    with open(ORDERS_FD, "rb") as file:
        orders = marshal.load(file)
    os.set_inheritable(REPORT_FD, False)
    stage = "confinement"
    try:
        confined = orders["confinement"]
        if confined is not None:
            # First: the launcher itself counts for the limits of the cgroup.
            for path, needed in orders["cgroups"]:
                try:
                    with open(path + b"/cgroup.procs", "wb", buffering=0) as procs:
                        procs.write(b"0")
                except OSError:
                    if needed:
                        raise
            sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "confine"))
            import applying  # type: ignore[import-not-found]

            applying.join_new_keyring()
            if confined["network"]:
                applying.leave_network(confined["proxy"])
            if confined["no_execution"] is not None:
                uid, gid, _ = orders["account"] or (os.geteuid(), os.getegid(), None)
                applying.forbid_execution(**confined["no_execution"], owner=(uid, gid))
        stage = "limits"
        if orders["rlimits"] or orders["nice"] is not None:
            import resource

            for name, value in orders["rlimits"]:
                resource.setrlimit(getattr(resource, name), (value, value))
            if orders["nice"] is not None:
                os.setpriority(os.PRIO_PROCESS, 0, orders["nice"])
        if orders["account"] is not None:
            stage = "user"
            uid, gid, groups = orders["account"]
            if os.geteuid() == 0:
                if confined is not None and uid != 0:
                    # Before the switch: an unprivileged user cannot reduce it.
                    applying.empty_bounding_set()
                os.setgroups(groups)
                os.setresgid(gid, gid, gid)
                os.setresuid(uid, uid, uid)
        stage = "cwd"
        os.chdir(orders["cwd"])
        stage = "exec"
        # Python ignores these two signals, and an exec inherits that.
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        argv = orders["argv"]
        if confined is not None:
            stage = "confinement"
            if confined["mode"] == "bubblewrap":
                argv = [*argv, *applying.jail(confined, REPORT_FD)]
            else:
                applying.confine(confined)
            stage = "exec"
        os.execve(orders["path"], argv, orders["environment"])
    except (OSError, ValueError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else 22
        os.write(REPORT_FD, marshal.dumps((stage, number or 22, str(error))))
        sys.exit(127)


if __name__ == "__main__":
    main()
