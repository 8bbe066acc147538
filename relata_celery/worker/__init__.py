"""What a Celery worker gets from us: bootsteps that start and stop the engine, and no more."""
