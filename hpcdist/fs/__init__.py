"""File systems: this machine's, HDFS, and whatever `fsspec` knows, by the same verbs.

Read in this order: `base` (the verbs), `local`, `remote` (any file system of fsspec), `hdfs`,
`urls` (which of them a URL means). Nothing here communicates: each rank speaks for itself.
"""

from hpcdist.fs.base import FileSystem as FileSystem
from hpcdist.fs.hdfs import HDFSClient as HDFSClient
from hpcdist.fs.local import LocalFS as LocalFS
from hpcdist.fs.remote import RemoteFS as RemoteFS
from hpcdist.fs.urls import file_system as file_system, is_url as is_url, open as open
