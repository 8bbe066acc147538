"""Encryption of arguments and results in the database, with keys from the environment.

``RELATA_ENCRYPTION_KEYS`` holds one key or several, separated by commas: the first encrypts, each decrypts, so
that keys can be changed while jobs wait. A key is 32 bytes in URL-safe base64. The cipher is AES-256-GCM; what
is sealed names its key (by four bytes of the key's hash) and is bound to the job's id and to its place, so that
it can be neither altered nor moved to another job unnoticed.

What is sealed: a version, the key's name, a nonce, and the encrypted bytes of a line of JSON (what the body was:
content type, encoding, compression) and the body.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu.compression import decompress

from .domain.errors import ConfigurationError, MissingKey
from .domain.outcome import Encoded
from .domain.privacy import ENCRYPTED, HEADER, HIDDEN, SEALED_TYPE, hidden

VARIABLE = "RELATA_ENCRYPTION_KEYS"
MAKE_ONE = 'python -c "import base64, os; print(base64.urlsafe_b64encode(os.urandom(32)).decode())"'

VERSION = b"\x01"
KEY_BYTES, NAME_BYTES, NONCE_BYTES = 32, 4, 12
#: Before a job is looked at again whose key is missing here, in seconds: meanwhile another worker may have it.
MISSING_KEY_PAUSE_S = 30.0


class Undecipherable(ValueError):
    """Something that is sealed was altered, or was sealed for another job."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key and the name it is known by, which tells nothing of it."""

    name: str
    secret: bytes = field(repr=False)


class Keyring:
    """The keys of one environment. The first encrypts."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Keyring:
        """Raises ConfigurationError, which shows no key, for what is no key."""
        stated = (os.environ if environ is None else environ).get(VARIABLE, "")
        texts = [text.strip() for text in stated.split(",") if text.strip()]
        return cls([_key(text, place, len(texts)) for place, text in enumerate(texts, 1)])

    @property
    def names(self) -> list[str]:
        """The names of the keys, the one that encrypts first."""
        return [key.name for key in self._keys]

    def require(self) -> None:
        """Raises MissingKey when nothing can be encrypted here."""
        if not self._keys:
            raise MissingKey(f"{VARIABLE} is not set; make a key with: {MAKE_ONE}")
        _cipher(self._keys[0])

    def seal(self, content: bytes, context: str) -> bytes:
        """Encrypt with the first key, for this context only. Raises MissingKey."""
        self.require()
        key, nonce = self._keys[0], os.urandom(NONCE_BYTES)
        sealed: bytes = _cipher(key).encrypt(nonce, content, _bound(context))
        return VERSION + bytes.fromhex(key.name) + nonce + sealed

    def open(self, sealed: object, context: str) -> bytes:
        """Decrypt. Raises MissingKey, which names the key, or Undecipherable."""
        start = len(VERSION) + NAME_BYTES
        if not isinstance(sealed, bytes) or len(sealed) < start + NONCE_BYTES or sealed[:1] != VERSION:
            raise Undecipherable("it says that it is encrypted, and is not")
        name = sealed[1:start].hex()
        key = next((key for key in self._keys if key.name == name), None)
        if key is None:
            known = f"which holds {', '.join(self.names)}" if self._keys else "which is not set"
            raise MissingKey(f"it is encrypted with key {name}, which is not in {VARIABLE} ({known})")
        cipher = _cipher(key)
        from cryptography.exceptions import InvalidTag

        try:
            opened: bytes = cipher.decrypt(
                sealed[start : start + NONCE_BYTES], sealed[start + NONCE_BYTES :], _bound(context)
            )
        except InvalidTag:
            raise Undecipherable(f"it cannot be decrypted with key {name}: it was altered or moved") from None
        return opened


def _key(text: str, place: int, of: int) -> Key:
    try:
        secret = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigurationError(
            f"{VARIABLE}: key {place} of {of} is not {KEY_BYTES} bytes in URL-safe base64; make one with: {MAKE_ONE}"
        )
    return Key(hashlib.sha256(b"relata key name" + secret).digest()[:NAME_BYTES].hex(), secret)


def _cipher(key: Key) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise MissingKey('the package cryptography is missing: pip install "relata_celery[encryption]"') from None
    return AESGCM(key.secret)


def _bound(context: str) -> bytes:
    return f"relata:{context}".encode("utf-8", "surrogatepass")


# -- messages and results ------------------------------------------------------------------------


def sealed_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a job with its body encrypted and nothing of it shown. Raises MissingKey, ConfigurationError."""
    if message.get("content-type") == SEALED_TYPE:
        return dict(message)
    headers = {**message["headers"], HEADER: ENCRYPTED, "argsrepr": HIDDEN, "kwargsrepr": HIDDEN}
    about = {
        "content-type": message.get("content-type"),
        "content-encoding": message.get("content-encoding"),
        "compression": headers.pop("compression", None),
    }
    sealed = _seal(about, message.get("body"), _message_of(headers))
    return {**message, "body": sealed, "content-type": SEALED_TYPE, "content-encoding": "binary", "headers": headers}


def opened_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message as it was before it was sealed, its body unpacked; one that was not sealed as it is.

    Raises MissingKey, or ValueError when it cannot be opened with any key.
    """
    if message.get("content-type") != SEALED_TYPE:
        return message
    about, body = _open(message.get("body"), _message_of(message["headers"]))
    if about.get("compression"):
        body = decompress(body, about["compression"])
    return {
        **message,
        "body": hidden(body),
        "content-type": about.get("content-type"),
        "content-encoding": about.get("content-encoding"),
    }


def sealed_result(result: Encoded, job_id: str) -> Encoded:
    """A result as it is stored for an encrypted job. Raises MissingKey, ConfigurationError."""
    about = {"content-type": result.content_type, "content-encoding": result.content_encoding}
    return Encoded(SEALED_TYPE, "binary", _seal(about, result.body, f"result:{job_id}"))


def opened_result(result: Encoded, job_id: str) -> Encoded:
    """A result as it was before it was sealed. Raises MissingKey, or ValueError when it cannot be opened."""
    about, body = _open(result.body, f"result:{job_id}")
    return Encoded(str(about.get("content-type")), str(about.get("content-encoding")), body)


def _message_of(headers: Mapping[str, Any]) -> str:
    return f"message:{headers.get('id')}"


def _seal(about: Mapping[str, Any], body: Any, context: str) -> bytes:
    plain = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body or b"")
    line = json.dumps({**about, "text": isinstance(body, str)}).encode()
    return Keyring.from_environment().seal(line + b"\n" + plain, context)


def _open(sealed: object, context: str) -> tuple[Mapping[str, Any], Any]:
    line, _, body = Keyring.from_environment().open(sealed, context).partition(b"\n")
    about = json.loads(line)
    return about, body.decode("utf-8", "surrogatepass") if about.get("text") else body
