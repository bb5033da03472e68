"""Names that count as those of secrets, and names that only have such letters in them."""

from __future__ import annotations

import pytest

from holdfast.secret_names import is_dropped, looks_secret

SECRET = [
    *("PGPASSWORD", "DB_PASSWORD", "DATABASE_URL", "AWS_CREDENTIALS", "GITHUB_PAT", "SMTP_PASS", "MYSQL_PWD"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "STRIPE_KEY", "APIKEY", "api_key", "apiKey", "ssh-key", "KEY"),
    *("SECRET", "CLIENT_SECRET", "MYSECRETS", "GITHUB_TOKEN", "TOKEN", "TOKENS", "accessToken", "X_TOKEN_FILE"),
    *("SSHPASS", "dbPass", "PASSPHRASE", "PASS", "SENTRY_DSN", "DSN", "REDIS_URL", "MONGODB_URI", "DATABASEURL"),
    *("AZURE_STORAGE_CONNECTION_STRING", "CONN_STR", "HTTP_AUTH", "AUTH", "Authorization", "cookie", "OAUTH"),
    *("SLACK_WEBHOOK_URL", "JWT", "DEPLOY_CREDS", "FACEBOOK_PAGE_TOKEN", "WIFI_PSK", "AZURE_DEVOPS_EXT_PAT"),
]
OTHER = [
    *("PATH", "PATTERN", "PYTHONPATH", "COMPAT", "PASSAGE", "PASSENGERS", "KEYBOARD", "MONKEY", "KEYMAP"),
    *("HOME", "USER", "LANG", "LC_ALL", "TERM", "TZ", "TMPDIR", "SHELL", "LOGNAME", "PWD", "OLDPWD", "HOTKEYS"),
    *("GIT_AUTHOR_NAME", "AUTHORITY", "COMPASS_WIDTH", "BYPASS_CACHE", "FEEDBACK_URL", "HOMEPAGE_URL", "URL"),
    *("PUBLIC_KEY", "primary_key", "page_token", "since_token", "DESCRIPTION", "SQLITE_HISTORY", "CONNECTIONS"),
    *("SSH_AUTH_SOCK", ""),
]
#: In running text these are no names of secrets by themselves.
WEAK = ["key", "keys", "PASS", "auth", "pat", "dsn", "pwd"]


@pytest.mark.parametrize("name", SECRET)
def test_a_secret(name: str) -> None:
    assert looks_secret(name)
    assert is_dropped(name, "v")


@pytest.mark.parametrize("name", OTHER)
def test_no_secret(name: str) -> None:
    assert not looks_secret(name)
    assert not looks_secret(name, alone=False)


@pytest.mark.parametrize("name", WEAK)
def test_a_word_that_needs_another_beside_it_in_text(name: str) -> None:
    assert not looks_secret(name, alone=False)
    assert looks_secret(f"my_{name}", alone=False)


def test_a_number_of_tokens_is_no_secret() -> None:
    assert not looks_secret("max_tokens", "4096")
    assert looks_secret("max_tokens", "4096abc")
    assert looks_secret("DB_PASSWORD", "4096")


@pytest.mark.parametrize("name", ["MONKEY", "KEYBOARD", "my_tokenizer"])
def test_an_environment_policy_drops_by_its_contract(name: str) -> None:
    assert is_dropped(name, "")


@pytest.mark.parametrize(
    ("value", "dropped"),
    [
        ("postgres://me:s3cret@host/db", True),
        ("http://me:s3cret@proxy:3128", True),
        ("host=db user=me password=s3cret", True),
        ("Server=db;Pwd=s3cret", True),
        ("http://proxy:3128", False),
        ("https://me@host/a:b", False),
        ("a:b@c", False),
    ],
)
def test_a_password_in_a_value_is_dropped_whatever_its_name(value: str, dropped: bool) -> None:
    assert is_dropped("SOMETHING", value) is dropped
