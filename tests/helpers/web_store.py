"""A store on the network: WebHDFS, as much of it as fsspec uses, over a folder of this machine."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit


class WebStore:
    """Serves a folder at `url`. Once `left` files were begun, it refuses all others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left: float = float("inf")
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"webhdfs://127.0.0.1:{self._server.server_address[1]}/runs"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> WebStore:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: WebStore

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        op, path, query = self._asked()
        if not path.exists():
            self._refuse("FileNotFoundException", f"{path} is not there")
        elif op == "OPEN":
            begin = int(query.get("offset", ["0"])[0])
            content = path.read_bytes()[begin:]
            self._answer(content[: int(query["length"][0])] if "length" in query else content)
        elif op == "GETFILESTATUS":
            self._answer({"FileStatus": _status(path, "")})
        else:
            entries = sorted(path.iterdir()) if path.is_dir() else [path]
            found = [_status(one, one.name if path.is_dir() else "") for one in entries]
            self._answer({"FileStatuses": {"FileStatus": found}})

    def do_PUT(self) -> None:
        op, path, _ = self._asked()
        if op == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self._answer({"boolean": True})
        elif "noredirect" not in self.path:
            self.store.left -= 1
            if self.store.left < 0:
                self._refuse("IOException", "the disk of this store is full")
            else:
                self._redirect()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            self._answer({})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, path, _ = self._asked()
        if "noredirect" not in self.path:
            self._redirect()
            return
        with path.open("ab") as file:
            file.write(content)
        self._answer({})

    def do_DELETE(self) -> None:
        _, path, _ = self._asked()
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        self._answer({"boolean": True})

    def _asked(self) -> tuple[str, Path, dict[str, list[str]]]:
        words = urlsplit(self.path)
        query = parse_qs(words.query)
        name = unquote(words.path).removeprefix("/webhdfs/v1").strip("/")
        return query.get("op", [""])[0].upper(), self.store.folder / name, query

    def _redirect(self) -> None:
        host, port = self.server.server_address[:2]
        self.send_response(307)
        self.send_header("Location", f"http://{host!s}:{port}{self.path}&noredirect=true")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, content: object, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, kind: str, text: str) -> None:
        status = 404 if kind == "FileNotFoundException" else 500
        self._answer({"RemoteException": {"exception": kind, "message": text}}, status)


def _status(path: Path, name: str) -> dict[str, object]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": name, "type": kind, "length": path.stat().st_size}
