"""Fixtures of the tests with real workers."""

from collections.abc import Iterator

import pytest

from tests.celery.behaviour import site as site
from tests.celery.behaviour import sites as sites
from tests.celery.behaviour import wide_site as wide_site
from tests.mongo import NoMongod, ReplicaSet, find_mongod, start_replica_set


@pytest.fixture(scope="module")
def private_set(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaSet]:
    """A replica set that no other test uses, to be stopped at will. (``mongo_uri`` skips where none can run.)"""
    try:
        find_mongod()
    except NoMongod as missing:
        pytest.skip(str(missing))
    replica_set = start_replica_set(tmp_path_factory.mktemp("private_set"))
    yield replica_set
    replica_set.stop()
