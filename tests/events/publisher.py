"""A publisher of KV events that can lose messages: what vLLM's does over ZMQ, in as few lines."""

from __future__ import annotations

import threading
from collections.abc import Container

import zmq


class Publisher:
    """Sends batches to whoever follows, and again to whoever asks.

    Args:
      lost: sequence numbers of batches that are kept and not sent.
      forgotten: of batches that cannot be had again either.
      like: a publisher that was closed, in whose place this one is.
    """

    def __init__(
        self, lost: Container[int] = (), forgotten: Container[int] = (), like: Publisher | None = None
    ) -> None:
        self._lost, self._forgotten = lost, forgotten
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.endpoint = _bound(self._socket, like and like.endpoint)
        self._replies = self._context.socket(zmq.ROUTER)
        self.replay_endpoint = _bound(self._replies, like and like.replay_endpoint)
        self._sent: list[bytes] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def wait_for_follower(self) -> None:
        """Until somebody subscribed."""
        assert self._socket.poll(10_000)
        self._socket.recv()

    def send(self, payload: bytes, seq: int | None = None) -> None:
        number = len(self._sent) if seq is None else seq
        self._sent.append(payload)
        if number not in self._lost:
            self._socket.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def _serve(self) -> None:
        while not self._stopped.is_set():
            if not self._replies.poll(20):
                continue
            client, _, start = self._replies.recv_multipart()
            for seq in range(int.from_bytes(start, "big"), len(self._sent)):
                if seq not in self._forgotten:
                    message = (client, b"", b"kv", seq.to_bytes(8, "big"), self._sent[seq])
                    self._replies.send_multipart(message)
            self._replies.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)


def _bound(socket: zmq.Socket, endpoint: str | None) -> str:
    """Address at which the socket listens: the endpoint, or any port."""
    if endpoint is None:
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    socket.bind(endpoint)
    return endpoint
