"""The command line, one module a verb. This file only lists the verbs, so that `holdfast exec` loads no other."""

from __future__ import annotations


class Verb:
    """A verb: its module below `verbs`, its line in `holdfast --help`, and whether `process.quick` can run it.

    `quick` runs a verb without typer and asyncio if the local server runs and the options are common.
    """

    __slots__ = ("help", "module", "quick")

    def __init__(self, module: str, help: str, *, quick: bool = False) -> None:
        self.module = module
        self.help = help
        self.quick = quick

    @property
    def plain(self) -> bool:
        """Whether the verb runs inside sandboxes, and needs only the standard library, msgspec and h11."""
        return self.module.startswith("inside.")


VERBS = {
    "run": Verb("process.run", "Run a command, stream its output, exit with its code.", quick=True),
    "ps": Verb("process.ps", "List processes.", quick=True),
    "logs": Verb("process.logs", "Print the output of a process.", quick=True),
    "wait": Verb("process.wait", "Wait for a process and exit with its code.", quick=True),
    "kill": Verb("process.kill", "End processes and everything they started, or send a signal.", quick=True),
    "inspect": Verb("process.inspect", "Print the full status of processes, terminals and shells as JSON."),
    "top": Verb("process.top", "Show what runs under processes and shells, with CPU and memory."),
    "events": Verb("process.events", "Print starts and ends of processes, terminals and shells as they happen."),
    "rm": Verb("process.rm", "Drop ended processes and their output."),
    "attach": Verb("process.attach", "Stream a running process or show a terminal, and type into it."),
    "screen": Verb("terminal.screen", "Print the current screen of a terminal."),
    "replay": Verb("terminal.replay", "Play the recording of a terminal or of a session, or save it."),
    "shell": Verb("terminal.shell", "Work in a shell with persistent state, by hand or command by command."),
    "cp": Verb("sandbox.cp", "Copy files and directories to a sandbox or from one."),
    "sandbox": Verb("fleet.sandbox", "Make, list, fork, pause and remove sandboxes."),
    "mcp": Verb("integrations.mcp", "Serve a sandbox to agents over the Model Context Protocol."),
    "forward": Verb("sandbox.forward", "Make ports of a sandbox reachable on this machine."),
    "serve": Verb("inside.serve", "Run the server."),
    "status": Verb(
        "server.status", "Show the status of this machine's server, or a sandbox's; exit 3 if none runs."
    ),
    "stop": Verb("server.stop", "Stop this machine's server, or a sandbox's, with everything that runs in it."),
    "upgrade": Verb("server.upgrade", "Replace the running server by this version."),
    "exec": Verb("inside.exec", "Send one JSON-RPC request to the server and print the reply."),
    "connect": Verb("inside.connect", "Connect stdin and stdout to the server's socket."),
    "call": Verb("inside.call", "Call a service that the host offers, from inside a sandbox."),
    "model_proxy": Verb("inside.model_proxy", "Serve models of the host to programs inside, over HTTP."),
    "egress": Verb("inside.egress", "Let confined processes reach some hosts, and no others."),
    "bridge": Verb("sandbox.bridge", "Run an agent in a sandbox with a bridge to a model."),
    "service": Verb("service.service", "Run the session service, and manage its agents."),
    "session": Verb("service.session", "Work with the sessions of a session service, as an operator or agent."),
    "e2b": Verb("integrations.e2b", "Serve the E2B SDKs, with sandboxes of any engine."),
    "bundle": Verb("server.bundle", "Make the tree that is installed in sandboxes without Python."),
    "audit": Verb("service.audit", "Show the audit log of the session service, and verify it."),
    "completion": Verb("server.completion", "Print the completion script for bash, zsh or fish.", quick=True),
    "doctor": Verb("server.doctor", "Show what this machine offers and what is missing."),
}
