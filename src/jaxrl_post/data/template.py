"""Chat templates: where a model keeps them, and messages to text through them.

Templates are Jinja from the model's folder, and are rendered by
`render_worker`, a process that is ended when one takes too much.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post import types
from jaxrl_post.data import render_worker

# A turn of a conversation: `role`, and `content` or `tool_calls`.
Message = Mapping[str, Any]

# The time that templates which print one are told, in seconds since 1970: the
# start of 26 July 2024 in UTC. Llama 3's own templates name that day where they
# are told none. It is no setting of a run and not today, so that a prompt is
# the same in each process of a run, when it goes on, and in the next one.
NOW_S = 1_721_952_000

_WAIT_S = 60.0  # for the renderer, on a machine that has other things to do
_LOCK = threading.Lock()
# Stands for an answer: letters that no template cuts off or turns over.
_ANSWER = "ANSWERxTHATxSTAYSxASxITxIS"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)\s*", re.DOTALL)


# ---------------------------------------------------------------- rendering


def render(
  source: str, *calls: Mapping[str, Any], place: str = "prompt"
) -> list[str]:
  """Renders a template once for each set of variables.

  Args:
    source: Jinja.
    *calls: variables by name, of what JSON can hold.
    place: names what is rendered in errors.

  Returns:
    The texts. To each of them it is `NOW_S`, whatever the clock says.

  Raises:
    InputError: with the template's own message where it refuses; and where it
      takes more time, memory or room than `render_worker` allows.
  """
  answer = _answer(source, calls)
  if "texts" in answer:
    return answer["texts"]
  shown = repr(calls[-1].get("messages"))
  raise types.InputError(
    f"{place}: expected messages that the chat template takes, got "
    f"{shown[:200]}: {answer['error']}. Correct the data or the template."
  )


def _answer(source: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  if len(source) > render_worker.LIMIT_CHARS:
    return {"error": f"a template of {len(source)} characters"}
  request = {"source": source, "calls": calls, "now": NOW_S}
  try:
    line = json.dumps(request).encode() + b"\n"
  except (TypeError, ValueError, RecursionError) as error:
    return {"error": f"no JSON: {error}"}
  with _LOCK:
    process = _process(os.getpid())
    try:
      answer = _exchange(process, line)
    # Purpose: after an interruption the next answer would be to this request.
    except BaseException:
      process.kill()
      _end(process)
      raise
    whole = answer.endswith(b"\n")
    return json.loads(answer) if whole else {"error": _end(process)}


@functools.cache
def _process(pid: int) -> subprocess.Popen[bytes]:
  """Starts the renderer of a process; a fork has one of its own."""
  del pid
  return subprocess.Popen(
    [sys.executable, "-P", render_worker.__file__],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    start_new_session=True,  # Ctrl-C is for this process.
  )


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
  """Returns the renderer's answer; nothing if it ended or the wait did."""
  assert process.stdin is not None and process.stdout is not None
  try:
    process.stdin.write(line)
    process.stdin.flush()
  except BrokenPipeError:
    return b""
  with selectors.DefaultSelector() as selector:
    selector.register(process.stdout, selectors.EVENT_READ)
    if not selector.select(_WAIT_S):
      return b""
  return process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> str:
  """Ends a renderer, if it has not ended itself, and says why it did."""
  _process.cache_clear()
  why = f"no answer in {_WAIT_S:g} s"
  try:
    code = process.wait(timeout=1.0)
    why = f"the renderer's end with code {code}"
    if code == -signal.SIGPROF:
      why = f"more than {render_worker.LIMIT_S:g} s of computing"
  except subprocess.TimeoutExpired:
    process.kill()
  with contextlib.suppress(BrokenPipeError), process:
    pass  # Closes its pipes, and waits.
  return why


def find(
  folder: pathlib.Path, settings: Mapping[str, Any]
) -> tuple[str | None, str | None]:
  """Finds the chat templates of a model.

  Args:
    folder: of the model; its `chat_template.jinja` goes before the settings.
    settings: of tokenizer_config.json or of a file like it.

  Returns:
    The template for conversations and, if there is one, that for conversations
    with tools, which is called `tool_use`.

  Raises:
    InputError: for something that is no template, and for named ones of which
      none is called `default`.
  """
  file = folder / "chat_template.jinja"
  if file.is_file():
    tool = folder / "additional_chat_templates" / "tool_use.jinja"
    return _text(file), _text(tool) if tool.is_file() else None
  found = settings.get("chat_template")
  if found is None or isinstance(found, str):
    return found, None
  try:
    named = {entry["name"]: entry["template"] + "" for entry in found}
  except (TypeError, KeyError) as error:
    raise types.InputError(
      f"{folder}/tokenizer_config.json: expected chat_template as text or a "
      f"list of named ones, got {repr(found)[:100]}. Correct the file."
    ) from error
  if "default" not in named:
    raise types.InputError(
      f"{folder}/tokenizer_config.json: expected a chat template called "
      f"default, got {sorted(named)}. Put the one to use into "
      "chat_template.jinja."
    )
  return named["default"], named.get("tool_use")


def _text(file: pathlib.Path) -> str:
  try:
    return file.read_text(encoding="utf-8")
  except ValueError as error:
    raise types.InputError(
      f"{file}: expected UTF-8, got {error}. Fetch the checkpoint again."
    ) from error


# ------------------------------------------------------------ conversations


def messages_to_text(
  source: str,
  messages: Sequence[Message],
  *,
  names: Mapping[str, str],
  tools: Sequence[Mapping[str, Any]] = (),
) -> str:
  """Renders a conversation up to where the next answer begins.

  Args:
    source: Jinja.
    messages: the conversation.
    names: special tokens by the names that templates use.
    tools: JSON schemas of the functions that the model may call.

  Raises:
    InputError: as `render`, and for a message without a role or a content.
  """
  _check(messages, "prompt")
  return render(source, _variables(messages, names, tools))[0]


def whole(
  source: str, messages: Sequence[Message], *, names: Mapping[str, str]
) -> str:
  """Renders a conversation that has ended: no next answer begins.

  Args:
    source: Jinja.
    messages: the conversation, its last answer included.
    names: special tokens by the names that templates use.

  Raises:
    InputError: as `messages_to_text`.
  """
  _check(messages, "conversation")
  variables = _variables(messages, names, ())
  variables["add_generation_prompt"] = False
  return render(source, variables, place="conversation")[0]


def next_turn(
  source: str,
  messages: Sequence[Message],
  *,
  names: Mapping[str, str],
  tools: Sequence[Mapping[str, Any]] = (),
) -> str:
  """Renders what stands between an answer and the next one.

  The answer itself is not rendered: a stand-in is, with the new messages behind
  it, and what stands behind the stand-in is returned. So it does not matter
  what a template does to the words of earlier answers; Qwen3's takes their
  thoughts out, which stay here as the model wrote them.

  Args:
    source: Jinja.
    messages: what came after the answer: results of tools, or a user's words.
    names: special tokens by the names that templates use.
    tools: as in the conversation so far.

  Returns:
    The text from the end of the answer's turn, its end token first, to where
    the next answer begins.

  Raises:
    InputError: as `messages_to_text`; and for a template that changes earlier
      turns when there are new ones, thoughts excepted: nothing that could be
      appended makes its conversation.
  """
  _check(messages, "messages")
  turns = (
    {"role": "user", "content": "."},
    {"role": "assistant", "content": _ANSWER},
  )
  asked, whole = render(
    source,
    _variables(turns[:1], names, tools),
    _variables((*turns, *messages), names, tools),
    place="messages",
  )
  before, mark, text = whole.partition(_ANSWER)
  if not mark or _words(asked) != _words(before):
    raise types.InputError(
      "messages: expected a chat template that leaves earlier turns as they "
      "are when new ones follow, got one that rewrites them. Take another "
      "template, or one conversation a turn."
    )
  return text


def _variables(
  messages: Sequence[Message],
  names: Mapping[str, str],
  tools: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  return {
    **names,
    "messages": [dict(message) for message in messages],
    "add_generation_prompt": True,
    "tools": [dict(tool) for tool in tools] or None,
    "documents": None,
  }


def _words(text: str) -> str:
  """Returns a text without thoughts, which templates put in and take out."""
  return _THOUGHTS.sub("", text).rstrip()


def _check(messages: Sequence[Message], place: str) -> None:
  for message in messages:
    if "role" not in message or not message.keys() & {"content", "tool_calls"}:
      raise types.InputError(
        f"{place}: expected messages with role and content, got "
        f"{repr(message)[:200]}. Correct the data."
      )
