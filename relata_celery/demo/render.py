"""The report as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from relata_celery.demo.report import Counts, DocumentResult, Report
from relata_celery.domain.job import JobState

LISTED_IDS = 5


def render(report: Report, console: Console) -> None:
    """Print the tables: jobs, what they suffered, failures, documents, and the verdict."""
    counts = report.counts
    console.print(_jobs_table(counts))
    console.print(_facts_table(report))
    if counts.failures:
        console.print(_failures_table(counts))
    if report.documents:
        console.print(_documents_table(report))
        for document in report.documents:
            if document.summary:
                console.print(f"[bold]{escape(document.name)}[/bold]: {escape(document.summary)}")
        console.print(
            "[dim]Likeness compares hashed bags of words (no model): it sees shared words, not meaning.[/dim]"
        )
    console.print(_verdict(report))


def _jobs_table(counts: Counts) -> Table:
    table = Table(title="Jobs by state", title_justify="left")
    table.add_column("step")
    states = [str(state) for state in JobState]
    for state in (*states, "total"):
        table.add_column(state, justify="right")
    for step, by_state in counts.by_step.items():
        row = [str(by_state.get(state, 0)) for state in states]
        table.add_row(step, *row, str(sum(by_state.values())))
    table.add_section()
    table.add_row("all", *(str(counts.by_state.get(state, 0)) for state in states), str(counts.total))
    return table


def _facts_table(report: Report) -> Table:
    counts = report.counts
    table = Table(title="What happened to them", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    rows = {
        "attempts": _attempts(counts),
        "retries by class": _by_name(counts.retries),
        "snoozed (rate limited)": str(counts.snoozed),
        "running at the kill": _ids(counts.interrupted) if report.crashed else "no worker was killed",
        "recovered after the crash": str(len(counts.recovered)),
        "begun more than once": str(len(counts.ran_again)),
        "lost": _ids(counts.lost),
        "accepted twice": _ids(counts.doubled),
        "seconds": f"{report.seconds:.1f}",
        "endpoint": escape(report.endpoint),
    }
    if report.endpoint_met:
        rows["what its requests met"] = _by_name(report.endpoint_met)
    if report.skipped:
        rows["skipped files"] = escape(", ".join(report.skipped))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _failures_table(counts: Counts) -> Table:
    table = Table(title="Failed for good (recorded, not lost)", title_justify="left")
    table.add_column("job", overflow="fold")
    table.add_column("class")
    table.add_column("error", overflow="fold")
    for failure in counts.failures:
        table.add_row(escape(failure.id), failure.error_class, escape(failure.error))
    return table


def _documents_table(report: Report) -> Table:
    table = Table(title="Documents", title_justify="left")
    for name in ("document", "title"):
        table.add_column(name, overflow="fold")
    for name in ("words", "chunks", "analysed"):
        table.add_column(name, justify="right")
    for name in ("language", "keywords", "most like"):
        table.add_column(name, overflow="fold")
    for document in report.documents:
        table.add_row(
            escape(document.name),
            escape(document.title),
            str(document.words),
            str(document.chunks),
            str(document.analysed),
            escape(document.language),
            escape(", ".join(document.keywords)),
            _nearest(document),
        )
    return table


def _nearest(document: DocumentResult) -> str:
    if document.nearest is None or document.similarity is None:
        return ""
    return f"{escape(document.nearest)} ({document.similarity:.2f})"


def _verdict(report: Report) -> str:
    counts = report.counts
    if report.ok:
        text = f"All {counts.total} jobs came to one end each: none lost, none accepted twice."
        return f"[bold green]{text}[/bold green]"
    reasons = []
    if report.timed_out:
        reasons.append("the time limit passed")
    if counts.lost:
        reasons.append(f"{len(counts.lost)} lost or unfinished")
    if counts.doubled:
        reasons.append(f"{len(counts.doubled)} accepted twice")
    return f"[bold red]Not as it should be: {', '.join(reasons)}.[/bold red]"


def _attempts(counts: Counts) -> str:
    first = f"{counts.attempts - counts.repeated} first ones"
    return f"{counts.attempts} ({first}, {counts.repeated} more after an error or the kill)"


def _by_name(counts: Mapping[str, int]) -> str:
    return escape(", ".join(f"{name} {number}" for name, number in sorted(counts.items()))) or "0"


def _ids(ids: object) -> str:
    listed = list(ids) if isinstance(ids, (list, tuple)) else []
    if not listed:
        return "0"
    more = f", and {len(listed) - LISTED_IDS} more" if len(listed) > LISTED_IDS else ""
    return escape(f"{len(listed)} ({', '.join(listed[:LISTED_IDS])}{more})")
