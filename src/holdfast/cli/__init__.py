"""The command line, one module a verb. This file only names the verbs, so that `holdfast exec` loads no other."""

from __future__ import annotations

#: Every verb with its module below `verbs` and its line in `holdfast --help`.
VERBS = {
    "run": ("process.run", "Run a command, stream what it prints, exit with its code."),
    "ps": ("process.ps", "List processes."),
    "logs": ("process.logs", "Show what a process printed."),
    "wait": ("process.wait", "Wait for a process and exit with its code."),
    "kill": ("process.kill", "End processes and everything they started, or send a signal."),
    "attach": ("process.attach", "Stream a running process or show a terminal, and type into it."),
    "screen": ("terminal.screen", "Show what a person would see on a terminal."),
    "replay": ("terminal.replay", "Play the recording of a terminal or of a session, or save it."),
    "shell": ("terminal.shell", "Work in a shell whose state persists, by hand or command by command."),
    "cp": ("process.cp", "Copy files and directories to a sandbox or from one."),
    "serve": ("server.serve", "Run the server."),
    "status": ("server.status", "Tell how this machine's server is, or a sandbox's; exit 3 if none runs."),
    "stop": ("server.stop", "Stop this machine's server, or a sandbox's, with everything that runs in it."),
    "upgrade": ("server.upgrade", "Put this version's server in the place of the one that runs."),
    "exec": ("server.exec", "Send one JSON-RPC request to the server and print the reply."),
    "connect": ("server.connect", "Bridge stdin and stdout to the server's socket."),
    "call": ("inside.call", "Call a service that the host offers, from inside a sandbox."),
    "model_proxy": ("inside.model_proxy", "Serve models of the host to programs inside, over HTTP."),
    "egress": ("inside.egress", "Let confined processes reach some hosts, and no others."),
    "bridge": ("process.bridge", "Run an agent in a sandbox with a bridge to a model around it."),
    "service": ("service.service", "Run the session service, and make its agents."),
    "bundle": ("server.bundle", "Make the tree that is put into sandboxes without Python."),
    "audit": ("service.audit", "Show what the session service wrote down, and verify it."),
    "doctor": ("server.doctor", "Tell what this machine offers and what is missing."),
}

#: Verbs that need the standard library and msgspec alone, `model_proxy` and `egress` also h11: they run inside
#: sandboxes, where typer and rich are not.
PLAIN_VERBS = ("exec", "connect", "serve", "call", "model_proxy", "egress")
#: Verbs that `quick` does without typer and asyncio where the local server runs and the options are common.
QUICK_VERBS = ("run", "ps", "logs", "wait", "kill")
