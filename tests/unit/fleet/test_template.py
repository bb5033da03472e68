"""`Template`: values are normalised, wrong ones are refused with the field's name, equal meanings hash equally."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import InvalidParams
from holdfast.fleet.template import MAX_FILES_BYTES, Mount, Template, make_template


@pytest.mark.parametrize(
    ("field", "given", "normalised"),
    [
        ("image", Path("images/debian.tar"), "images/debian.tar"),
        ("root", "/srv/root/../tree/", "/srv/tree"),
        ("cpus", 2, 2.0),
        ("memory", "512MiB", 512 * 2**20),
        ("disk", 4096, 4096),
        ("network", "none", "none"),
        ("network", ["a.example", "*.b.example:8080"], ("a.example", "*.b.example:8080")),
        ("env", {"B": "2", "A": ""}, {"A": "", "B": "2"}),
        ("workdir", "/work//here/", "/work/here"),
        (
            "mounts",
            ["/a:/b", "/c:/d:rw", "/e:/f:ro"],
            (Mount("/a", "/b"), Mount("/c", "/d", True), Mount("/e", "/f")),
        ),
        ("mounts", {"/a/.": "/b/"}, (Mount("/a", "/b"),)),
        ("mounts", [Mount("/a/../x", "/b", True)], (Mount("/x", "/b", True),)),
        ("files", {"/b": b"\xff", "/a/./c": "ä"}, {"/a/c": b"\xc3\xa4", "/b": b"\xff"}),
        ("setup", ["make", ["make", "all"]], (("sh", "-c", "make"), ("make", "all"))),
        ("lifetime", 60, 60.0),
        ("lifetime", math.inf, math.inf),
    ],
)
def test_values_are_normalised(field: str, given: Any, normalised: Any) -> None:
    value = getattr(Template(**{field: given}), field)
    assert value == normalised
    assert type(value) is type(normalised)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("image", value) for value in ("", "--privileged", "a\0b", 7)),
        *(("root", value) for value in ("", 7, "a\0b")),
        *(("cpus", value) for value in (0, -1, math.inf, math.nan, True, "2")),
        *(("memory", value) for value in (0, -1, True, 1.5, "much", "0")),
        *(("disk", value) for value in (0, "1.5 bytes")),
        *(("processes", value) for value in (0, -1, True, 1.5, "10")),
        *(("network", value) for value in ("bridge", "", [], [""], ["-x"], ["a b"], [7], 7, {"a": "b"})),
        *(("env", value) for value in ({"": "x"}, {"A=B": "x"}, {"A": 1}, {"A": "\0"}, ["A"], "A=B")),
        *(("user", value) for value in ("", "-u", 0)),
        *(("workdir", value) for value in ("work", "/a/../b", "")),
        *(("mounts", value) for value in ("/a:/b", ["/a"], ["/a:b"], ["/a:/b:w"], ["/a:/../b"], [7], ["/a:"])),
        *(("files", value) for value in ({"a": ""}, {"/a": 7}, ["/a"], {"/a/../b": ""})),
        *(("setup", value) for value in ("make", [()], [7], [["make", 7]])),
        *(("labels", value) for value in ({"holdfast.record": "x"}, {"a": 1}, {"": ""})),
        *(("lifetime", value) for value in (0, -1, math.nan, True, "1h")),
        *(("idle", value) for value in (0, math.inf, math.nan)),
        ("options", ["arguments"]),
        ("options", {1: 2}),
    ],
)
def test_wrong_values_are_refused_with_the_name_of_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams, match=f"^template: {field}: "):
        Template(**{field: value})


def test_files_are_bounded() -> None:
    half = b"x" * (MAX_FILES_BYTES // 2)
    Template(files={"/a": half, "/b": half})
    with pytest.raises(InvalidParams, match="files: more than"):
        Template(files={"/a": half, "/b": half, "/c": "x"})


def test_paths_of_the_host_may_begin_with_the_home() -> None:
    assert Template(root="~/tree").root == os.path.expanduser("~/tree")


def test_an_image_and_a_root_exclude_each_other() -> None:
    with pytest.raises(InvalidParams, match="image, root"):
        Template(image="debian:12", root="/srv/root")


def test_templates_that_mean_the_same_have_the_same_hash() -> None:
    one = Template(memory="1GiB", env={"A": "1", "B": "2"}, setup=["make"], network=["a.example"], cpus=1)
    other = Template(
        memory=2**30, env={"B": "2", "A": "1"}, setup=[("sh", "-c", "make")], network=("a.example",), cpus=1.0
    )
    assert one == other
    assert one.hash == other.hash
    assert len(one.hash) == 16
    variants = [
        Template(),
        *(Template(memory="2GiB"), Template(disk="2GiB"), Template(files={"/a": "1"}), Template(files={"/a": "2"})),
        *(Template(setup=["make"]), Template(idle=5), Template(idle=5, idle_while_running=True)),
        *(Template(network="none"), Template(network="host"), Template(lifetime=math.inf)),
    ]
    assert len({each.hash for each in variants}) == len(variants)


def test_fields_are_laid_over_a_template() -> None:
    base = Template(image="debian:12", memory="1GiB")
    assert make_template(base, {}) is base
    changed = make_template(base, {"memory": "2GiB"})
    assert (changed.image, changed.memory) == ("debian:12", 2 * 2**30)
    assert make_template(None, {"cpus": 1}) == Template(cpus=1)
    with pytest.raises(InvalidParams, match="template: color, colour: no such field"):
        make_template(base, {"colour": "red", "color": "red"})
    with pytest.raises(InvalidParams, match="image, root"):
        make_template(base, {"root": "/srv/root"})


def test_a_template_survives_json_and_an_unknown_field_is_refused() -> None:
    template = Template(
        files={"/a": b"\xff"}, mounts=["/a:/b:rw"], setup=["make"], network=["a.example"], memory="1M"
    )
    assert msgspec.json.decode(msgspec.json.encode(template), type=Template) == template
    with pytest.raises(msgspec.ValidationError, match="unknown field `read_only`"):
        msgspec.json.decode(b'{"read_only": true}', type=Template)
