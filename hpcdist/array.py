"""The array API standard on arrays across ranks: ``import hpcdist.array as xp``."""

from hpcdist.mesh import random as random
from hpcdist.mesh.namespace import *  # noqa: F403 - it is that namespace
from hpcdist.mesh.namespace import (
    __all__ as __all__,
    __array_api_version__ as __array_api_version__,
    __array_namespace_info__ as __array_namespace_info__,
)
