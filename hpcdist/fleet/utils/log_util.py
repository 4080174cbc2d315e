"""Paddle's ``fleet.utils.log_util``: the logger of fleet, and its level."""

import logging

from hpcdist.fleet.plan import level_of

logger = logging.getLogger("hpcdist.fleet")


def set_log_level(level: int | str) -> None:
    """Set the level of the logger ``hpcdist.fleet``. Local.

    Args:
        level: a name such as "INFO", or a number.

    Raises:
        UsageError: it is neither.

    """
    logger.setLevel(level_of(level))


def get_log_level_code() -> int:
    """Return the level of the logger as a number. Local."""
    return logger.getEffectiveLevel()


def get_log_level_name() -> str:
    """Return the name of the level of the logger. Local."""
    return logging.getLevelName(get_log_level_code())
