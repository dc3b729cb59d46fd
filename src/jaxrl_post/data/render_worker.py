"""Renders chat templates in a process of its own; run by `template`.

A template comes with a model, from anywhere. The sandbox of Jinja keeps it from
reaching out, and nothing but a process of its own keeps it from computing for
ever or filling the memory. Reads a request and writes an answer, each one line
of JSON, until its input ends. Imports neither jax nor the package: it starts in
a tenth of a second.
"""

import datetime
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.sandbox

LIMIT_S = 1.0  # of computing, for one request
LIMIT_BYTES = 1 << 30  # of address space
LIMIT_CHARS = 1 << 24  # of a template, and of a text


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Jinja's own filter escapes for HTML, which no model was trained on.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
  """Compiles a template in the environment that `transformers` gives it.

  Args:
    source: Jinja; `{% generation %}` and its end mark text and change nothing.

  Raises:
    jinja2.TemplateError: and whatever else a wrong template makes Jinja raise.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _raise_exception
  source = re.sub(
    r"(\{%[-+]?\s*)generation(\s*[-+]?%\})", r"\1if true\2", source
  )
  source = re.sub(
    r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})", r"\1endif\2", source
  )
  return environment.from_string(source)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
  """Renders one template with several sets of variables.

  Args:
    request: `source`; `calls`, a list of variables by name; and `now`, seconds
      since 1970, the one time that all calls are shown, in UTC.

  Returns:
    `texts`, one a call; or `error`, the template's own message in one line.
  """
  now = datetime.datetime.fromtimestamp(request["now"], datetime.UTC)
  try:
    template = compiled(request["source"])
    texts = [
      template.render({"strftime_now": now.strftime, **variables})
      for variables in request["calls"]
    ]
  # Purpose: what a foreign template raises, memory and recursion too, is told.
  except BaseException as error:
    words = " ".join(str(error).split()) or type(error).__name__
    return {"error": words[:500]}
  if any(len(text) > LIMIT_CHARS for text in texts):
    return {"error": f"a text of more than {LIMIT_CHARS} characters"}
  return {"texts": texts}


def main() -> None:
  """Answers until the input ends, or a request takes more than it may.

  `SIGPROF`, which nobody catches, ends the process after `LIMIT_S` of
  computing; waiting for a busy machine does not count.
  """
  resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  signal.signal(signal.SIGPROF, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
  for line in sys.stdin:
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    text = json.dumps(answer(request))
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(text, flush=True)


if __name__ == "__main__":
  main()
