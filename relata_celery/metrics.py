"""Prometheus metrics of one worker, served by its parent: it knows every outcome, whatever the pool.

A listener of the engine's events; counts and durations are this worker's own. What belongs to the
whole fleet (depths of queues, slots of limits) is read from MongoDB when somebody scrapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from relata_celery.bootstrap import Stores
from relata_celery.domain.errors import StoreError
from relata_celery.domain.events import Event, JobReaped, JobRefused, JobSettled, LeasesRenewed
from relata_celery.store.stats import Stats

logger = logging.getLogger("relata_celery")

#: From a quick write to the default time-out of a job, in seconds.
BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)


class WorkerMetrics:
    """Collects one worker's metrics in a registry of their own."""

    def __init__(self, stores: Stores, knows_type: Callable[[str], bool]) -> None:
        self._knows_type = knows_type
        self.registry = CollectorRegistry()
        self._processed = Counter(
            "relata_jobs_processed_total",
            "Attempts that this worker ended, by type and outcome.",
            ["job_type", "outcome"],
            registry=self.registry,
        )
        self._duration = Histogram(
            "relata_job_duration_seconds",
            "How long attempts ran.",
            ["job_type"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._expired = Counter(
            "relata_leases_expired_total",
            "Leases that ran out and were taken back by this worker's reaper.",
            registry=self.registry,
        )
        self._refused = Counter(
            "relata_outcomes_refused_total",
            "Outcomes of this worker that were thrown away because the lease had been lost.",
            registry=self.registry,
        )
        self._renewed = Counter(
            "relata_leases_renewed_total", "Leases that this worker renewed.", registry=self.registry
        )
        self.registry.register(_Fleet(stores))

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobSettled):
            # A type that the app does not have is anybody's invention: it gets no label of its own.
            job_type = event.type if self._knows_type(event.type) else "unknown"
            self._processed.labels(job_type, str(event.outcome or "released")).inc()
            if event.duration_ms is not None:
                self._duration.labels(job_type).observe(event.duration_ms / 1000)
        elif isinstance(event, JobReaped):
            self._expired.inc()
        elif isinstance(event, JobRefused):
            self._refused.inc()
        elif isinstance(event, LeasesRenewed):
            self._renewed.inc(event.renewed)

    def serve(self, host: str, port: int) -> Any:
        """Serve ``/metrics`` on this address and port; returns the server, whose ``shutdown()`` ends it.

        Raises OSError when the port is taken.
        """
        server, _thread = start_http_server(port, addr=host, registry=self.registry)
        logger.info("metrics are served on %s port %d", host, port)
        return server


class _Fleet:
    """Gauges of the whole fleet, read at each scrape; a scrape while MongoDB is away has none."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        depth = GaugeMetricFamily(
            "relata_queue_depth", "Jobs that wait or run, by queue.", labels=["queue", "state"]
        )
        slots = GaugeMetricFamily(
            "relata_limit_slots_in_use", "Slots of a fleet-wide limit that are taken.", labels=["limit"]
        )
        late = GaugeMetricFamily(
            "relata_oldest_expired_lease_seconds", "How long the longest expired lease has waited for a reaper."
        )
        stats = Stats(self._stores.database)
        try:
            late.add_metric([], stats.oldest_expired_s())
            for queue in stats.depths():
                depth.add_metric([queue.queue, "queued"], queue.queued)
                depth.add_metric([queue.queue, "running"], queue.running)
            for limit in self._stores.limits.list():
                slots.add_metric([limit.name], limit.in_use)
        except StoreError as exc:
            logger.warning("metrics of the fleet are missing from this scrape: %s", exc)
        return (depth, slots, late)
