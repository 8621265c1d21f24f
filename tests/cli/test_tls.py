"""`mint serve` over TLS, with keys of its data folder, to clients that trust the authority of its certificate."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import mint
from mint.cli.__main__ import app
from tests.waiting import PATIENCE, eventually

MINT = [sys.executable, "-m", "mint.cli"]


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority of our own (ca.pem) and a certificate for this machine that it signed (cert.pem, key.pem)."""
    folder = tmp_path_factory.mktemp("tls")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-subj", "/CN=ours")
    request = ("-keyout", folder / "key.pem", "-out", folder / "request.pem", "-subj", "/CN=localhost")
    openssl("req", *new_key, *request)
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    signing = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial", "-extfile", folder / "names")
    openssl("x509", "-req", "-in", folder / "request.pem", *signing, "-out", folder / "cert.pem")
    return folder


@pytest.fixture(scope="module")
def served(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """Address, key and data folder of a server on every interface, which only has the key that was made for it."""
    data = tmp_path_factory.mktemp("data")
    key = CliRunner().invoke(app, ["keys", "create", "alice", "--data", str(data)]).stdout.strip()
    tls = ["--tls-cert", str(certificates / "cert.pem"), "--tls-key", str(certificates / "key.pem")]
    environment = {name: value for name, value in os.environ.items() if name != "MINT_API_KEY"}
    process = subprocess.Popen(
        [*MINT, "serve", "--host", "0.0.0.0", "--port", "0", "--data", str(data), *tls],
        stdout=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    address = next(word for word in process.stdout.readline().decode().split() if word.startswith("https://"))
    yield address.replace("0.0.0.0", "localhost"), key, data
    process.terminate()
    process.wait(PATIENCE)


def test_our_client_trusts_the_authority_it_is_told_of(
    served: tuple[str, str, Path], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key, _ = served
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(mint.errors.ConnectionFailed, match="set SSL_CERT_FILE"):
        mint.ServiceClient(url, key).get_server_capabilities()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    with mint.ServiceClient(url, key) as service:
        assert service.get_server_capabilities().supported_models
    with pytest.raises(mint.errors.Unauthorized):
        mint.ServiceClient(url, "tml-guess").get_server_capabilities()


def test_a_key_made_or_revoked_beside_a_running_server_counts_at_once(
    served: tuple[str, str, Path], certificates: Path
) -> None:
    url, _, data = served
    trusted = httpx.Client(verify=ssl.create_default_context(cafile=str(certificates / "ca.pem")))

    def status(key: str) -> int:
        return trusted.get(f"{url}/api/v1/sessions", headers={"X-API-Key": key}).status_code

    key = CliRunner().invoke(app, ["keys", "create", "bob", "--data", str(data)]).stdout.strip()
    eventually(lambda: status(key) == 200)  # changes are noticed within a second
    CliRunner().invoke(app, ["keys", "revoke", "bob", "--data", str(data)])
    eventually(lambda: status(key) == 401)


def test_the_dashboard_asks_for_a_key_and_a_visit_ends_with_it(
    served: tuple[str, str, Path], certificates: Path
) -> None:
    url, _, data = served
    key = CliRunner().invoke(app, ["keys", "create", "carol", "--data", str(data)]).stdout.strip()
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with httpx.Client(verify=context, base_url=f"{url}/dashboard", timeout=PATIENCE) as browser:

        def look() -> int:
            return browser.get("/").status_code

        assert look() == 401
        eventually(lambda: "mint_dashboard" in browser.post("/login", data={"key": key}).cookies)
        assert look() == 200
        CliRunner().invoke(app, ["keys", "revoke", "carol", "--data", str(data)])
        eventually(lambda: look() == 401)


def test_half_a_pair_and_a_file_that_is_no_certificate_are_refused(certificates: Path, tmp_path: Path) -> None:
    cert, key = str(certificates / "cert.pem"), str(certificates / "key.pem")
    for options, told in (
        (["--tls-cert", cert], "belong together"),
        (["--tls-cert", key, "--tls-key", cert], "cannot be used as certificate and key"),
        (["--tls-cert", str(tmp_path / "none"), "--tls-key", key], "cannot be used as certificate and key"),
    ):
        refused = CliRunner().invoke(app, ["serve", "--data", str(tmp_path), *options])
        assert refused.exit_code == 2
        assert told in refused.output
