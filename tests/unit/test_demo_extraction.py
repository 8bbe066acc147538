"""Reading documents: those shipped, and broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from relata_celery.demo import chunking
from relata_celery.demo.extraction import FORMATS, extract, find_documents, shipped_documents
from relata_celery.demo.plan import make_plan
from relata_celery.domain.errors import PermanentError

pytest.importorskip("pypdf")
pytest.importorskip("bs4")

SHIPPED = shipped_documents()


def test_every_shipped_document_is_named_in_its_sources_and_together_they_are_small() -> None:
    found = find_documents(SHIPPED, {"SOURCES.md"})
    sources = (SHIPPED / "SOURCES.md").read_text("utf-8")
    assert len(found.documents) >= 6
    assert not found.skipped
    assert [name for name, _ in found.documents if f"`{name}`" not in sources] == []
    assert {path.suffix for _, path in found.documents} == {".txt", ".md", ".html", ".pdf"}
    assert sum(path.stat().st_size for path in SHIPPED.iterdir() if path.is_file()) < 1_500_000


def test_the_shipped_documents_make_some_hundred_jobs() -> None:
    plan = make_plan(find_documents(SHIPPED, {"SOURCES.md"}).documents)
    assert all(document.problem is None for document in plan.documents)
    assert 60 <= plan.expected() == len(plan.jobs()) <= 150


@pytest.mark.parametrize(
    ("name", "format", "title", "says", "not_in_it"),
    [
        ("gettysburg-address.txt", "text", "The Gettysburg Address", "Four score and seven years", "\r"),
        (
            "declaration-1789.md",
            "markdown",
            "Déclaration des droits de l'homme et du citoyen",
            "égaux en",
            "#",
        ),
        ("go-runtime-hacking.md", "markdown", "Scheduler structures", "Gs, Ms, Ps", "====="),
        ("go-compiler-ssa.md", "markdown", "Introduction to the Go compiler's SSA backend", "SSA", "```"),
        ("go-memory-model.html", "html", "The Go Memory Model", "goroutine", "font-style"),
        ("bzip2-manual.pdf", "pdf", "bzip2 and libbzip2, version 1.0.8", "compressed files", "ﬁ"),
    ],
)
def test_text_and_title_of(name: str, format: str, title: str, says: str, not_in_it: str) -> None:
    found = extract(SHIPPED / name)
    assert (found.format, found.title) == (format, title)
    assert says in found.text
    assert not_in_it not in found.text
    assert found.words > 200


def test_a_pdf_tells_how_far_it_is_page_by_page() -> None:
    told: list[tuple[float, str]] = []
    extract(SHIPPED / "bzip2-manual.pdf", lambda fraction, note: told.append((fraction, note)))
    assert told[-1] == (1.0, f"page {len(told)} of {len(told)}")
    assert [fraction for fraction, _ in told] == sorted(fraction for fraction, _ in told)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("nothing.txt", b"", "empty"),
        ("blank.md", b" \n\n ", "empty"),
        ("only-markup.html", b"<html><script>var a = 1;</script></html>", "holds no text"),
        ("binary.txt", b"MZ\0\1\2", "not text"),
        ("broken.pdf", b"%PDF-1.4 and then nothing of use", "not a readable PDF"),
        ("text.pdf", b"this was never a PDF", "not a readable PDF"),
        ("cut.pdf", (SHIPPED / "bzip2-manual.pdf").read_bytes()[:20_000], "cut.pdf"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_can_never_be_read_fails_for_good_and_says_why(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(PermanentError, match=reason):
        extract(tmp_path / name)


def test_a_file_that_is_gone_fails_for_good(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="no such file"):
        extract(tmp_path / "gone.txt")


def test_an_unknown_extension_fails_for_good_and_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match=r"\.pdf"):
        extract(tmp_path / "photo.jpeg")


def test_old_encodings_and_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes("Café\r\nau lait".encode("cp1252"))
    found = extract(tmp_path / "old.txt")
    assert (found.title, found.text) == ("Café", "Café\nau lait")


def test_a_title_of_html_comes_from_its_head_else_from_a_heading(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<title>Head</title><h1>Heading</h1><p>x</p>", "utf-8")
    (tmp_path / "b.html").write_text("<h1>Heading</h1><p>x</p><!-- not json -->", "utf-8")
    assert extract(tmp_path / "a.html").title == "Head"
    assert extract(tmp_path / "b.html").title == "Heading"


def test_folders_are_searched_through_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("deep/A.TXT", "photo.jpeg", ".git/config.txt", "b.md"):
        (tmp_path / name).write_text("x", "utf-8")
    found = find_documents(tmp_path)
    assert [name for name, _ in found.documents] == ["b.md", "deep/A.TXT"]
    assert found.skipped == ("photo.jpeg",)
    assert ".txt" in FORMATS


def test_pieces_hold_all_words_in_order_and_once() -> None:
    text = extract(SHIPPED / "newton-opticks.txt").text
    pieces = chunking.split(text, 300)
    assert " ".join(pieces).split() == text.split()
    assert all(0 < len(piece.split()) <= 300 for piece in pieces)
    assert sum(piece.rstrip("\"')”").endswith((".", "?", "!")) for piece in pieces) > len(pieces) / 2


def test_words_without_any_end_of_sentence_are_cut_all_the_same() -> None:
    assert [len(piece.split()) for piece in chunking.split("word " * 25, 10)] == [10, 10, 5]
    assert chunking.split("  \n ") == []
