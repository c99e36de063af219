"""Files with credentials: what is taken, what is refused by name, and what a change on disk does."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from producer.wire.credential_files import (
    CredentialFileError,
    CredentialFiles,
    Tls,
    parse_tokens,
    tls_files,
    token_file,
)
from tests.kit.certificates import Authority, Pair, encrypted

AUTHORITY = Authority()
ONE, OTHER = AUTHORITY.issue("one"), AUTHORITY.issue("other")
TOKEN, SECOND = "s3cret-" + "a" * 16, "s3cret-" + "b" * 16


def opened(folder: Path, pair: Pair = ONE, ca: bytes = AUTHORITY.cert) -> CredentialFiles[Tls]:
    cert, key = pair.write(folder, "tls")
    (folder / "ca.crt").write_bytes(ca)
    return tls_files(("tls_cert", cert), ("tls_key", key), ("tls_client_ca", str(folder / "ca.crt")))


def test_what_the_files_say(tmp_path: Path) -> None:
    assert opened(tmp_path).current() == Tls(ONE.cert, ONE.key, AUTHORITY.cert)


def test_a_key_is_not_shown(tmp_path: Path) -> None:
    assert "PRIVATE" not in repr(opened(tmp_path).current())


def test_each_file_may_be_missing(tmp_path: Path) -> None:
    ca = AUTHORITY.write(tmp_path, "ca")
    assert tls_files(("tls_cert", ""), ("tls_key", ""), ("tls_ca", ca)).current() == Tls(b"", b"", AUTHORITY.cert)


def test_a_chain_and_several_authorities(tmp_path: Path) -> None:
    chain = Pair(ONE.cert + AUTHORITY.cert, ONE.key)
    both = AUTHORITY.cert + "# Zertifizierungsstelle für Tests\n".encode() + Authority("another").cert
    assert opened(tmp_path, chain, both).current() == Tls(chain.cert, ONE.key, both)


@pytest.mark.parametrize(
    ("pair", "ca", "said"),
    [
        (Pair(ONE.cert, OTHER.key), AUTHORITY.cert, "KEY_VALUES_MISMATCH"),
        (Pair(ONE.cert, ONE.key[:-40]), AUTHORITY.cert, "no certificate and key that fit"),
        (Pair(ONE.cert[:-40], ONE.key), AUTHORITY.cert, "no certificate and key that fit"),
        (Pair(ONE.key, ONE.key), AUTHORITY.cert, "no certificate and key that fit"),
        (Pair(ONE.cert, encrypted(ONE)), AUTHORITY.cert, "the key is encrypted; only plain PEM is taken"),
        (ONE, b"nothing", "no certificate and key that fit"),
        (ONE, AUTHORITY.cert[:-40], "no certificate and key that fit"),
        (ONE, AUTHORITY.cert + AUTHORITY.cert[:-40], "no certificate and key that fit"),
        (ONE, b"", "tls_client_ca .*/ca.crt is empty"),
        (ONE, b"#" * (1 << 20) + AUTHORITY.cert, "tls_client_ca .*/ca.crt has more than 1048576 bytes"),
    ],
)
def test_what_is_refused(tmp_path: Path, pair: Pair, ca: bytes, said: str) -> None:
    with pytest.raises(CredentialFileError, match=said):
        opened(tmp_path, pair, ca)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialFileError, match=r"token_file .*/none: No such file or directory"):
        token_file(str(tmp_path / "none"))


def test_a_change_holds_from_the_next_look_on(tmp_path: Path) -> None:
    files = opened(tmp_path)
    OTHER.write(tmp_path, "tls")
    assert files.current() == Tls(OTHER.cert, OTHER.key, AUTHORITY.cert)


def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes updates a mounted secret: the files are links through a folder that is a link."""
    for name, pair in (("1", ONE), ("2", OTHER)):
        (tmp_path / name).mkdir()
        pair.write(tmp_path / name, "tls")
    for path in (*(tmp_path / "2").iterdir(), *(tmp_path / "1").iterdir()):
        os.utime(path, ns=(0, 0))  # times need not tell
    (tmp_path / "now").symlink_to("1")
    cert, key = str(tmp_path / "now" / "tls.crt"), str(tmp_path / "now" / "tls.key")
    files = tls_files(("tls_cert", cert), ("tls_key", key), ("tls_client_ca", ""))
    assert files.current().cert == ONE.cert
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").rename(tmp_path / "now")
    assert files.current() == Tls(OTHER.cert, OTHER.key, b"")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "tls.key").write_bytes(OTHER.key),
        lambda folder: (folder / "tls.crt").write_bytes(OTHER.cert[:200]),
        lambda folder: (folder / "tls.crt").write_bytes(b""),
        lambda folder: (folder / "tls.crt").unlink(),
        lambda folder: (folder / "ca.crt").write_bytes(AUTHORITY.cert[:200]),
    ],
)
def test_a_change_that_makes_no_sense_is_said_once_and_not_used(
    tmp_path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    files = opened(tmp_path)
    spoil(tmp_path)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert files.current() == Tls(ONE.cert, ONE.key, AUTHORITY.cert)
    assert len(caplog.messages) == 1
    assert "what was there before stays in use" in caplog.messages[0]
    opened(tmp_path, OTHER)  # the writer goes on
    assert files.current().cert == OTHER.cert
    spoil(tmp_path)
    (tmp_path / "tls.key").unlink(missing_ok=True)
    files.current()
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 2


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# of the week\nteam-a:{TOKEN}\n\n  {SECOND}==\r\n")
    tokens = token_file(str(path))
    assert tokens.current() == {TOKEN: "team-a", SECOND + "==": ""}
    path.write_text(SECOND)
    assert tokens.current() == {SECOND: ""}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it has 0 tokens; expected 1 to 1024"),
        (b"# nothing\n", "it has 0 tokens"),
        (b"short", "line 1 is no token"),
        (b"a" * 513, "line 1 is no token"),
        (f"{TOKEN}\n{SECOND} and more".encode(), "line 2 is no token"),
        (f"a b:{TOKEN}".encode(), "line 1 is no token"),
        (f"a:b:{TOKEN}".encode(), "line 1 is no token"),
        (f"{TOKEN}ü".encode(), "line 1 is no token"),
        ("\n".join(f"{TOKEN}{number}" for number in range(1025)).encode(), "it has 1025 tokens"),
    ],
)
def test_what_is_no_token(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        parse_tokens(content)
    assert "s3cret" not in str(raised.value)
