"""A certificate of a test's own authority, for hooks.example.com."""

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """Files in PEM form."""

    chain: str
    key: str


def make(directory: Path, name: str) -> Certificates:
    """Writes a self-signed certificate for a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    chain, private = directory / "chain.pem", directory / "key.pem"
    pem = serialization.Encoding.PEM
    chain.write_bytes(certificate.public_bytes(pem))
    private.write_bytes(
        key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return Certificates(str(chain), str(private))


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """A certificate that this process trusts."""
    made = make(tmp_path, "hooks.example.com")
    monkeypatch.setenv("SSL_CERT_FILE", made.chain)
    return made
