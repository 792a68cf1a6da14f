# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Tests how the file of URLs is read, and which of its changes are reported."""

import os
from pathlib import Path

import pytest

from torchtitan.grpo.inference.urls import UrlsFile, parse_urls

A, B = "http://10.0.0.1:8000", "https://b.example:443"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "servers.txt"


@pytest.fixture
def file(path: Path) -> UrlsFile:
    """Makes a file that named A when it was read."""
    path.write_text(A)
    file = UrlsFile(str(path))
    assert file.read() == [A]
    return file


def test_comments_and_empty_lines_are_passed_over_and_order_is_kept():
    assert parse_urls(f"# ours\n\n  {B}/ \r\n#{A}\n{A}", "here") == [B, A]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "here must name at least one server, got none"),
        ("10.0.0.1:8000", "must look like http://host:port, got '10.0.0.1:8000'"),
        (f"{A} # the first", "got 'http://10.0.0.1:8000 # the first'"),
        (f"{A}\n{B}\n{A}/", f"each server once, got {A} more than once"),
        (f"{A}\n{B}\nHTTPS://B.Example:0443", f"each server once, got {B} more than once"),
        (
            "http://::1:8000",
            r"got 'http://::1:8000': an IPv6 address .* in brackets, as in \[::1\]:8000",
        ),
        ("http://[::g]:8000", "At least|Only hex digits"),
        ("http://[10.0.0.1]:8000", "At least 3 parts"),
        ("http://a:70000", "got 'http://a:70000': the port must be a number from 1 to 65535"),
        ("http://a:0", "the port must be a number"),
        ("http://a:\uff18\uff10", "the port must be a number"),
        ("http://:8000", "the host is missing"),
        ("ftp://a:8000", "must begin with http"),
        ("http://user:secret@a:8000", r"got 'http://\*\*\*@a:8000': keys are set with"),
        ("http://a:8000?x=1", "'\\?x=1' must be left out"),
        ("http://10.0.0.1:8000,http://10.0.0.2:8000", "a space or a comma"),
        ("http://10.0.0.300:8000", "does not appear to be an IPv4"),
        ("http://-a:8000", "'-a' is no name of a host"),
    ],
)
def test_a_file_that_names_no_servers_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_urls(text, "here")


@pytest.mark.parametrize(
    ("url", "taken"),
    [
        (A, A),
        (f"{B}/", B),
        ("HTTP://Node-1.Example.:08000", "http://node-1.example.:8000"),
        ("http://my_service:80", "http://my_service:80"),
        ("http://[0:0:0:0:0:0:0:1]:1", "http://[::1]:1"),
        ("http://[fe80::1%eth0]:8000", "http://[fe80::1%eth0]:8000"),
    ],
)
def test_a_server_has_one_url(url: str, taken: str):
    assert parse_urls(url, "here") == [taken]


def test_a_change_is_taken_once_it_stands_still(file: UrlsFile, path: Path):
    with path.open("w") as stream:
        stream.write(f"{A}\nhttp://10.0.0.2:80")  # of :8000
        stream.flush()
        assert file.poll() is None
        stream.write(f"00\n{B}\n")
        stream.flush()
        assert file.poll() is None
    assert file.poll() == [A, "http://10.0.0.2:8000", B]
    assert file.poll() is None


def test_a_replaced_file_of_equal_size_is_a_change(file: UrlsFile, path: Path):
    new = path.with_suffix(".new")
    new.write_text(A.replace("1:", "2:"))
    stat = path.stat()
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(new, path)
    assert [file.poll(), file.poll()] == [None, ["http://10.0.0.2:8000"]]


def test_what_is_wrong_is_said_once_a_change(file: UrlsFile, path: Path):
    path.write_bytes(b"\xff\xfe")
    assert file.poll() is None
    with pytest.raises(ValueError, match=r"inference\.urls_file .* must be a readable text file"):
        file.poll()
    assert file.poll() is None
    path.unlink()
    assert file.poll() is None
    with pytest.raises(ValueError, match=r"servers\.txt.*No such file"):
        file.poll()
    assert file.poll() is None
    path.write_text(B)
    assert [file.poll(), file.poll()] == [None, [B]]
    path.write_text(A)
    assert file.read() == [A], "a reading that is asked for waits for nothing"
    assert [file.poll(), file.poll()] == [None, None]
