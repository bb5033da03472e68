"""Which hosts an allow-list lets through, and which addresses it does not, whatever their names are."""

from __future__ import annotations

import pytest

from holdfast.errors import InvalidParams
from holdfast.proxies.egress.rules import EgressRules, parse_pattern


@pytest.mark.parametrize(
    ("pattern", "host", "port", "passes"),
    [
        ("example.com", "example.com", 443, True),
        ("example.com", "EXAMPLE.com.", 80, True),
        ("example.com", "example.com", 8080, False),
        ("example.com", "www.example.com", 443, False),
        ("example.com", "notexample.com", 443, False),
        ("*.example.com", "www.example.com", 443, True),
        ("*.example.com", "a.b.example.com", 443, True),
        ("*.example.com", "example.com", 443, False),
        ("*.example.com", "evilexample.com", 443, False),
        ("*.example.com", "www.example.com.evil.org", 443, False),
        ("example.com:8443", "example.com", 8443, True),
        ("example.com:8443", "example.com", 443, False),
        ("example.com:*", "example.com", 1, True),
        ("10.0.0.7:5432", "10.0.0.7", 5432, True),
        ("[2001:db8::1]:443", "2001:db8:0::1", 443, True),
        ("2001:db8::1", "2001:db8::1", 80, True),
        ("127.0.0.1", "::ffff:127.0.0.1", 80, True),
    ],
)
def test_names(pattern: str, host: str, port: int, passes: bool) -> None:
    assert (EgressRules([pattern]).refuses_name(host, port) == "") is passes


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::1"),
        *("::127.0.0.1", "::a00:1", "fec0::1", "64:ff9b:1::a00:1"),
    ],
)
def test_addresses_that_lead_inside_must_be_named_themselves(address: str) -> None:
    assert EgressRules(["example.com", "*.example.com"]).refuses_address("example.com", 443, address) != ""


def test_addresses_that_are_named() -> None:
    rules = EgressRules(["10.0.0.7:5432", "localhost:8080", "example.com"])
    assert rules.refuses_address("10.0.0.7", 5432, "10.0.0.7") == ""
    assert rules.refuses_address("10.0.0.7", 5433, "10.0.0.7") != ""
    assert rules.refuses_address("localhost", 8080, "127.0.0.1") == ""
    assert rules.refuses_address("localhost", 8080, "10.0.0.1") != ""
    assert rules.refuses_address("example.com", 443, "93.184.215.14") == ""
    assert rules.refuses_address("example.com", 443, "2606:2800:21f:cb07:6820:80da:af6b:8b2c") == ""


@pytest.mark.parametrize(
    "text", ["", "*", "*.*", "a*b", "http://example.com", "example.com:0", "x:99999", "x:y", "*.:1"]
)
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(InvalidParams):
        parse_pattern(text)
