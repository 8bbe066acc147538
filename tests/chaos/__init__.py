"""Faults under load, and a checker that judges the history."""
