"""Files of keys and certificates: which are taken, and what the others are told."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives import serialization as form

from bertserve.serving.errors import CredentialsError
from bertserve.serving.security.keys import ApiKeys, read_keys
from bertserve.serving.security.watch import FileWatch
from bertserve.serving.settings import Settings
from tests.support.certificates import Certificates
from tests.support.credentials import FIRST, SECOND, write_keys
from tests.support.refused_settings import problems
from tests.support.virtual_time import virtually

if TYPE_CHECKING:
    from pathlib import Path

CERT, KEY, CA = "--tls-cert-file", "--tls-key-file", "--tls-client-ca-file"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("good"), mutual=True)


def test_good_files_are_taken(good: Certificates, tmp_path: Path) -> None:
    """All of them at once."""
    keys = write_keys(tmp_path / "keys", FIRST)
    settings = Settings.load([*good.options(), "--api-keys-file", str(keys)], {})
    assert (settings.tls_cert_file, settings.tls_client_ca_file) == (good.cert, good.client_ca)


def test_row_67_certificate_and_key_need_one_another(good: Certificates) -> None:
    """And authorities of clients need both."""
    assert "--tls-cert-file and --tls-key-file: set both or neither" in problems([CERT, str(good.cert)])
    assert "--tls-cert-file and --tls-key-file: set both or neither" in problems([KEY, str(good.key)])
    assert f"{CA}: needs {CERT} and {KEY}" in problems([CA, str(good.ca)])


def test_row_67_each_file_is_named_with_what_is_wrong(good: Certificates, tmp_path: Path) -> None:
    """Missing, empty, another's, a folder, encrypted, the one in place of the other."""
    cert, key = str(good.cert), str(good.key)
    other, empty, none = Certificates(tmp_path / "other"), tmp_path / "empty.pem", tmp_path / "none"
    empty.touch()
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(_encrypted(good.key.read_bytes()))
    for options, words in {
        (CERT, cert, KEY, str(other.key)): f"{KEY}: {other.key}: does not match the certificate in {cert}",
        (CERT, str(empty), KEY, key): f"{CERT}: {empty}: contains no PEM certificate",
        (CERT, key, KEY, key): f"{CERT}: {key}: contains no PEM certificate",
        (CERT, cert, KEY, str(empty)): f"{KEY}: {empty}: contains no usable PEM key",
        (CERT, cert, KEY, cert): f"{KEY}: {cert}: contains no usable PEM key",
        (CERT, cert, KEY, str(tmp_path)): f"{KEY}: {tmp_path}: Is a directory",
        (CERT, cert, KEY, str(encrypted)): f"{KEY}: {encrypted}: the key is encrypted",
        (CERT, str(none), KEY, key): f"{CERT}: {none}: No such file",
    }.items():
        assert words in problems(options)


def test_row_67_all_that_is_wrong_is_listed_at_once(good: Certificates, tmp_path: Path) -> None:
    """Beside other settings, and without what stands in the files."""
    empty, none = tmp_path / "empty", tmp_path / "none"
    empty.touch()
    told = problems(
        ["--api-keys-file", str(empty), CERT, str(none), KEY, str(good.key), CA, str(empty), "--engine", "abacus"]
    )
    words = [f"--api-keys-file: {empty}: contains no key", f"{CERT}: {none}:", f"{CA}: {empty}:", "--engine"]
    assert [word for word in words if word not in told] == []
    assert not [word for word in ("BEGIN", "alue error") if word in told]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "contains no key"),
        ("# all of them are gone\n\n   \n", "contains no key"),
        (f"{FIRST}\nshort\n", "line 2"),
        (f"{FIRST} {SECOND}\n", "line 1"),
        (f"Bearer {FIRST}\n", "line 1"),
        ("käy-of-more-than-16-characters\n", "line 1"),
        ("\0" * 40, "line 1"),
        ("x" * 15, "line 1"),
        ("x" * 513, "line 1"),
        ("x" * 16 + "=x", "line 1"),
        (f"{FIRST}\n" * 50_000, "more than"),
    ],
)
def test_files_that_hold_no_keys(tmp_path: Path, content: str, words: str) -> None:
    """The line is named, and nothing of what stands in it."""
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(CredentialsError, match=words) as refused:
        read_keys(file)
    assert FIRST not in str(refused.value)
    assert "short" not in str(refused.value)


@pytest.mark.parametrize("key", ["x" * 16, "x" * 512, "AZaz09._~+/-0123==", "x" * 512 + "="])
def test_what_a_key_may_be(tmp_path: Path, key: str) -> None:
    """What `Authorization: Bearer` can carry (RFC 6750, 2.1)."""
    (tmp_path / "keys").write_text(f"{key}\n")
    assert ApiKeys(tmp_path / "keys").allow(f"Bearer {key}".encode())


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_files_that_hold_keys(tmp_path: Path, end: str) -> None:
    """Comments, blank lines, spaces and the ends of lines of any system count for nothing."""
    file = tmp_path / "keys"
    file.write_text(f"# ours{end or chr(10)}\n  {FIRST}\t# of the console{end or chr(10)}\n{SECOND}{end}", newline="")
    keys = ApiKeys(file)
    assert len(keys) == 2
    assert keys.allow(f"Bearer {FIRST}".encode())
    assert keys.allow(f"bearer  {SECOND}".encode())
    assert not keys.allow(f"Bearer {FIRST}\t# of the console".encode())
    assert not keys.allow(b"Bearer # ours")


def test_what_is_remembered_is_bounded_and_forgotten(tmp_path: Path) -> None:
    """However a client writes its key, and however often; and a key that is gone is gone."""
    keys = ApiKeys(write_keys(tmp_path / "keys", FIRST))
    for spaces in range(1, 2000):
        assert keys.allow(b"Bearer" + b" " * spaces + FIRST.encode())
    assert len(keys._good) <= 256
    assert keys.allow(b"Bearer " + FIRST.encode())
    write_keys(tmp_path / "keys", SECOND)
    keys.reload()
    assert not keys.allow(b"Bearer " + FIRST.encode())


@pytest.mark.parametrize("key", [FIRST, SECOND, "", "x" * 10_000])
def test_each_key_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """As a digest, whichever key it is: neither a key's length nor its place in the file shows in the time."""
    compared, compare = [], hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    keys = ApiKeys(write_keys(tmp_path / "keys", FIRST, SECOND))
    monkeypatch.setattr(hmac, "compare_digest", noted)
    assert keys.allow(f"Bearer {key}".encode()) == (key in {FIRST, SECOND})
    assert compared == [(32, 32)] * 2


def test_no_setting_is_a_key() -> None:
    """A command line and an environment can be read by others on the machine."""
    named = {name for name in Settings.model_fields if "key" in name}
    assert named == {"api_keys_file", "tls_key_file"}


@virtually
async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """It is read once it has stood still for a while, and then once."""
    file, told = tmp_path / "file", []

    async def reload() -> str:
        told.append(file.read_text(encoding="utf-8"))
        return "a text"

    watch = FileWatch()
    watch.add("the file", [file], reload)
    running = asyncio.create_task(watch.run())
    for count in range(1, 16):
        file.write_text("x" * count, encoding="utf-8")
        await asyncio.sleep(0.1)
    assert told == []
    await asyncio.sleep(1.1)  # it is looked at twice a second, and has to be the same twice
    running.cancel()
    assert told == ["x" * 15]


def _encrypted(key: bytes) -> bytes:
    loaded = form.load_pem_private_key(key, None)
    return loaded.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"password"))
