"""A session sees nothing of the service's environment but what a login sets, what the rules let through, and what
it was given; nor do the programs that run beside it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.service.running_service import RunningService, ServiceHome, new_home, running_service

VALUE = "S3cr3t-of-the-service"
#: Of the service's environment: what an attack found in a session.
NAMES = (
    *("PGPASSWORD", "DB_PASSWORD", "AWS_CREDENTIALS", "GITHUB_PAT", "SMTP_PASS", "STRIPE_KEY", "MY_TOKEN"),
    *("HOLDFAST_TOKEN", "HOLDFAST_SERVICE_SUMMARY"),
)
URLS = {"DATABASE_URL": f"postgres://me:{VALUE}@127.0.0.1/db", "OTHER_PROXY": f"http://me:{VALUE}@127.0.0.1:1"}
SECRETS = {**dict.fromkeys(NAMES, VALUE), **URLS}
#: Harmless, and yet not a session's without a rule.
PLAIN = {"BUILD_NUMBER": "7", "BUILD_TOKEN": VALUE, "EDITOR_OF_THE_SERVICE": "vi"}
RULES = """
[profiles.default.environment]
set = { FROM_RULES = "yes" }

[profiles.builds]
extends = "default"
environment.inherit = ["BUILD_*", "HOLDFAST_*"]
network.mode = "allow-list"
network.hosts = ["127.0.0.1:9"]

[agents."*"]
profiles = ["builds"]
"""


@pytest.fixture(scope="module")
def home() -> Iterator[ServiceHome]:
    with new_home() as made:
        yield made


@pytest.fixture(scope="module")
def service(home: ServiceHome) -> Iterator[RunningService]:
    rules = os.path.join(home.directory, "rules.toml")
    with open(rules, "w") as file:
        file.write(RULES)
    with running_service(home, "--rules", rules, **SECRETS, **PLAIN) as started:
        yield started


@pytest.fixture(scope="module")
def token(service: RunningService) -> str:
    return service.home.new_agent("builder")


def environment_of(service: RunningService, token: str, **create: object) -> dict[str, str]:
    """Of a new session, as a program in it has it."""
    session_id = service.call("CreateSession", token, **create)["sessionId"]
    ran = service.call("RunCommand", token, sessionId=session_id, command="cat /proc/self/environ | base64 -w0")
    service.call("CloseSession", token, sessionId=session_id, mode="FORCE")
    text = base64.b64decode(base64.b64decode(ran["stdout"]).split()[-1]).decode()
    return dict(entry.split("=", 1) for entry in text.split("\0") if entry)


@pytest.mark.parametrize("kind", ["TERMINAL", "SHELL"])
def test_a_session_has_a_minimal_environment(service: RunningService, token: str, kind: str) -> None:
    variables = environment_of(service, token, kind=kind, environment={"GIVEN": "here"})
    assert VALUE not in str(variables)
    assert not {name for name in variables if name.startswith("HOLDFAST_")}
    assert not variables.keys() & (SECRETS.keys() | PLAIN.keys())
    assert (variables["GIVEN"], variables["FROM_RULES"]) == ("here", "yes")
    assert {"PATH", "HOME"} <= variables.keys()


def test_rules_let_variables_through_and_never_secrets(service: RunningService, token: str) -> None:
    variables = environment_of(service, token, kind="SHELL", policy={"profile": "builds"})
    assert variables["BUILD_NUMBER"] == "7"
    assert VALUE not in str(variables)
    assert not {name for name in variables if name.startswith("HOLDFAST_")}
    assert "EDITOR_OF_THE_SERVICE" not in variables


def test_the_server_and_the_proxies_of_sessions_have_no_secrets(service: RunningService, token: str) -> None:
    """The machine's server, which the service has started, its keeper, and the proxy of an allow-list."""
    created = service.call("CreateSession", token, kind="SHELL", policy={"profile": "builds"})
    status = json.loads(service.home.verb("status", "--json").stdout)
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/environ", "rb") as environ:
                words, variables = line.read().split(b"\0"), environ.read()
        except OSError:
            continue
        is_server = int(pid) in (status["pid"], status["keeperPid"])
        if is_server or (b"egress" in words and b"127.0.0.1:9" in words):
            found += 1
            assert VALUE.encode() not in variables, words
    service.call("CloseSession", token, sessionId=created["sessionId"], mode="FORCE")
    assert found >= 3


@pytest.mark.parametrize(
    "name", ["PGPASSWORD", "DATABASE_URL", "GITHUB_PAT", "SMTP_PASS", "SIGNING_KEY", "HOLDFAST_X", "my_token"]
)
def test_a_creator_gives_no_secret(service: RunningService, token: str, name: str) -> None:
    status, refused = service.post("CreateSession", token, environment={name: "x"})
    assert status == 403
    assert name in refused["message"]


RUN_WITHOUT_SESSIONS = """
import holdfast
with holdfast.BashExecutor(sessions=False, env={"GIVEN": "here"}) as bash:
    print(bash.run("env").stdout)
"""


def test_an_executor_without_sessions_hands_on_no_secret() -> None:
    with new_home() as home:
        done = subprocess.run(
            [sys.executable, "-c", RUN_WITHOUT_SESSIONS],
            env={**home.environ, **SECRETS, **PLAIN},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert VALUE not in done.stdout
    assert "HOLDFAST_" not in done.stdout
    assert "BUILD_NUMBER" not in done.stdout
    assert "\nGIVEN=here\n" in f"\n{done.stdout}"
    assert "\nPATH=" in f"\n{done.stdout}"
