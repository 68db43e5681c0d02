"""Keys and certificates that are made from the run's key."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from shoal.comm.tcp.certificate import certificate_and_key, public_key, sign

# RFC 8032, 7.1, tests 1 to 3.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_the_pair_is_that_of_the_standard(seed: str, public: str, message: str, signature: str) -> None:
    assert public_key(bytes.fromhex(seed)).hex() == public
    assert sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


def test_who_has_the_same_bytes_has_the_same_certificate() -> None:
    one, other = bytes(32), bytes(31) + b"\1"
    assert certificate_and_key(one) == certificate_and_key(one)
    assert certificate_and_key(one)[0] != certificate_and_key(other)[0]


def test_openssl_takes_the_certificate_and_its_signature(tmp_path: Path) -> None:
    certificate, private = certificate_and_key(b"s" * 32)
    pair = tmp_path / "pair.pem"
    pair.write_text(certificate + private)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(pair)  # raises where the two do not belong together
    verify = ["openssl", "verify", "-check_ss_sig", "-CAfile", pair, pair]
    try:
        answer = subprocess.run(verify, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("this machine has no openssl program")
    assert answer.returncode == 0, answer.stderr
