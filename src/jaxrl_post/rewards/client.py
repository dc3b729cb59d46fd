"""JSON to a server and back, within a deadline; not a reward.

What may pass (no connection, a timeout, 408, 409, 425, 429, 5xx) is tried again
after a pause that grows and is drawn by a seed, so that many workers do not
come back at once and a run repeats. Nothing but the standard library.
"""

import contextlib
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from jaxrl_post import types
from jaxrl_post.rewards import combine, wire

MAX_ANSWER = 8 * 2**20
_SLOW = "none, or one that came too slowly"
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
_PASSING = (408, 409, 425, 429, *range(500, 600))
# Nothing in a request can help against these: the settings are wrong. None goes
# where a server sends it, as the key would go there, too.
_WRONG = (*range(300, 400), 401, 403, 404, 405)


def check_url(place: str, url: Any) -> None:
  """Refuses what is no address, or has a password in it.

  Raises:
    types.InputError: it is not http or https, names no host, or no port where
      one has to be, holds what no request can, or a user.
  """
  is_text = isinstance(url, str)
  if is_text and "@" in url.partition("://")[2].partition("/")[0]:
    raise types.InputError(
      f"{place}: expected an address without a user or a password, got one that"
      " is not shown. Take them out."
    )
  try:
    parts = urllib.parse.urlsplit(url if is_text else "")
    host = parts.hostname or ""
    host.encode("idna")
    known = parts.scheme in ("http", "https") and host and parts.port != 0
  except ValueError:
    known = False
  if not known or not all("!" <= c <= "~" for c in url):
    raise types.InputError(
      f"{place}: expected http://HOST... or https://HOST... in printable ASCII "
      f"without spaces, got {_shown(url)!r}. Correct it."
    )


def check_header(place: str, value: str) -> None:
  """Refuses what no header can hold, without telling what it is.

  Raises:
    types.InputError: a character is not printable ASCII, as the line break
      that a file with a key ends with.
  """
  for at, character in enumerate(value, 1):
    if not " " <= character <= "~":
      raise types.InputError(
        f"{place}: expected printable ASCII, got another character (number "
        f"{at} of {len(value)}; the value is not shown). Take it out."
      )


def post(
  url: str,
  body: Any,
  *,
  deadline_s: float,
  attempts: int,
  seed: str,
  headers: Mapping[str, str] | None = None,
) -> Any:
  """Sends JSON and returns the JSON that comes back.

  Args:
    url: where to.
    body: what JSON can hold.
    deadline_s: for all attempts together, in seconds.
    attempts: at most so many, at least one.
    seed: of the pauses between them.
    headers: beside the content's type; they are never shown.

  Returns:
    The answer of the first attempt with status 200, decoded.

  Raises:
    types.InputError: the server says that address or key is wrong, the body
      cannot be JSON, or a header is none.
    types.RunError: no attempt had an answer in time, or it was no JSON.
  """
  try:
    data = json.dumps(body, allow_nan=False).encode()
  except (TypeError, ValueError, RecursionError) as error:
    raise types.InputError(
      f"reward server {_shown(url)}: expected references that JSON can hold, "
      f"got {combine.one_line(str(error))}. Use numbers, text, lists."
    ) from error
  for name, value in (headers or {}).items():
    check_header(f"reward server {_shown(url)}: header {name}", value)
  request = urllib.request.Request(
    url, data, {"Content-Type": "application/json", **(headers or {})}
  )
  draw = random.Random(seed)
  deadline = time.monotonic() + deadline_s
  reason, made = "", 0
  for attempt in range(attempts):
    made += 1
    answer, reason, least = _attempt(request, deadline)
    if not reason:
      return _decoded(url, answer)
    longest = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
    pause = max(least, draw.uniform(longest / 2, longest))
    if made == attempts or time.monotonic() + pause >= deadline:
      break
    threading.Event().wait(pause)
  raise types.RunError(
    f"reward server {_shown(url)}: expected an answer within {deadline_s:g} s, "
    f"got {reason} (attempts: {made})"
  )


def _attempt(
  request: urllib.request.Request, deadline: float
) -> tuple[bytes, str, float]:
  """Returns an answer, or why there is none and how long to wait at least."""
  left = max(deadline - time.monotonic(), 0.001)
  with wire.opener(deadline) as opener:
    try:
      with opener.open(request, timeout=left) as response:
        body = _body(response)
      if time.monotonic() >= deadline:  # What is cut then reads as its end.
        raise TimeoutError(_SLOW)
      return body, "", 0.0
    except urllib.error.HTTPError as error:
      with error:
        return b"", *_passing(request.full_url, error)
    except (OSError, http.client.HTTPException) as error:
      reason = _SLOW if time.monotonic() >= deadline else error
      reason = getattr(reason, "reason", reason)
      return b"", combine.one_line(f"{reason}" or type(error).__name__), 0.0


def _passing(url: str, error: urllib.error.HTTPError) -> tuple[str, float]:
  """Returns a status that may pass, and how long to wait; raises another."""
  status = combine.one_line(f"status {error.code} {error.reason}")
  if error.code in _PASSING:  # Its body may never come.
    asked = error.headers.get("Retry-After", "")
    return status, float(asked) if asked.isdecimal() else 0.0
  if error.code in _WRONG:
    place = error.headers.get("Location")
    place = f" to {combine.one_line(_shown(place))}" if place else ""
    raise types.InputError(
      f"reward server {_shown(url)}: expected status 200, got {status}{place}. "
      "Correct the address, or the key."
    ) from None
  said, response = b"", error.fp
  with contextlib.suppress(OSError, http.client.HTTPException):
    if isinstance(response, http.client.HTTPResponse):
      said = response.read1(1000)
  raise types.RunError(
    f"reward server {_shown(url)}: expected status 200, got {status}: "
    f"{combine.one_line(said.decode(errors='replace'))}"
  ) from None


def _body(response: http.client.HTTPResponse) -> bytes:
  """Reads a body that may be of any size."""
  parts, size = [], 0
  while part := response.read1(1 << 16):
    parts.append(part)
    size += len(part)
    if size > MAX_ANSWER:
      raise http.client.HTTPException(f"more than {MAX_ANSWER} bytes")
  if response.length:
    raise http.client.IncompleteRead(b"", response.length)
  return b"".join(parts)


def _shown(url: Any) -> Any:
  """Returns what of an address may be told: keys may stand behind its path."""
  if not isinstance(url, str):
    return url
  return url.partition("?")[0].rpartition("@")[2][:200]


def _decoded(url: str, answer: bytes) -> Any:
  try:
    return json.loads(answer)
  except (ValueError, RecursionError) as error:
    said = combine.one_line(answer[:200].decode(errors="replace"))
    kind = "JSON" if isinstance(error, ValueError) else "JSON of fewer levels"
    raise types.RunError(
      f"reward server {_shown(url)}: expected {kind}, got {said!r}"
    ) from error
