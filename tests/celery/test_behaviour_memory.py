"""What a job leaves behind in the worker's memory."""

from __future__ import annotations

from tests.celery.behaviour import Sites

JOBS = 400


def test_a_job_leaves_nothing_to_the_garbage_collector(sites: Sites) -> None:
    site = sites.of("threads")
    before = site.get(site.send("garbage"))
    for result in [site.send("echo", number) for number in range(JOBS)]:
        site.wait_end(result)
    freed = site.get(site.send("garbage"))["freed"] - before["freed"]
    # One cycle would be a request, its message, its lease and all they hold: more than thirty objects a job.
    assert freed < JOBS * 5


def test_the_garbage_collector_passes_over_the_program_in_every_process(sites: Sites) -> None:
    site = sites.of("prefork")
    assert site.get(site.send("garbage"))["apart"] > 20_000
