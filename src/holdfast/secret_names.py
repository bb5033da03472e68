"""Which names look like those of secrets; pure. All that hides, refuses or drops values by their names uses it.

A name is read word by word (`DB_PASSWORD`, `dbPassword` and `db-password` are the same two words), so that `PAT` is
a secret in `GITHUB_PAT` and none in `PATH` or `PATTERN`. A doubtful name counts as a secret: a value that is hidden
for nothing costs less than one that is shown. Standard library only: the in-sandbox part uses it, too.
"""

from __future__ import annotations

import re
from typing import Final

#: Found anywhere in a word, these make it a secret: `PGPASSWORD`, `ACCESSTOKEN`, `MYSECRETS`.
_PARTS: Final = ("TOKEN", "SECRET", "PASSW", "PASSPHRASE", "PASSCODE", "CREDENTIAL", "AUTHORIZATION", "COOKIE")
#: The end of a word, with the ordinary words that end so.
_ENDINGS: Final = {
    "KEY": frozenset(("MONKEY", "DONKEY", "TURKEY", "WHISKEY", "HOCKEY", "JOCKEY", "LACKEY", "HOTKEY")),
    "KEYS": frozenset(("MONKEYS", "DONKEYS", "TURKEYS", "WHISKEYS", "JOCKEYS", "LACKEYS", "HOTKEYS")),
    "PASS": frozenset(("BYPASS", "COMPASS", "ENCOMPASS", "SURPASS", "TRESPASS", "OVERPASS", "UNDERPASS")),
    "PWD": frozenset(("OLDPWD",)),
    "DSN": frozenset[str](),
}
#: Whole words.
_WORDS: Final = frozenset(("AUTH", "OAUTH", "BEARER", "CRED", "CREDS", "JWT", "PAT", "PATS", "PSK", "WEBHOOK"))
#: A key after one of these words is no credential: `PUBLIC_KEY`.
_OPEN_KEYS: Final = frozenset(("PUBLIC", "PRIMARY", "FOREIGN"))
#: Servers whose URL has a user and a password in it, as a rule.
_STORES: Final = re.compile(
    r"DB|DATABASE|SQL|POSTGRES|POSTGRESQL|PG|MYSQL|MARIADB|MSSQL|JDBC|SQLALCHEMY|MONGO|MONGODB|REDIS|AMQP|RABBITMQ"
    r"|BROKER|CLICKHOUSE|ELASTICSEARCH|CASSANDRA|COCKROACH|NEO|SMTP|LDAP"
)
_URL_ENDINGS: Final = ("URL", "URLS", "URI", "URIS")
_CONNECTIONS: Final = ("CONNECTIONSTRING", "CONNSTR", "CONNSTRING")
#: Names with such a word that hold none: the directory of a shell, the path of a socket, positions in output and
#: pages, which are called tokens.
_HARMLESS: Final = frozenset(
    ("PWD", "SSH_AUTH_SOCK", "OUTPUT_TOKEN", "SINCE_TOKEN", "AUDITED_TOKEN", "PAGE_TOKEN", "PAGETOKEN")
)
#: How a name is divided into words.
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+")
#: Anywhere in a name, these make an `EnvPolicy` drop it: the contract of that policy, `MONKEY` included.
_DROPPED: Final = ("KEY", "SECRET", "TOKEN")
#: The value of a count of tokens, a parameter of models: its name is in the plural.
_COUNT: Final = re.compile(r"[0-9]{1,12}")
#: A password in a value whatever its name: that of a URL, or a part of a connection string.
_PASSWORD: Final = re.compile(
    r"://[^\s/:@\"']{0,256}:[^\s/@\"']{1,1024}@|(?i:(?:^|[\s;?&])(?:password|pwd)\s{0,4}=)"
)

#: In small letters, one of these is in every name that `looks_secret`: most texts have none, and to look for them
#: costs a fraction of the work.
SIGNS: Final = (
    *(part.lower() for part in _PARTS),
    *("key", "pass", "pwd", "dsn", "auth", "bearer", "cred", "jwt", "pat", "psk", "webhook"),
    *("url", "uri", "conn"),
)
_SIGN: Final = re.compile("|".join(SIGNS), re.IGNORECASE)


def looks_secret(name: str, value: str = "", *, alone: bool = True) -> bool:
    """Whether the value of a variable, a field or an option of this name is to be taken for a secret.

    With the `value`, a count of tokens is none. Without `alone`, words that mean a secret only beside another word
    (`key`, `pass`, `auth`) do not count by themselves: for names in running text, where `key: value` is none.
    """
    if _SIGN.search(name) is None:
        return False
    if name.upper() in _HARMLESS or (name.upper().endswith("TOKENS") and _COUNT.fullmatch(value)):
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    if any(part in word for word in words for part in _PARTS):
        return True
    if not alone and len(words) < 2 and words and words[0] in (*_ENDINGS, *_WORDS):
        return False
    if any(_is_secret_word(word) for word in words):
        return not (words[-1] in ("KEY", "KEYS") and _OPEN_KEYS.intersection(words))
    return _is_connection(words)


def is_dropped(name: str, value: str) -> bool:
    """Whether an `EnvPolicy` drops this variable by default: by its name, or for a password in its value."""
    return any(part in name.upper() for part in _DROPPED) or looks_secret(name) or bool(_PASSWORD.search(value))


def _is_secret_word(word: str) -> bool:
    if word in _WORDS:
        return True
    return any(word.endswith(ending) and word not in ordinary for ending, ordinary in _ENDINGS.items())


def _is_connection(words: list[str]) -> bool:
    """`DATABASE_URL`, `REDIS_URI`, `AZURE_CONNECTION_STRING`."""
    joined = "".join(words)
    if any(each in joined for each in _CONNECTIONS):
        return True
    if not words or not words[-1].endswith(_URL_ENDINGS):
        return False
    before = [*words[:-1], re.sub(r"UR[LI]S?$", "", words[-1])]
    return any(_STORES.fullmatch(word) for word in before)
