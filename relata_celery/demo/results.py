"""What the pipeline made of each document, read from the demo's collections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from relata_celery.demo import embedding
from relata_celery.demo.analysis import Analysis, combine
from relata_celery.demo.report import DocumentResult


def summarise(
    documents: Sequence[Mapping[str, Any]], chunks: Sequence[Mapping[str, Any]]
) -> list[DocumentResult]:
    """One result per document, with the other document most like it."""
    by_document: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        by_document[chunk["document"]].append(chunk)
    vectors = {
        name: embedding.mean([piece["embedding"] for piece in pieces if "embedding" in piece])
        for name, pieces in by_document.items()
        if any("embedding" in piece for piece in pieces)
    }
    nearest = embedding.nearest(vectors)
    return [_result(document, by_document[document["_id"]], nearest) for document in documents]


def _result(
    document: Mapping[str, Any],
    pieces: Sequence[Mapping[str, Any]],
    nearest: Mapping[str, tuple[str, float]],
) -> DocumentResult:
    analyses = [
        Analysis(said["summary"], tuple(said["keywords"]), said["language"])
        for said in (piece.get("analysis") for piece in pieces)
        if said
    ]
    whole = combine(analyses)
    other, similarity = nearest.get(document["_id"], (None, None))
    return DocumentResult(
        name=document["_id"],
        format=document["format"],
        title=document["title"],
        words=document["words"],
        chunks=int(document.get("chunks", 0)),
        analysed=len(analyses),
        language=whole.language if whole else "",
        keywords=whole.keywords if whole else (),
        summary=whole.summary if whole else "",
        nearest=other,
        similarity=None if similarity is None else round(similarity, 3),
    )
