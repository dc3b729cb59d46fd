"""Reward servers: settings, secrets, deep answers, and deadlines kept."""

import contextlib
import functools
import threading
import time

import pytest

from jaxrl_post import types
from jaxrl_post.rewards import client, judge
from jaxrl_post.rewards import http as http_reward
from jaxrl_post.rewards import pool as pools
from tests.unit import reward_servers_test as servers


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
  monkeypatch.setenv("no_proxy", "127.0.0.1")
  monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)


def crawl(beginning):
  """Returns what says this, and then a byte every now and then, for ever."""

  def answer(handler, body):
    with contextlib.suppress(OSError):
      handler.wfile.write(beginning)
      while not handler.server.over.wait(0.05):
        handler.wfile.write(b"1")
        handler.wfile.flush()

  return answer


@pytest.mark.parametrize(
  "beginning",
  [
    b"",  # of the status line
    b"HTTP/1.1 200 ",
    b"HTTP/1.1 503 Busy\r\nA: ",
    b"HTTP/1.1 200 OK\r\nContent-Type: ",
    b"HTTP/1.1 200 OK\r\n\r\n",  # a body without a length: 111...
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0000",
    b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n0000",
  ],
)
def test_the_deadline_is_kept_however_slowly_an_answer_comes(beginning):
  began = time.monotonic()
  with (
    servers.Server([crawl(beginning)] * 3) as server,
    pytest.raises(types.RunError, match="within 0.5 s, got |status 400"),
  ):
    servers.post(server, deadline_s=0.5)
  assert time.monotonic() - began < 1.5


def test_all_addresses_of_a_host_share_the_deadline(monkeypatch):
  asked = []

  def connect(address, timeout):
    asked.append(timeout)
    threading.Event().wait(min(timeout, 0.2))
    raise TimeoutError("timed out")

  monkeypatch.setattr(client.wire.socket, "create_connection", connect)
  places = [(2, 1, 6, "", (f"127.0.0.{n}", 9)) for n in range(1, 9)]
  monkeypatch.setattr(
    client.wire.socket, "getaddrinfo", lambda *_, **__: places
  )
  began = time.monotonic()
  with pytest.raises(types.RunError, match="too slowly"):
    client.post("http://x", {}, deadline_s=0.3, attempts=1, seed="0")
  assert time.monotonic() - began < 1
  assert asked[0] > 0.2 > asked[1] and max(asked[2:]) <= 0.001


@pytest.mark.parametrize(
  "url",
  ["http://a b/", "http://x/a b", "http://x/\r\nA: b", "http://x\n/"]
  + ["http://x/\x00", "http://x/\u00e9", "http://x/ ", " http://x"],
)
def test_an_address_that_no_request_can_hold_is_refused(url):
  with pytest.raises(types.InputError, match="^a place: expected http://HOST"):
    client.check_url("a place", url)


@pytest.mark.parametrize("model", ["", " "])
def test_a_judge_without_a_name_is_refused(model):
  with pytest.raises(types.InputError, match="^judge.model: expected its name"):
    judge.Judge(url="http://x", model=model)


SECRET = "hunter2"


@pytest.mark.parametrize(
  "url",
  [
    f"http://me:{SECRET}@x/",
    f"http://{SECRET}@x",
    f"http://me:{SECRET}@a b",
    f"ftp://me:{SECRET}@x",
    f"me:{SECRET}@x",
    f"http://a b/?key={SECRET}",
  ],
)
def test_a_secret_in_an_address_is_never_shown(url):
  with pytest.raises(types.InputError, match="^a place: expected") as caught:
    client.check_url("a place", url)
  said = str(caught.value)
  assert SECRET not in said and "\n" not in said


def test_a_key_behind_the_path_is_sent_and_not_shown():
  with servers.Server([(400, {}), (200, b"<"), (401, {}), (503, {})]) as server:
    for _ in range(4):
      with pytest.raises((types.InputError, types.RunError)) as caught:
        client.post(
          f"{server.url}?key={SECRET}",
          {},
          deadline_s=9.0,
          attempts=1,
          seed="0",
        )
      said = str(caught.value)
      assert server.url in said and SECRET not in said
  assert len(server.asked) == 4


def test_json_of_too_many_levels_is_a_line_each_way():
  deep = []
  for _ in range(200_000):
    deep = [deep]
  with pytest.raises(types.InputError, match="that JSON can hold") as caught:
    client.post("http://x", deep, deadline_s=1.0, attempts=1, seed="0")
  assert "\n" not in str(caught.value)
  with servers.Server([(200, b"[" * 200_000 + b"]" * 200_000)]) as server:
    with pytest.raises(types.RunError, match="JSON of fewer levels") as caught:
      servers.post(server)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"attempts": 0}, "reward http: attempts: expected a whole number >= 1"),
    ({"attempts": 1.5}, "reward http: attempts: expected"),
    ({"attempts": "3"}, "reward http: attempts: expected"),
    ({"attempts": True}, "reward http: attempts: expected"),
    ({"deadline_s": 0}, "reward http: deadline_s: expected > 0 s, got 0"),
    ({"deadline_s": float("nan")}, "reward http: deadline_s: .* got nan"),
    ({"deadline_s": float("inf")}, "reward http: deadline_s: .* got inf"),
    ({"deadline_s": "8"}, "reward http: deadline_s: .* got '8'"),
    ({"url": 5}, "reward http: url: expected http://HOST.*, got 5"),
    ({"url": None}, "reward http: url: expected http://HOST.*, got None"),
    ({"url": "http://a b/"}, "reward http: url: expected http://HOST"),
    ({"url": f"http://u:{SECRET}@x"}, "reward http: url: expected an addr"),
    ({"uri": "http://x"}, "settings of scored, got .*'uri'"),
  ],
)
def test_settings_of_a_server_are_read_when_rewards_are_made(settings, said):
  inner = functools.partial(http_reward.scored, url="http://x")
  with pytest.raises(types.InputError, match=f"{said}") as caught:
    pools.Rewards(functions=(functools.partial(inner, **settings),))
  assert "\n" not in str(caught.value) and SECRET not in str(caught.value)


def test_a_server_without_an_address_is_refused():
  with pytest.raises(types.InputError, match="missing a required.*'url'"):
    pools.Rewards(functions=(http_reward.scored,))
