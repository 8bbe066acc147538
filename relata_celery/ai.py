"""Calls to language models, held to the fleet-wide limit."""

from __future__ import annotations
