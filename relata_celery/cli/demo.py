"""``relata demo``: real documents through the queue, with a worker killed half-way."""

from __future__ import annotations

import click

from relata_celery.demo.run import run_demo


@click.command("demo")
@click.option(
    "--documents",
    metavar="DIR",
    type=click.Path(),
    help="A folder of text, Markdown, HTML or PDF files; default: documents shipped with the package.",
)
@click.option("--keep", is_flag=True, help="Keep the run's database, its logs and its journal.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; progress goes to stderr.")
@click.option("--no-crash", "crash", is_flag=True, flag_value=False, default=True, help="Kill no worker.")
@click.option(
    "--jobs-timeout",
    "timeout_s",
    type=float,
    default=180.0,
    show_default=True,
    metavar="SECONDS",
    help="Give up when not all jobs have ended by then.",
)
@click.pass_context
def demo(
    context: click.Context, documents: str | None, keep: bool, as_json: bool, crash: bool, timeout_s: float
) -> None:
    """Run a pipeline of jobs over documents, kill the worker half-way, and count what came of it.

    Uses a database of its own on the server that RELATA_MONGODB_URI names, else on the embedded
    MongoDB. Exit status: 0, or 1 when a job was lost, accepted twice or not done in time, or 2
    when what was asked cannot be run.
    """
    context.exit(run_demo(documents, keep=keep, as_json=as_json, crash=crash, timeout_s=timeout_s))
