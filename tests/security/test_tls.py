"""A MongoDB that wants TLS and knows its users: what the URI says of both reaches the driver as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pymongo
import pytest
from celery import Celery
from kombu import Connection

from relata_celery import bootstrap
from relata_celery.domain.errors import StoreError
from relata_celery.store.client import connect
from relata_celery.transport.transport import broker_uri
from tests.commands import relata
from tests.mongo import Mongod, NoMongod
from tests.security.apps_private import make_app
from tests.security.certificates import Certificates, make_certificates
from tests.workers import running_worker

APP = "tests.security.apps_private"
#: With everything in it that a URI has to escape.
PASSWORD = "p@ss:w/rd?&%$#+ é"
ESCAPED = quote_plus(PASSWORD)


@dataclass
class SecureMongod(Mongod):
    """A server that takes TLS connections only, from whoever shows a certificate of its authority."""

    certificates: Certificates | None = None

    @property
    def tls(self) -> str:
        assert self.certificates is not None
        authority, client = (quote_plus(str(path)) for path in (self.certificates.authority, self.certificates.client))
        return f"tls=true&tlsCAFile={authority}&tlsCertificateKeyFile={client}"

    @property
    def direct_uri(self) -> str:
        plain = super().direct_uri
        return f"{plain}&{self.tls}" if self.certificates else plain


@pytest.fixture(scope="module")
def secure(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureMongod]:
    """``mongo_uri`` skips where no server can run."""
    folder = tmp_path_factory.mktemp("secure")
    server = SecureMongod(folder)
    try:
        server.start()
    except NoMongod as missing:
        pytest.skip(str(missing))
    certificates = make_certificates(folder)
    with server.client() as client:
        roles = [{"role": "readWrite", "db": "app"}]
        client["admin"].command("createUser", "worker", pwd=PASSWORD, roles=roles)
        client["$external"].command("createUser", certificates.subject, roles=roles)
    server.stop()
    server.certificates = certificates
    server.options = (
        "--auth", "--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(certificates.server),
        "--tlsCAFile", str(certificates.authority),
        "--setParameter", "authenticationMechanisms=SCRAM-SHA-256,MONGODB-X509",
    )  # fmt: skip
    server.start()
    yield server
    server.kill()


def uris(server: SecureMongod) -> dict[str, str]:
    return {
        "SCRAM-SHA-256": f"mongodb://worker:{ESCAPED}@{server.address}/app"
        f"?directConnection=true&authSource=admin&authMechanism=SCRAM-SHA-256&{server.tls}",
        "MONGODB-X509": f"mongodb://{server.address}/app"
        f"?directConnection=true&authMechanism=MONGODB-X509&authSource=%24external&{server.tls}",
    }


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "MONGODB-X509"])
def test_a_real_worker_runs_a_job_over_tls_as_a_user_that_the_server_knows(
    secure: SecureMongod, tmp_path: Path, mechanism: str
) -> None:
    uri = uris(secure)[mechanism]
    app = make_app(uri)
    with running_worker(APP, uri, tmp_path, "-c", "1", "-l", "debug") as worker:
        assert app.tasks["repeat"].delay("over TLS").get(timeout=60) == "over TLS"
        assert app.control.inspect(timeout=30, limit=1).ping()
        assert worker.terminate() == 0
        for secret in (PASSWORD, ESCAPED):
            assert secret not in worker.log
    app.close()
    connect(uri).close()
    done = relata(uri, "doctor", app=APP, env={"RELATA_TEST_URI": uri})
    assert "answers, database app" in done.out
    assert PASSWORD not in done.out + done.err
    assert ESCAPED not in done.out + done.err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("tls=true", "tls=false"), "cannot be reached"),
        ((ESCAPED, "wrong"), "Authentication failed"),
        (("worker:" + ESCAPED + "@", ""), "requires authentication|Unable to|failed|credentials"),
    ],
    ids=["without TLS", "wrong password", "nobody"],
)
def test_without_either_there_is_one_clear_error(secure: SecureMongod, change: tuple[str, str], reason: str) -> None:
    uri = uris(secure)["SCRAM-SHA-256"].replace(*change)
    if "tls=false" in uri:
        uri = uri.partition("&tls=false")[0] + "&serverSelectionTimeoutMS=500"
    if "@" not in uri:
        uri = uri.replace("&authSource=admin&authMechanism=SCRAM-SHA-256", "")
    database = connect(uri)
    with pytest.raises(StoreError, match=reason) as caught:
        database.command({"find": "relata_jobs"})
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    assert ESCAPED not in str(caught.value)
    database.close()


def test_nobody_else_gets_in(secure: SecureMongod) -> None:
    """The server of these tests does want both: a client without certificate, and one without a name, see nothing."""
    plain = f"mongodb://{secure.address}/?directConnection=true"
    with pymongo.MongoClient[dict[str, Any]](plain, serverSelectionTimeoutMS=500) as client:
        with pytest.raises(pymongo.errors.ConnectionFailure):
            client.admin.command("ping")
    with secure.client() as client:
        with pytest.raises(pymongo.errors.OperationFailure, match="requires authentication"):
            client["app"]["relata_jobs"].find_one()


@pytest.mark.parametrize(
    "uri",
    [
        f"mongodb://worker:{ESCAPED}@h1:27018,h2,[::1]:1/app?replicaSet=rs0&authSource=admin&tls=true&tlsCAFile=%2Fa+b",
        "mongodb://h1/?authMechanism=MONGODB-X509&authSource=%24external&tlsCertificateKeyFilePassword=p%26w",
        "mongodb://u:p@h1/app?authMechanism=MONGODB-AWS&authMechanismProperties=AWS_SESSION_TOKEN:a%2Fb",
        "mongodb+srv://worker:p%40ss@cluster.example.net/app?retryWrites=true&w=majority",
        f"mongodb://%2Ftmp%2Fmongodb.sock/app?x={quote_plus(';')}",
    ],
)
def test_a_uri_reaches_the_driver_as_it_was_written(uri: str) -> None:
    url = f"relata+{uri}"
    app = Celery("uri", broker=url, backend=url, set_as_current=False)
    assert bootstrap.mongodb_uri(app) == uri
    assert broker_uri(Connection(url)) == uri
    with app.connection_for_write() as connection:
        assert connection.transport.uri == uri
    assert app.backend.results.database.uri == uri
    assert connect(url).uri == uri
    app.close()
