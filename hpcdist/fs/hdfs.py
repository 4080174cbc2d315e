"""`HDFSClient`: files in Hadoop, by WebHDFS or, where Java is there, by Hadoop's own library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from hpcdist.errors import UsageError
from hpcdist.fs.remote import Fsspec, fsspec_of

_NAME, _UGI = "fs.default.name", "hadoop.job.ugi"
_HTTP = "dfs.namenode.http-address"
_WEB_PORT = 9870
"""Where a name node of Hadoop 3 answers WebHDFS, unless it is told otherwise."""

_KNOWN = (_NAME, "fs.defaultFS", _UGI, _HTTP)


@final
class HDFSClient(Fsspec):
    """The files of a Hadoop cluster, or of another store whose name fsspec knows.

    No ``hadoop fs`` is started. ``hdfs://host:port`` goes by Hadoop's library, if pyarrow and this
    library are there, else by WebHDFS; ``webhdfs://host:port`` and ``swebhdfs://`` by WebHDFS,
    which needs the package requests alone. Methods raise `FSTimeOut` when the time is over.

    Args:
        hadoop_home: where Hadoop is installed, for its library; may be "".
        configs: "fs.default.name" (or "fs.defaultFS"), a URL; "hadoop.job.ugi",
            "user" or "user,password"; "dfs.namenode.http-address", "host:port" of WebHDFS, where
            the first names another port than 9870 for it.
        time_out: milliseconds for which a connection that fails is tried again.
        sleep_inter: milliseconds between two tries.

    Raises:
        UsageError: a setting is missing or unknown, or a package is not installed.

    Example:
        >>> from hpcdist import fs
        >>> settings = {"fs.default.name": "webhdfs://namenode:9870", "hadoop.job.ugi": "me"}
        >>> client = fs.HDFSClient("", settings)  # connects when it is first used

    """

    def __init__(
        self,
        hadoop_home: str,
        configs: Mapping[str, str],
        time_out: int = 5 * 60 * 1000,
        sleep_inter: int = 1000,
    ) -> None:
        for name, value in {"time_out": time_out, "sleep_inter": sleep_inter}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise UsageError(f"{name} must be a number of milliseconds, got {value!r}")
        self._url = _default_name(configs)
        limit_s = time_out / 1e3
        self._begin(
            _connect(self._url, hadoop_home, configs, limit_s),
            limit_s,
            sleep_inter / 1e3,
            whole_by_rename=True,
        )

    def __repr__(self) -> str:
        return f"HDFSClient({self._url})"


def _default_name(configs: Mapping[str, str]) -> str:
    if not isinstance(configs, Mapping):
        raise UsageError(f"configs must be a dict, got {configs!r}")
    unknown = [name for name in configs if name not in _KNOWN]
    if unknown:
        raise UsageError(
            f"configs has {', '.join(map(repr, unknown))}, which mean nothing here; known are "
            f"{', '.join(_KNOWN)}"
        )
    url = configs.get(_NAME) or configs.get("fs.defaultFS") or ""
    if "://" not in url:
        raise UsageError(f'configs needs {_NAME!r}, such as "hdfs://host:9000", got {url!r}')
    return url


def _connect(url: str, hadoop_home: str, configs: Mapping[str, str], limit_s: float) -> Any:
    parts = urlsplit(url)
    user, _, password = configs.get(_UGI, "").partition(",")
    if parts.scheme == "hdfs" and _has_library(hadoop_home):
        return fsspec_of("hdfs", host=parts.hostname, port=parts.port or 8020, user=user or None)
    if parts.scheme not in ("hdfs", "webhdfs", "swebhdfs"):
        return fsspec_of(parts.scheme)
    host, port = parts.hostname, parts.port or _WEB_PORT
    if parts.scheme == "hdfs":
        told = urlsplit(f"//{configs.get(_HTTP, '')}")
        host, port = told.hostname or host, told.port or _WEB_PORT
    web = fsspec_of(
        "webhdfs",
        host=host,
        port=port,
        user=user or None,
        password=password or None,
        use_https=parts.scheme == "swebhdfs",
        skip_instance_cache=True,
    )
    # requests waits for ever otherwise, where a server takes the connection and does not answer
    web.session.request = partial(web.session.request, timeout=max(limit_s, 1e-3))
    return web


def _has_library(hadoop_home: str) -> bool:
    """Return whether Hadoop's library can be loaded, which needs pyarrow and a Java machine."""
    native = Path(hadoop_home or os.devnull) / "lib/native/libhdfs.so"
    if not native.is_file():
        return False
    try:
        from pyarrow import fs
    except ImportError:
        return False
    return hasattr(fs, "HadoopFileSystem")
