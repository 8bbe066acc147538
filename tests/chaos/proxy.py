"""A TCP proxy on loopback that spoils what passes: between workers and one MongoDB server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from enum import Enum

CHUNK = 64 * 1024


class Mode(Enum):
    PASS = "passes everything"
    DELAY = "delays each piece by 0.3 s"
    TRICKLE = "lets 200 bytes pass, then waits"
    DEAF = "swallows what the client says"
    MUTE = "swallows what the server says"
    RESET = "resets every connection"


class Proxy:
    """Listens on ``port`` and connects to ``target``. ``mode`` may be set from any thread, at any time."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.mode = Mode.PASS
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name=f"proxy-{target}", daemon=True)
        self._listening = threading.Event()
        self.port = 0
        self._thread.start()
        assert self._listening.wait(10)

    def spoil(self, mode: Mode) -> None:
        self.mode = mode
        if mode is Mode.RESET:
            self._loop.call_soon_threadsafe(self._reset_all)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        self._server.close()
        self._reset_all()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                # Closed without lingering, TCP says RST instead of FIN.
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self.mode is Mode.RESET:
            to_client.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the server is down
            to_client.transport.abort()
            return
        self._writers |= {to_client, to_server}
        try:
            await asyncio.gather(
                self._pump(from_client, to_server, Mode.DEAF), self._pump(from_server, to_client, Mode.MUTE)
            )
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for writer in (to_client, to_server):
                self._writers.discard(writer)
                writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, swallowed_in: Mode) -> None:
        while data := await source.read(CHUNK):
            mode = self.mode
            if mode is swallowed_in:
                # What follows would be the middle of a message: the connection says nothing more.
                while await source.read(CHUNK):
                    pass
                break
            if mode is Mode.DELAY:
                await asyncio.sleep(0.3)
            if mode is Mode.TRICKLE and len(data) > 200:
                sink.write(data[:200])
                await sink.drain()
                await asyncio.sleep(0.5)
                data = data[200:]
            sink.write(data)
            await sink.drain()
        sink.transport.abort()
