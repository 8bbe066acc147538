"""Certificates for one test: an authority, a server on 127.0.0.1, a client."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """Files in PEM; those of server and client hold the private key too. ``subject`` is the client's, for MongoDB."""

    authority: Path
    server: Path
    client: Path
    subject: str


def make_certificates(folder: Path) -> Certificates:
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _signed(_name("authority", "tests"), key, _name("authority", "tests"), key, None)
    (folder / "authority.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    files = {}
    for who, unit, alternative in (("server", "servers", names), ("client", "workers", None)):
        own = ec.generate_private_key(ec.SECP256R1())
        certificate = _signed(_name(who, unit), own, authority.subject, key, alternative)
        files[who] = folder / f"{who}.pem"
        files[who].write_bytes(
            own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + certificate.public_bytes(serialization.Encoding.PEM)
        )
    subject = _name("client", "workers").rfc4514_string()
    return Certificates(folder / "authority.pem", files["server"], files["client"], subject)


def _name(common: str, unit: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"relata {unit}"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    names: list[x509.GeneralName] | None,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=subject == issuer, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
