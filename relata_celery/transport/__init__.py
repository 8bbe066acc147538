"""The kombu seam: translates between kombu's messages and jobs, decides nothing.

Importing the package registers the transport under the alias ``relata``, so that
``relata+mongodb://host/db`` is a broker URL for any kombu connection and Celery app.
"""
