"""Use cases over the domain and a store.

Knows no Celery, no kombu and no MongoDB: what it needs of them is handed in as protocols
(:mod:`.ports`) and callables, by the one place that constructs (:mod:`relata_celery.bootstrap`).
"""
