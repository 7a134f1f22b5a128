"""The T5 of the clone, which write out telegrams."""

from ...engines import Bundle
from ..making.kept_bundles import PAIR, Progress, kept

TELEGRAMS, TELEGRAM_DRAFT = PAIR / "telegram-750k", PAIR / "telegram-400k"


def telegram_bundle(progress: Progress) -> Bundle:
    return kept("telegrams", TELEGRAMS, [TELEGRAM_DRAFT], progress)
