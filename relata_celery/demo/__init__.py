"""The demo: real documents through a pipeline of jobs, with a worker killed half-way.

``run.py`` is the command, ``jobs.py`` what an app would write itself. The other modules are what
any such app has: ``extraction`` and ``chunking`` read documents, ``embedding`` compares them,
``analysis`` asks a model, ``storage`` keeps the results. ``standin`` is a model endpoint that
misbehaves on purpose; ``journal`` and ``report`` check the queue's word against what ran.
"""
