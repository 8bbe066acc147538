"""Who is compared. The reference is Celery on Redis."""

from __future__ import annotations

from .base import Contender
from .floor import Floor
from .on_celery import CeleryKombuMongoDB, CeleryRabbitMQ, CeleryRedis, Ours
from .on_dramatiq import Dramatiq
from .on_procrastinate import Procrastinate

REFERENCE = CeleryRedis.name

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Ours(),
        CeleryRedis(),
        CeleryRabbitMQ(),
        CeleryKombuMongoDB(),
        Dramatiq(),
        Procrastinate(),
        Floor(),
    )
}
