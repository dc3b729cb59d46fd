"""Rewards that ask a server: one on this machine, which misbehaves."""

import asyncio
import contextlib
import functools
import http.server
import inspect
import itertools
import json
import re
import socket
import threading
import time
import traceback

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import client, judge
from jaxrl_post.rewards import http as http_reward
from jaxrl_post.rewards import pool as pools
from tests.unit import pool_test


class Server:
  """Answers as a script says, one after another; or always by a function.

  Attributes:
    url: where it is.
    asked: the bodies that came, decoded, with their headers.
  """

  def __init__(self, script):
    self.asked = []
    outer = self
    lines = itertools.repeat(script) if callable(script) else iter(script)

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        outer.asked.append((body, dict(self.headers)))
        answer = next(lines)
        if callable(answer):
          answer(self, body)
        else:
          say(answer, self, body)

      def log_message(self, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.over = threading.Event()
    self._server.daemon_threads = True
    self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

  def __enter__(self):
    threading.Thread(target=self._server.serve_forever, daemon=True).start()
    return self

  def __exit__(self, *_):
    self._server.over.set()
    self._server.shutdown()
    self._server.server_close()


def say(answer, handler, body):
  """Answers with (status, JSON or bytes, headers)."""
  status, value, *headers = answer
  data = value if isinstance(value, bytes) else json.dumps(value).encode()
  handler.send_response(status)
  for name, text in (headers or [{}])[0].items():
    handler.send_header(name, text)
  handler.send_header("Content-Length", str(len(data)))
  handler.end_headers()
  with contextlib.suppress(OSError):
    handler.wfile.write(data)


def drop(handler, body):
  """Ends the connection without a word."""
  handler.connection.shutdown(socket.SHUT_RDWR)


def cut(handler, body):
  """Promises more than it says."""
  handler.send_response(200)
  handler.send_header("Content-Length", "100")
  handler.end_headers()
  handler.wfile.write(b'{"a"')
  handler.wfile.flush()
  handler.connection.shutdown(socket.SHUT_RDWR)


def stall(handler, body, *, status=503):
  """Says that it fails, and never how."""
  handler.send_response(status)
  handler.send_header("Content-Length", "100")
  handler.end_headers()
  handler.wfile.flush()
  handler.server.over.wait(60)


def drip(handler, body):
  """Says something every now and then, for ever."""
  handler.send_response(200)
  handler.send_header("Content-Length", "1000000")
  handler.end_headers()
  with contextlib.suppress(OSError):
    for _ in range(600):
      handler.wfile.write(b" ")
      handler.wfile.flush()
      threading.Event().wait(0.05)


def flood(handler, body):
  """Says more than anybody wants."""
  handler.send_response(200)
  handler.end_headers()
  with contextlib.suppress(OSError):
    for _ in range(1000):
      handler.wfile.write(b"x" * 2**20)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)


def post(server, **options):
  fields = {"deadline_s": 20.0, "attempts": 3, "seed": "0"}
  return client.post(server.url, {"x": 1}, **(fields | options))


# ------------------------------------------------------------------- client


@pytest.mark.parametrize(
  "first",
  [
    (503, {}),
    (429, {}, {"Retry-After": "0"}),
    (500, b""),
    (529, b""),
    drop,
    cut,
    stall,
  ],
)
def test_what_may_pass_is_tried_again(first):
  with Server([first, (200, {"y": 2})]) as server:
    assert post(server) == {"y": 2}
  assert [body for body, _ in server.asked] == [{"x": 1}] * 2


def test_attempts_end():
  with (
    Server([(503, {})] * 5) as server,
    pytest.raises(types.RunError, match=r"503.*attempts: 3\)"),
  ):
    post(server)
  assert len(server.asked) == 3


def test_a_redirection_is_not_followed_with_the_key():
  with Server([(200, {"y": 2})] * 3) as other:
    for status in (301, 302, 303, 307, 308):
      moved = status, b"", {"Location": other.url}
      with (
        Server([moved]) as server,
        pytest.raises(types.InputError, match=f"{status}.* to {other.url}"),
      ):
        post(server, headers={"Authorization": "Bearer secret"})
      assert len(server.asked) == 1
  assert not other.asked


def test_a_refusal_whose_reason_never_comes_is_told():
  with (
    Server([functools.partial(stall, status=400)]) as server,
    pytest.raises(types.RunError, match="got status 400"),
  ):
    post(server, deadline_s=1.0)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_wrong_address_or_key_is_the_users(status):
  with (
    Server([(status, {})]) as server,
    pytest.raises(types.InputError, match=f"got status {status}.*Correct"),
  ):
    post(server)
  assert len(server.asked) == 1


def test_another_refusal_is_told_and_not_tried_again():
  with (
    Server([(400, {"error": "too long"})]) as server,
    pytest.raises(types.RunError, match="status 400.*too long"),
  ):
    post(server)
  assert len(server.asked) == 1


def test_what_is_no_json_is_told():
  with (
    Server([(200, b"<html>")]) as server,
    pytest.raises(types.RunError, match="expected JSON, got '<html>'"),
  ):
    post(server)


@pytest.mark.parametrize(
  ("answer", "reason"),
  [(drip, "too slowly"), (flood, f"more than {client.MAX_ANSWER} bytes")],
)
def test_an_answer_without_end_is_cut(answer, reason):
  began = time.monotonic()
  with (
    Server([answer]) as server,
    pytest.raises(types.RunError, match=reason),
  ):
    post(server, deadline_s=1.0, attempts=1)
  assert time.monotonic() - began < 15


def test_a_pause_that_is_asked_for_does_not_pass_the_deadline():
  began = time.monotonic()
  with (
    Server([(429, {}, {"Retry-After": "60"})]) as server,
    pytest.raises(types.RunError, match=r"429.*attempts: 1\)"),
  ):
    post(server, deadline_s=5.0)
  assert time.monotonic() - began < 5


def test_nobody_there_is_told_with_the_reason():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(types.RunError, match="refused.*attempts: 2"):
      client.post(url, {}, deadline_s=9.0, attempts=2, seed="0")


def test_a_body_that_is_no_json_is_refused():
  for value in (float("nan"), {1, 2}):
    with pytest.raises(types.InputError, match="that JSON can hold"):
      client.post("http://x", value, deadline_s=1.0, attempts=1, seed="0")


@pytest.mark.parametrize(
  "url",
  ["", "x", "ftp://x", "http://", "http:/x"]
  + ["http://[::1", "http://x:y", "http://x:99999", "http://a..b"],
)
def test_what_is_no_address_is_refused(url):
  with pytest.raises(types.InputError, match="^a place: expected http://HOST"):
    client.check_url("a place", url)


# --------------------------------------------------------------------- http


def lengths(handler, body):
  """Scores rollouts by their length; null for an empty one."""
  rewards = [
    {"length": len(item["completion"]), "known": len(item["reference"])}
    if item["completion"]
    else None
    for item in body["rollouts"]
  ]
  say((200, {"rewards": rewards}), handler, body)


def test_c86_a_server_scores_a_batch_in_a_request():
  with Server(lengths) as server:
    cfg = pools.Rewards(
      functions=(functools.partial(http_reward.scored, url=server.url),),
      batch=3,
      timeout_s=20.0,
    )
    rollouts = [
      pool_test.rollout(uid, ["r"] * uid, "x" * (3 - uid)) for uid in range(4)
    ]
    with pools.Pool(cfg) as pool:
      made = [f.result(timeout=60) for f in pool.submit_all(rollouts)]
  assert [r.parts.get("length") for r in made] == [3, 2, 1, None]
  assert [r.parts.get("known") for r in made] == [0, 1, 2, None]
  assert made[3].failure == "no reward: None"
  sizes = [len(body["rollouts"]) for body, _ in server.asked]
  assert sorted(sizes) == [1, 3]
  assert server.asked[0][0]["rollouts"][0].keys() == {
    "prompt",
    "completion",
    "reference",
  }


@pytest.mark.parametrize(
  ("answer", "got"),
  [
    ({"rewards": [1.0]}, "got 1$"),
    ({"rewards": 1.0}, "got {'rewards': 1.0}$"),
    ([1.0, 2.0], r"got \[1.0, 2.0\]$"),
  ],
)
def test_a_server_has_to_answer_for_each(answer, got):
  rollouts = [pool_test.rollout(0), pool_test.rollout(1)]
  with (
    Server([(200, answer)]) as server,
    pytest.raises(types.RunError, match=f"with 2 of them, {got}"),
  ):
    http_reward.scored(rollouts, [None, None], url=server.url)


# -------------------------------------------------------------------- judge


def chat(text):
  return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def ask(server, answer="4", **fields):
  who = judge.Judge(url=server.url, model="m", **({"attempts": 1} | fields))
  given = pool_test.rollout(0, text=answer)
  return asyncio.run(judge.graded(given, "four", judge=who))


@pytest.mark.parametrize(
  ("text", "earned"),
  [
    ("It is right.\nScore: 10", 1.0),
    ("Score: 0", 0.0),
    ("Score: 3? No. Score: **7**", 0.7),
    ("Score: 2.5", 0.25),
    ("Score: 3 Score:", 0.3),
  ],
)
def test_the_last_score_counts(text, earned):
  with Server([chat(text)]) as server:
    assert ask(server) == pytest.approx(earned)


@pytest.mark.parametrize(
  "text", ["", "good", "Score: 11", "Score: 9 Score: -1", "Score: ten"]
)
def test_a_verdict_that_is_none_is_a_failure(text):
  with (
    Server([chat(text)]) as server,
    pytest.raises(types.RunError, match="a score from 0 to 10, got"),
  ):
    ask(server)


def test_the_judge_is_asked_as_openai_has_it(monkeypatch):
  monkeypatch.setenv("A_KEY", "secret")
  with Server([chat("Score: 5")]) as server:
    assert ask(server, "{question} {0}", key="A_KEY", max_tokens=7) == 0.5
  ((body, headers),) = server.asked
  assert headers["Authorization"] == "Bearer secret"
  assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0)
  (message,) = body["messages"]
  assert message["role"] == "user"
  # What the completion says is not filled in again.
  for text in ("[Question]\n?\n", "[Answer]\n{question} {0}\n", "]\nfour\n"):
    assert text in message["content"]


def test_a_key_that_is_not_there_is_refused():
  with (
    Server([]) as server,
    pytest.raises(types.InputError, match="NO_SUCH_KEY, got none"),
  ):
    ask(server, key="NO_SUCH_KEY")


@pytest.mark.parametrize(
  ("key", "place"),
  [
    ("s3cret\n", "7 of 7"),
    ("s3\r\ncret: x", "3 of 11"),
    ("s3cre\u2028t", "6 of 7"),
    ("\x1bs3cret", "1 of 7"),
    ("s3cr\u00e9t", "5 of 6"),
    ("s3\udcffcret", "3 of 7"),
  ],
)
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
  monkeypatch, key, place
):
  monkeypatch.setenv("A_KEY", key)
  with (
    Server([]) as server,
    pytest.raises(types.InputError, match=f"A_KEY: .*number {place}") as caught,
  ):
    ask(server, key="A_KEY")
  assert server.asked == []
  for text in (
    str(caught.value),
    "".join(traceback.format_exception(caught.value)),
  ):
    assert not re.search("s3|cr\u00e9t|cret", text.partition("A_KEY: ")[2]), (
      text
    )
  assert caught.value.__cause__ is caught.value.__context__ is None
  with (
    Server([]) as server,
    pytest.raises(types.InputError, match="header Some: expected printable"),
  ):
    post(server, headers={"Some": key})


def test_a_key_in_place_of_its_name_is_refused_and_not_shown():
  with pytest.raises(types.InputError, match=r"^judge\.key: .*name") as caught:
    judge.Judge(url="http://x", model="m", key="sk-s3cret")
  assert "s3cret" not in str(caught.value)


def test_an_answer_of_another_form_is_told():
  with (
    Server([(200, {"choices": []})]) as server,
    pytest.raises(types.RunError, match="expected a chat completion, got"),
  ):
    ask(server)


def test_judgements_of_a_batch_are_under_way_together():
  together = threading.Barrier(6)

  def wait(handler, body):
    together.wait(30)  # Broken, and so an error, if they come one by one.
    say(chat(f"Score: {body['messages'][0]['content'][-1]}"), handler, body)

  with Server(wait) as server:
    who = judge.Judge(url=server.url, model="m", template="{answer}")
    cfg = pools.Rewards(
      functions=(functools.partial(judge.graded, judge=who),),
      batch=6,
      timeout_s=60.0,
    )
    rollouts = [pool_test.rollout(uid, text=f"{uid}") for uid in range(6)]
    with pools.Pool(cfg) as pool:
      made = [f.result(timeout=90) for f in pool.submit_all(rollouts)]
  assert [r.reward for r in made] == [uid / 10 for uid in range(6)]


def test_requests_end_before_the_pool_ends_their_worker():
  scored = functools.partial(http_reward.scored, url="http://x")
  longest = pools.Rewards(functions=(scored,)).timeout_s
  asked = inspect.signature(http_reward.scored).parameters["deadline_s"]
  who = judge.Judge(url="http://x", model="m")
  assert who.deadline_s < longest and asked.default < longest


def test_a_long_verdict_is_read_in_linear_time():
  who = judge.Judge(url="http://x", model="m")
  began = time.process_time()
  with pytest.raises(types.RunError, match="expected a score"):
    judge.score("Score:" + " " * 10**5, who)
  assert time.process_time() - began < 5


@pytest.mark.parametrize(
  ("fields", "place"),
  [
    ({"url": "localhost"}, "judge.url"),
    ({"template": "{question}"}, "judge.template"),
    ({"template": "{answer} {other}"}, "judge.template"),
    ({"template": "{answer"}, "judge.template"),
    ({"pattern": r"Score: \d"}, "judge.pattern"),
    ({"pattern": "("}, "judge.pattern"),
    ({"low": 10.0}, "judge.low"),
    ({"max_tokens": 0}, "judge.max_tokens"),
    ({"deadline_s": 0.0}, "judge.deadline_s"),
    ({"attempts": 0}, "judge.attempts"),
  ],
)
def test_a_judge_that_cannot_judge_is_refused(fields, place):
  with pytest.raises(types.InputError, match=f"^{place}: expected"):
    judge.Judge(**({"url": "http://x", "model": "m"} | fields))
