"""Compares relata_celery with other job queues on this machine: ``python -m benchmarks``."""
