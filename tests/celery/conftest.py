"""Fixtures of the tests with real workers."""

from tests.celery.behaviour import site as site
from tests.celery.behaviour import sites as sites
from tests.celery.behaviour import wide_site as wide_site
