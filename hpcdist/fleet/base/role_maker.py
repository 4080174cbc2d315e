"""Paddle's ``fleet.base.role_maker``."""

from hpcdist.fleet.roles import (
    PaddleCloudRoleMaker as PaddleCloudRoleMaker,
    Role as Role,
    RoleMakerBase as RoleMakerBase,
    UserDefinedRoleMaker as UserDefinedRoleMaker,
)
