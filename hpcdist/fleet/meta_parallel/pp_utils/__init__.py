"""Paddle's ``fleet.meta_parallel.pp_utils``: its names say what to use here."""

from typing import TYPE_CHECKING

from hpcdist.fleet.absent import refusing

if not TYPE_CHECKING:  # checkers and editors see what there is
    __getattr__ = refusing(__name__)
