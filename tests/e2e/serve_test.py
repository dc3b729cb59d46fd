"""A policy that is served: over the wire, by JetStream's own orchestrator."""

import concurrent.futures
import re
import signal
import subprocess
import threading

import pytest

from jaxrl_post import config, loop, main, prepare, serve, types
from jaxrl_post.placement import generator
from jaxrl_post.runtime import checkpoint, folder
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.sampling import engine as engines
from jaxrl_post.sampling import jetstream
from tests.e2e import runs

PROMPTS = ("a", "b", "cd", "abc", "ddd", "bad", "cab", "dc")
GROUP = 4
_DEADLINE_S = 60.0


@types.host_record
class Served:
  """A server and what its answers should be.

  Attributes:
    process: of the server.
    line: what it said when it began to listen.
    groups: our own engine's completions of each of `PROMPTS`.
  """

  process: subprocess.Popen
  line: str
  groups: tuple[tuple[types.Completion, ...], ...]

  def call(self, **request):
    """Sends a request; ids and text of each sample, put together."""
    package = jetstream.load()
    address = re.findall(r"\S+:\d+", self.line)[0]
    samples = [([], "") for _ in range(GROUP)]
    with package.grpc.insecure_channel(address) as channel:
      stub = package.services.OrchestratorStub(channel)
      wanted = package.messages.DecodeRequest(**{"max_tokens": 5, **request})
      for response in stub.Decode(wanted, timeout=_DEADLINE_S):
        new = response.stream_content.samples
        samples = [
          (ids + list(s.token_ids), text + s.text)
          for (ids, text), s in zip(samples, new, strict=True)
        ]
    return [(tuple(ids), text) for ids, text in samples]

  def ask(self, text, **fields):
    """Sends a prompt of text."""
    return self.call(text_content={"text": text}, **fields)


def completions(path, cfg, parts):
  """Answers the prompts with the newest checkpoint, without a server."""
  place = loop.build(cfg, parts)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  store = checkpoint.Store(path / "checkpoints", cfg.checkpoint)
  state, _, _ = loop.restore_or_start(cfg, parts, place, trainer, store)
  store.close()
  assert place.engine is not None
  requests = [
    types.Request(
      prompt=parts.data.tokenizer.encode(text),
      uids=tuple(range(GROUP * n, GROUP * n + GROUP)),
      sampling=parts.eval_env.sampling,
    )
    for n, text in enumerate(PROMPTS)
  ]
  engine = place.engine(generator.keys(cfg.seed)[1])
  done = engines.generate(engine, place.publish(state), requests)
  return tuple(tuple(done[i : i + GROUP]) for i in range(0, len(done), GROUP))


def first_line(process, words):
  """Reads what a process says to stdout, up to the line with `words`."""
  watchdog = threading.Timer(2 * _DEADLINE_S, process.kill)
  watchdog.start()
  lines = iter(process.stdout.readline, "")
  found = next((line for line in lines if words in line), "")
  watchdog.cancel()
  assert found, process.communicate()[1]
  return found


@pytest.fixture(name="served", scope="module")
def _served(tmp_path_factory):
  cwd = tmp_path_factory.mktemp("cwd")
  path = cwd / "run"
  with runs.compile_cache():
    cfg = runs.configured("num_steps=2")
    free = config.may_change(cfg)
    with folder.open_folder(path, config.to_json(cfg), free):
      runs.train(path, "num_steps=2")
    groups = completions(path, cfg, prepare.prepare(cfg))
  # Other sizes than it was trained with; num_steps is that of get_config.
  sizes = runs.settings("sampling.block=3", "sampling.rows=10")
  args = (runs.experiment(), "--mode=serve", f"--workdir={path}", *sizes)
  with runs.started(cwd, *args) as process:
    line = first_line(process, "serving at")
    yield Served(process=process, line=line, groups=groups)


def texts(group, decode):
  """Returns ids and text of a group as a client should get them."""
  cut = [c.tokens[:-1] if c.finish == "stop" else c.tokens for c in group]
  return [(ids, decode(ids)) for ids in cut]


@pytest.fixture(name="right", scope="module")
def _right(served):
  decode = prepare.prepare(runs.configured()).data.tokenizer.decode
  return [texts(group, decode) for group in served.groups]


def test_a_line_says_where_it_listens_and_what_it_serves(served):
  assert re.fullmatch(
    r"serving at 127\.0\.0\.1:\d+: policy version 2, 4 samples a prompt\n",
    served.line,
  )


def test_one_after_the_other_gets_the_greedy_tokens_of_our_engine(
  served, right
):
  assert len({str(group) for group in right}) > 2
  assert [served.ask(text) for text in PROMPTS] == right


def test_many_at_once_each_get_their_own(served, right):
  with concurrent.futures.ThreadPoolExecutor(8) as clients:
    assert list(clients.map(served.ask, PROMPTS * 6)) == right * 6


def test_ids_are_answered_with_the_same_ids(served, right):
  encode = prepare.prepare(runs.configured()).data.tokenizer.encode
  found = [
    served.call(token_content={"token_ids": encode(text)}) for text in PROMPTS
  ]
  assert found == [[(ids, "") for ids, _ in group] for group in right]


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_tokens_come_than_were_asked_for(served, right, most):
  group = served.ask(PROMPTS[2], max_tokens=most)
  assert [ids for ids, _ in group] == [ids[:most] for ids, _ in right[2]]


@pytest.mark.parametrize(
  ("request_", "words"),
  [
    ({"text_content": {"text": "abcd"}}, "expected 1 to 3 tokens"),
    ({"text_content": {"text": "x"}}, "expected characters of 'abcd'"),
    ({"token_content": {"token_ids": [2, 8]}}, "expected ids in [0, 8), got 8"),
    ({"token_content": {"token_ids": [-1, 2]}}, "got -1"),
    (
      {"token_content": {"token_ids": [2]}, "session_cache": "x"},
      "session_cache: expected none",
    ),
    ({}, "expected text_content or token_content"),
  ],
)
def test_who_asks_wrongly_is_told_and_the_server_lives(
  served, right, request_, words
):
  grpc = jetstream.load().grpc
  with pytest.raises(grpc.RpcError) as error:
    served.call(**request_)
  assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
  assert words in error.value.details()
  assert served.ask(PROMPTS[3]) == right[3]


def test_a_client_that_hangs_up_leaves_the_server_alive(served, right):
  package = jetstream.load()
  address = re.findall(r"\S+:\d+", served.line)[0]
  with package.grpc.insecure_channel(address) as channel:
    stub = package.services.OrchestratorStub(channel)
    wanted = package.messages.DecodeRequest(
      max_tokens=5, text_content={"text": "a"}
    )
    for _ in range(20):
      stub.Decode(wanted).cancel()
    health = stub.HealthCheck(package.messages.HealthCheckRequest())
  assert health.is_live
  assert served.ask(PROMPTS[3]) == right[3]


def test_sigterm_ends_it_with_exit_code_0(served, right):
  assert served.ask(PROMPTS[0]) == right[0]
  served.process.send_signal(signal.SIGTERM)
  end = runs.ended(served.process)
  assert (end.code, end.survivors) == (0, ())
  assert end.out.splitlines() == ["stopped by SIGTERM"]
  assert "stopping after the requests under way; once more" in end.err
  assert "Traceback" not in end.err and "DEBUG" not in end.err


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
  ("setting", "launch", "words"),
  [
    ("placement.mode=roles", None, "placement.mode: expected colocated or"),
    ("seed=1", hosts_lib.Launch("a:1", 2, 0), "--distributed: expected one"),
  ],
)
def test_roles_and_several_processes_are_refused(setting, launch, words):
  with pytest.raises(types.InputError) as error:
    main._check_alone(runs.configured(setting), launch, "serve")
  assert str(error.value).startswith(words)
  assert "with --mode=serve" in str(error.value)
  assert "\n" not in str(error.value)


def test_rows_for_less_than_a_group_are_refused():
  with pytest.raises(types.InputError, match=r"sampling\.rows: .* got 3"):
    serve.check(runs.configured("sampling.rows=3"))


def test_first_weights_are_served_without_a_folder():
  cfg = runs.configured()
  said = []
  hosts = hosts_lib.Hosts()
  hosts.stopping = "a test"  # So it ends as soon as it listens.
  with runs.compile_cache():
    parts = prepare.prepare(cfg)
    serve.run(cfg, parts, None, hosts, port=0, say=said.append)
  assert re.fullmatch(r"serving at \S+: policy version 0, .*", said[0])
  assert hosts.heeds_stop
