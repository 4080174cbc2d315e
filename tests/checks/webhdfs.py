"""A small server that speaks WebHDFS over a folder, as a name node and a data node in one."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

ERRORS = {
    FileNotFoundError: (404, "FileNotFoundException"),
    PermissionError: (403, "AccessControlException"),
    FileExistsError: (403, "FileAlreadyExistsException"),
}


class Handler(BaseHTTPRequestHandler):
    """One request; `server.folder` is the root, `server.refuses` requests are dropped first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a small answer would be held back for some 40 ms

    def log_message(self, *_):
        pass

    def handle_any(self):
        if self.server.refuses > 0:
            self.server.refuses -= 1
            self.close_connection = True
            self.connection.close()
            return
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.inside = unquote(url.path.removeprefix("/webhdfs/v1"))
        self.where = self.server.folder / self.inside.lstrip("/")
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        operation = self.query["op"].upper()
        self.server.seen.append((operation, self.inside, self.query.get("user.name")))
        try:
            getattr(self, operation)()
        except OSError as error:
            code, name = ERRORS.get(type(error), (500, "IOException"))
            words = {"exception": name, "javaClassName": f"java.{name}", "message": str(error)}
            self.reply({"RemoteException": words}, code)

    do_GET = do_PUT = do_POST = do_DELETE = handle_any

    def reply(self, told=None, code=200, content=b"", **headers):
        content = content if told is None else json.dumps(told).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def status(self, path, suffix=""):
        found = os.stat(path)
        kind = "DIRECTORY" if path.is_dir() else "FILE"
        return {"pathSuffix": suffix, "type": kind, "length": found.st_size, "permission": "755"}

    def LISTSTATUS(self):
        if self.where.is_dir():
            found = [self.status(each, each.name) for each in sorted(self.where.iterdir())]
        else:
            found = [self.status(self.where)]
        self.reply({"FileStatuses": {"FileStatus": found}})

    def GETFILESTATUS(self):
        self.reply({"FileStatus": self.status(self.where)})

    def MKDIRS(self):
        self.where.mkdir(parents=True, exist_ok=True)
        self.reply({"boolean": True})

    def RENAME(self):
        target = self.server.folder / self.query["destination"].lstrip("/")
        fine = self.where.exists() and not target.exists() and target.parent.is_dir()
        if fine:
            self.where.rename(target)
        self.reply({"boolean": fine})

    def DELETE(self):
        if self.where.is_dir():
            shutil.rmtree(self.where)
        else:
            self.where.unlink()
        self.reply({"boolean": True})

    def OPEN(self):
        start, length = int(self.query.get("offset", 0)), self.query.get("length")
        content = self.where.read_bytes()[start:]
        self.reply(content=content if length is None else content[: int(length)])

    def CREATE(self):
        if "data" not in self.query:
            self.to_data_node()
        elif self.where.exists() and self.query.get("overwrite") == "false":
            raise FileExistsError(self.inside)
        else:
            self.where.parent.mkdir(parents=True, exist_ok=True)
            self.where.write_bytes(self.body)
            self.reply(code=201)

    def APPEND(self):
        if "data" not in self.query:
            self.to_data_node()
        else:
            with self.where.open("ab") as file:
                file.write(self.body)
            self.reply()

    def to_data_node(self):
        host, port = self.server.server_address
        self.reply(code=307, Location=f"http://{host}:{port}{self.path}&data=true")


@contextmanager
def webhdfs(folder: Path) -> Iterator[ThreadingHTTPServer]:
    """Serve a folder; the server's `port` is free, `seen` are its requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.seen, server.refuses = folder, [], 0
    server.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
