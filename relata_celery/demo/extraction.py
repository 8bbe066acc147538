"""Plain text and a title out of text, Markdown, HTML and PDF files.

A file that cannot be read ever (broken, empty, encrypted) is a PermanentError, so its job fails
at once and says why. pypdf and beautifulsoup4 are imported when first needed.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from relata_celery.domain.errors import PermanentError

FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
}
TITLE_CHARS = 80
#: A MongoDB document holds 16 MB; text above this would not fit with its fields.
TEXT_BYTES = 12_000_000

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Extracted:
    """A document's text, without markup, and its title."""

    format: str
    title: str
    text: str

    @property
    def words(self) -> int:
        return len(self.text.split())


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a folder: those that can be read, and the names of those that are skipped."""

    documents: tuple[tuple[str, Path], ...]
    skipped: tuple[str, ...]


def shipped_documents() -> Path:
    """The folder of documents that come with the package; SOURCES.md there says whose they are."""
    return Path(__file__).parent / "documents"


def find_documents(folder: Path, leave_out: Iterable[str] = ()) -> Found:
    """Every readable file under ``folder``, by its path relative to it, in order. Hidden ones are ignored."""
    ignored = set(leave_out)
    documents: list[tuple[str, Path]] = []
    skipped: list[str] = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        if name in ignored or any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        if path.suffix.lower() in FORMATS:
            documents.append((name, path))
        else:
            skipped.append(name)
    return Found(tuple(documents), tuple(skipped))


def extract(path: Path, progress: Progress | None = None) -> Extracted:
    """Read ``path`` by its extension. PermanentError when no later attempt could do better."""
    format = FORMATS.get(path.suffix.lower())
    if format is None:
        raise PermanentError(f"{path.name}: its extension is not one of {', '.join(FORMATS)}")
    try:
        data = path.read_bytes()
    except FileNotFoundError as exc:
        raise PermanentError(f"{path.name}: there is no such file any more") from exc
    except PermissionError as exc:
        raise PermanentError(f"{path.name}: this user may not read the file") from exc
    if not data.strip():
        raise PermanentError(f"{path.name}: the file is empty")
    title, text = _READERS[format](path.name, data, progress or _no_progress)
    text = unicodedata.normalize("NFC", text).strip()
    if not text:
        raise PermanentError(f"{path.name}: the {format} file holds no text")
    if len(text.encode("utf-8", "replace")) > TEXT_BYTES:
        raise PermanentError(f"{path.name}: more than {TEXT_BYTES} bytes of text, too many for the demo")
    return Extracted(format=format, title=_shorten(title) or _first_line(text), text=text)


def _no_progress(fraction: float, note: str) -> None:
    """Nobody is watching."""


def _text(name: str, data: bytes, progress: Progress) -> tuple[str, str]:
    text = _decode(name, data)
    return _first_line(text), text


def _markdown(name: str, data: bytes, progress: Progress) -> tuple[str, str]:
    source = _decode(name, data)
    text = re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL)
    heading = re.search(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$|^(\S.*)\n(?:=+|-{3,})[ \t]*$", text, flags=re.MULTILINE)
    title = _plain_markdown(heading.group(1) or heading.group(2)) if heading else ""
    return title, _plain_markdown(text)


def _plain_markdown(text: str) -> str:
    """Markdown's commonest marks removed, their text kept; no full parser."""
    text = re.sub(r"^[ \t]*(```|~~~).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(=+|-{3,}|\*{3,}|_{3,})[ \t]*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[ \t]*\[[^\]]+\]:[ \t]+\S+.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[ \t]{0,3}#{1,6}[ \t]+", "", text, flags=re.MULTILINE)
    text = re.sub(r"^[ \t]{0,3}>[ \t]?", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|!?\[([^\]]+)\]\[[^\]]*\]", r"\1\2", text)
    text = re.sub(r"(\*{1,3})(?=\S)(.+?)(?<=\S)\1", r"\2", text)
    return text.replace("`", "")


def _html(name: str, data: bytes, progress: Progress) -> tuple[str, str]:
    from bs4 import BeautifulSoup, Comment

    soup = BeautifulSoup(data, "html.parser")
    comments = [str(node) for node in soup.find_all(string=lambda node: isinstance(node, Comment))]
    for element in soup(["script", "style", "template", "noscript"]):
        element.decompose()
    title = soup.title.get_text(" ", strip=True) if soup.title else _front_matter_title(comments)
    if not title:
        heading = soup.find(["h1", "h2", "h3"])
        title = heading.get_text(" ", strip=True) if heading else ""
    for block in soup(["p", "pre", "li", "tr", "br", "div", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd"]):
        block.append("\n")
    return title, re.sub(r"\n\s*\n\s*", "\n\n", (soup.body or soup).get_text())


def _front_matter_title(comments: list[str]) -> str:
    """The ``Title`` of a JSON object in a comment, as pages without a head carry it."""
    for comment in comments:
        try:
            fields = json.loads(comment)
        except ValueError:
            continue
        if isinstance(fields, dict) and isinstance(fields.get("Title"), str):
            return str(fields["Title"])
    return ""


def _pdf(name: str, data: bytes, progress: Progress) -> tuple[str, str]:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    # pypdf raises a wide range of built-in errors on damaged files; to the job they are all one thing.
    damaged = (PyPdfError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise PermanentError(f"{name}: the PDF needs a password")
        pages: list[str] = []
        for number, page in enumerate(reader.pages, start=1):
            pages.append(page.extract_text())
            progress(number / len(reader.pages), f"page {number} of {len(reader.pages)}")
        title = str(reader.metadata.title or "") if reader.metadata else ""
    except damaged as exc:
        raise PermanentError(f"{name}: not a readable PDF ({type(exc).__name__})") from exc
    text = unicodedata.normalize("NFKC", "\n\n".join(pages))
    return title, re.sub(r"(?<=[a-zà-ÿ])-\n(?=[a-zà-ÿ])", "", text)


_READERS: dict[str, Callable[[str, bytes, Progress], tuple[str, str]]] = {
    "text": _text,
    "markdown": _markdown,
    "html": _html,
    "pdf": _pdf,
}


def _decode(name: str, data: bytes) -> str:
    if b"\0" in data:
        raise PermanentError(f"{name}: holds zero bytes, so it is not text in UTF-8 or Latin-1")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return _shorten(next((line for line in lines if line), ""))


def _shorten(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= TITLE_CHARS else title[: TITLE_CHARS - 1].rstrip() + "…"
