"""Connections that end by a deadline, whatever the other side does meanwhile.

A timeout of a socket is for one look at it: who says a byte now and then keeps
it open for ever. Here addresses to try, the handshake, the status, headers and
the body share what is left. Only what looks names up has times of its own.
"""

import contextlib
import functools
import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def opener(deadline: float) -> Iterator[urllib.request.OpenerDirector]:
  """Yields what opens addresses as they are: no redirection is followed.

  Args:
    deadline: in seconds of `time.monotonic`. What is open then is cut, which
      reads as its end: whoever reads has to look at the clock.
  """
  with contextlib.ExitStack() as stack:
    made = urllib.request.OpenerDirector()
    plain: Any = urllib.request.HTTPHandler()
    secure: Any = urllib.request.HTTPSHandler()
    for handler, name, kind in (
      (plain, "http_open", http.client.HTTPConnection),
      (secure, "https_open", http.client.HTTPSConnection),
    ):
      connection = functools.partial(_connection, kind, deadline, stack)
      opened = functools.partial(_opened, handler, connection)
      setattr(handler, name, opened)
    for handler in (
      urllib.request.ProxyHandler(),
      plain,
      secure,
      urllib.request.HTTPDefaultErrorHandler(),
      urllib.request.HTTPErrorProcessor(),
      urllib.request.UnknownHandler(),
    ):
      made.add_handler(handler)
    yield made


def _opened(handler: Any, connection: Callable[..., Any], request: Any) -> Any:
  return handler.do_open(connection, request)


def _connection(
  kind: Callable[..., Any],
  deadline: float,
  stack: contextlib.ExitStack,
  host: str,
  **options: Any,
) -> Any:
  """Makes a connection whose socket is cut at the deadline."""
  made = kind(host, **options)

  def connect(address: tuple[str, int], *_: Any) -> socket.socket:
    return _connected(address, deadline, stack)

  made._create_connection = connect
  return made


def _connected(
  address: tuple[str, int], deadline: float, stack: contextlib.ExitStack
) -> socket.socket:
  """Connects to the first of a name's places that answers."""
  failed: OSError = OSError("no address")
  for *_, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
    left = max(deadline - time.monotonic(), 0.001)
    try:
      made = socket.create_connection((str(place[0]), int(place[1])), left)
    except OSError as error:
      failed = error
      continue
    # Of one's own, as TLS takes the other over, and who reads may close it.
    held = stack.enter_context(made.dup())
    left = max(deadline - time.monotonic(), 0.001)
    timer = threading.Timer(left, _cut, (held,))
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    return made
  raise failed


def _cut(held: socket.socket) -> None:
  with contextlib.suppress(OSError):
    held.shutdown(socket.SHUT_RDWR)
