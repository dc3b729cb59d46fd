"""Connections between the processes of a run: found, greeted, framed.

Every process other than the first connects to it. What they say is pickled, so
a stranger is sent away before a byte of his is read as such.
"""

import hmac
import os
import secrets
import socket
import threading
import time
from typing import Any

from jaxrl_post import types

# Longest wait for all processes to be there, in seconds.
START_S = 300.0
_GREETING = 1024  # bytes of the first message, at most
_STORE_KEY = "jaxrl_post/head"


class Link:
  """A connection to one process, with messages instead of a stream.

  Attributes:
    name: of the process at the other end, for people.
    heard: when the last bytes came, by time.monotonic().
  """

  def __init__(self, sock: socket.socket, name: str) -> None:
    """Takes a connected socket."""
    self.name = name
    self.heard = time.monotonic()
    self._sock = sock
    self._file = sock.makefile("rb")
    self._sending = threading.Lock()

  @property
  def busy(self) -> bool:
    """Whether another thread is sending right now."""
    return self._sending.locked()

  def send(self, data: bytes) -> None:
    """Sends a message; waits while the other end does not read.

    Raises:
      OSError: the connection is lost.
    """
    with self._sending:
      self._sock.sendall(len(data).to_bytes(8, "big") + data)

  def last_words(self, data: bytes) -> None:
    """Sends without waiting for a peer that does not listen."""
    self._sock.settimeout(1.0)
    if self._sending.acquire(timeout=1.0):
      try:
        self._sock.sendall(len(data).to_bytes(8, "big") + data)
      finally:
        self._sending.release()

  def receive(self, most: int | None = None) -> bytes:
    """Waits for a message and returns it.

    Args:
      most: longest that is accepted, in bytes.

    Raises:
      OSError: the connection is lost, or the message too long.
    """
    size = int.from_bytes(self._bytes(8), "big")
    if most is not None and size > most:
      raise ConnectionError(f"it sent {size} bytes for at most {most}")
    data = self._bytes(size)
    self.heard = time.monotonic()
    return data

  def _bytes(self, count: int) -> bytes:
    parts = []
    while count:
      part = self._file.read1(min(count, 1 << 20))
      if not part:
        raise ConnectionError("its connection closed")
      self.heard = time.monotonic()
      parts.append(part)
      count -= len(part)
    return b"".join(parts)


def listen(client: Any, count: int) -> dict[int, Link]:
  """Waits, in the first process, for all others to connect.

  Args:
    client: key-value store that all processes reach; it is told the port.
    count: of all processes.

  Returns:
    A link to each of the others, by index.

  Raises:
    RunError: one did not come in time.
  """
  deadline = time.monotonic() + START_S
  links: dict[int, Link] = {}
  secret = secrets.token_hex(16)
  with socket.create_server(("", 0), backlog=count) as server:
    port = server.getsockname()[1]
    client.key_value_set(_STORE_KEY, f"{port} {secret} {me()}")
    while len(links) < count - 1:
      server.settimeout(max(deadline - time.monotonic(), 0.001))
      try:
        sock, _ = server.accept()
        number, link = greet(sock, secret, count)
      except TimeoutError as error:
        missing = set(range(1, count)) - links.keys()
        raise types.RunError(
          f"start: expected {count} processes within {START_S:g} s, got no "
          f"word of {sorted(missing)}"
        ) from error
      if link is not None:
        links[number] = link
  return links


def greet(
  sock: socket.socket, secret: str, count: int
) -> tuple[int, Link | None]:
  """Reads who connects; a stranger is sent away.

  Args:
    sock: just accepted.
    secret: that the others have from the store.
    count: of all processes.

  Returns:
    Index and link; 0 and None for a stranger.
  """
  sock.settimeout(10.0)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  link = Link(sock, "a process that connects")
  try:
    # Not pickled: whoever can reach the port may have written it.
    given, number, name = link.receive(_GREETING).decode().split(" ", 2)
    index = int(number)
  except (OSError, ValueError):
    index, given, name = 0, "", ""
  known = hmac.compare_digest(given.encode(), secret.encode())
  if not (known and 0 < index < count):
    sock.close()
    return 0, None
  sock.settimeout(None)
  link.name = f"process {index} of {count} ({name})"
  return index, link


def connect(client: Any, index: int, count: int, address: str) -> Link:
  """Connects to the first process.

  Args:
    client: key-value store that all processes reach.
    index: of this process.
    count: of all processes.
    address: HOST:PORT of something in the first process.

  Returns:
    The link, greeted.
  """
  limit_ms = int(START_S * 1000)
  text = client.blocking_key_value_get(_STORE_KEY, limit_ms)
  port, secret, name = text.split(" ", 2)
  # The coordinator of JAX is in process 0.
  host = address.rpartition(":")[0].strip("[]")
  sock = socket.create_connection((host, int(port)), START_S)
  sock.settimeout(None)
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  link = Link(sock, f"process 0 of {count} ({name})")
  link.send(f"{secret} {index} {me()}".encode())
  return link


def me() -> str:
  """Returns host and number of this process, for people."""
  return f"{socket.gethostname()}, pid {os.getpid()}"
