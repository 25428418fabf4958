"""A server that says it is Redis 5.0: a fake, since no wheel carries one so old.

It speaks enough of the protocol to be asked what it is, and refuses every command that
came with 6.0 or later as that version did.
"""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = "5.0.14"
_INFO = f"""# Server\r
redis_version:{VERSION}\r
redis_mode:standalone\r
# Replication\r
role:master\r
# Memory\r
maxmemory:0\r
maxmemory_policy:noeviction\r
# Persistence\r
loading:0\r
aof_enabled:1\r
"""


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while (words := self._command()) is not None:
            self.server.commands.append(words)
            self.wfile.write(self._reply(words[0].upper()))

    def _command(self) -> list[str] | None:
        head = self.rfile.readline()
        if not head.startswith(b"*"):
            return None
        words = []
        for _ in range(int(head[1:])):
            size = int(self.rfile.readline()[1:])
            words.append(self.rfile.read(size + 2)[:-2].decode(errors="replace"))
        return words

    def _reply(self, name: str) -> bytes:
        if name == "PING":
            return b"+PONG\r\n"
        if name in ("SELECT", "AUTH"):
            return b"+OK\r\n"
        if name == "TIME":
            return b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n"
        if name == "INFO":
            body = _INFO.encode()
            return b"$%d\r\n%s\r\n" % (len(body), body)
        if name == "CONFIG":
            return b"*0\r\n"
        return f"-ERR unknown command `{name}`, with args beginning with: \r\n".encode()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


@contextmanager
def old_redis() -> Iterator[tuple[str, list[list[str]]]]:
    """Yields its URL, and every command that it was sent."""
    with _Server(("127.0.0.1", 0), _Connection) as server:
        server.commands = []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}/0", server.commands
        finally:
            server.shutdown()
            thread.join()
