"""The progress of a pull, read from the output of an engine's client on a terminal."""

from __future__ import annotations

from holdfast.fleet.containers.pulling import PullProgress

UP = b"\x1b[1A\x1b[2K\r"
DOWN = b"\r\x1b[1B"
#: As `docker pull` of version 28 draws it: a line for each layer, moved to by cursor controls.
STATES = (
    (b"0381ac52d406: Pulling fs layer ", 0.0),
    (b"7d5b62ccee99: Pulling fs layer ", 0.0),
    (b"0381ac52d406: Downloading [====>      ]  15.54MB/31.08MB", 0.2),
    (b"0381ac52d406: Verifying Checksum ", 0.4),
    (b"0381ac52d406: Download complete ", 0.4),
    (b"7d5b62ccee99: Downloading [==>        ]    512kB/1MB", 0.6),
    (b"7d5b62ccee99: Downloading [>          ]    1kB/1MB", 0.6),
    (b"0381ac52d406: Extracting [=====>     ]  15.54MB/31.08MB", 0.65),
    (b"0381ac52d406: Pull complete ", 0.7),
    (b"7d5b62ccee99: Already exists ", 1.0),
)


def test_the_share_of_a_pull_rises_with_its_layers() -> None:
    progress = PullProgress()
    progress.feed(b"1: Pulling from debian\r\n\r\n")
    assert progress.share is None
    for state, expected in STATES:
        # Clients write in pieces of any size.
        for byte in UP + state + DOWN:
            progress.feed(bytes([byte]))
        assert progress.share is not None
        assert round(progress.share, 2) == expected, state
    progress.feed(b"Digest: sha256:6879838636d1555de03d9a13a269adfafadd8441a2b9db91a8a8165b2d9a0dd5\r\n")
    assert progress.share == 1.0


def test_lines_about_no_layer_are_kept_for_the_error() -> None:
    progress = PullProgress()
    progress.feed(b"Error response from daemon: manifest for a/b:1 not found: manifest unknown\r\n")
    assert list(progress.words) == ["Error response from daemon: manifest for a/b:1 not found: manifest unknown"]
    progress.feed(b"x" * 1_000_000)
    progress.feed(b"\xff\x1b[99999z: 1.2.3.4GB/0B\n0381ac52d406: Downloading 1.2.3GB/0B\n")
    assert progress.share == 0.0
    assert len(progress.words) == 2
