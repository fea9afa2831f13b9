import pytest

from specdec.types.network import bypasses_proxy, trusting
from tests.specdec.client.certificate import piped, self_signed_certificate


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:9000",
        "127.9.8.7:9000",
        "localhost:9000",
        "LOCALHOST:9000",
        "localhost.:9000",
        "llm.localhost:9000",
        "[::1]:9000",
        "0.0.0.0:9000",
        "[::]:9000",
        "[::ffff:127.0.0.1]:9000",
        "ipv4:127.0.0.1:9000",
        "ipv6:[::1]:9000",
        "dns:localhost:9000",
        "dns:///localhost:9000",
        "127.0.0.1",
        "::1",
        "http://127.0.0.1:4317",
        "https://user:secret@localhost:8000/v1?a=b",
        "http://[::1]/v1",
    ],
)
def test_loopback_bypasses_a_proxy(address):
    assert bypasses_proxy(address)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:9000",
        "llm.example.com:9000",
        "localhost.example.com:9000",
        "https://example.com/127.0.0.1:9000",
        "http://localhost@example.com/",
        "[2001:db8::1]:9000",
        "",
    ],
)
def test_another_address_may_use_one(address):
    assert not bypasses_proxy(address)


def test_a_pipe_of_certificates_is_read_once():
    certificate = self_signed_certificate()[1]
    with piped("\ufeff".encode() + certificate + "# Ü".encode()) as path:
        context, pem = trusting("tls_ca_file", path)
    assert (context.cert_store_stats()["x509"], pem) == (1, certificate + b"# ")
