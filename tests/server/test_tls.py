"""TLS: both servers encrypted; clients that trust nothing, or lack a certificate where one is due, are refused."""

import http.client
import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from jhybrid.errors import ConfigError
from jhybrid.request import Request
from jhybrid_server.client import Client
from jhybrid_server.tls import ClientTls, ServerTls
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.serving import Served, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority (ca.*), and a server's and a client's certificate that it signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


@pytest.fixture(params=[False, True], ids=["tls", "mutual"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Served, bool]]:
    paths = [str(folder / "server.pem"), str(folder / "server.key"), str(folder / "ca.pem") if request.param else None]
    with serving(FakeEngine, tls=ServerTls.of(*paths)) as served:
        yield served, request.param


def test_grpc(served: tuple[Served, bool], folder: Path):
    server, mutual = served
    ca = str(folder / "ca.pem")
    known = ClientTls(ca, str(folder / "client.pem"), str(folder / "client.key"))
    with Client(server.target, tls=known) as client:
        assert client.generate(Request(prompt="abc"), timeout=10).output.text == answer_text(4, 16)
    strangers = [None, ClientTls(), *([ClientTls(ca)] if mutual else [])]
    for tls in strangers:
        with Client(server.target, tls=tls) as client, pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            client.generate(Request(prompt="abc"), timeout=10)


def test_http(served: tuple[Served, bool], folder: Path):
    server, mutual = served

    def text(context: ssl.SSLContext) -> str:
        connection = http.client.HTTPSConnection("127.0.0.1", server.http.port, timeout=10, context=context)
        body = json.dumps({"prompt": "abc", "max_tokens": 16})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())["choices"][0]["text"]

    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if mutual:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            text(context)
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
    assert text(context) == answer_text(4, 16)
    with pytest.raises(ssl.SSLError):
        text(ssl.create_default_context())


def test_what_is_no_certificate_is_refused(folder: Path):
    cert, key = str(folder / "server.pem"), str(folder / "server.key")
    assert ServerTls.of(None, None, None) is None
    for field, flags in (
        ("tls_key", (cert, None, None)),
        ("tls_cert", (None, key, None)),
        ("tls_ca", (None, None, cert)),
        ("tls_cert", (str(folder / "none"), key, None)),
        ("tls_ca", (cert, key, str(folder / "none"))),
        ("tls_cert", (cert, str(folder / "client.key"), None)),
    ):
        with pytest.raises(ConfigError) as caught:
            ServerTls.of(*flags)
        assert caught.value.field == field
