"""A policy behind JetStream's own orchestrator, over gRPC on this machine.

JetStream's driver ends its process at whatever raises in one of its threads.
So a `Front` stands before it, as the service that clients see: it refuses what
the driver could not take, cuts answers to the length that was asked for, and
makes text of them. The driver sees token ids only.
"""

import asyncio
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import network
from jaxrl_post.placement import generator
from jaxrl_post.runtime import checkpoint
from jaxrl_post.runtime import hosts as hosts_lib
from jaxrl_post.sampling import jetstream

HOST = "127.0.0.1"
_LOOK_S = 0.25  # between two looks at whether to stop
_GRACE_S = 10.0  # for requests under way when it stops
# More at a time are refused by gRPC, as JetStream's own queue has no limit.
_MOST_REQUESTS = 1024
_HALF = "\ufffd"  # what a part of a character decodes to


def check(cfg: config.Run) -> None:
  """Refuses a run that cannot be served, before a device is touched.

  Raises:
    InputError: JetStream is not there, or sizes or model do not fit it.
  """
  if isinstance(cfg.model.config, network.Network):
    raise types.InputError(
      "model: expected a transformer of this project with --mode=serve, got a "
      "model of your own. Sample it with --mode=rollout."
    )
  jetstream.check(cfg.sampling, cfg.group_size, cfg.data.max_prompt)
  jetstream.load()


def run(
  cfg: config.Run,
  parts: prepare.Parts,
  folder: pathlib.Path | None,
  hosts: hosts_lib.Hosts,
  *,
  port: int,
  say: Callable[[str], None],
) -> None:
  """Serves a policy until `hosts` is asked to stop.

  Args:
    cfg: the run; sampled as its evaluations are, `group_size` for a prompt.
    parts: its host half.
    folder: of the run, whose newest checkpoint is served; None, or a folder
      without one, for the first weights.
    hosts: this process, alone, and what asks it to stop.
    port: to listen at; 0 for any that is free.
    say: prints one line, with address and policy version, once it listens.

  Raises:
    InputError: the port is taken, or the checkpoint is of another run.
  """
  place = loop.build(cfg, parts, hosts)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  if folder is None:
    state = trainer.start(loop.warm_up(cfg, parts, place, place.draw()))
  else:
    store = checkpoint.Store(folder / "checkpoints", cfg.checkpoint)
    try:
      state, _, _ = loop.restore_or_start(cfg, parts, place, trainer, store)
    finally:
      store.close()
  policy = place.publish(state)
  place.verify(policy)
  del state  # The optimizer's part of it is not needed.
  assert place.steps is not None, "mode roles is refused"
  engine = jetstream.Engine(
    place.steps,
    cfg.sampling,
    params=policy.params,
    tokenizer=parts.data.tokenizer,
    vocab_size=parts.decoder.config.vocab_size,
    sampling=parts.eval_env.sampling,
    group_size=cfg.group_size,
    max_prompt=cfg.data.max_prompt,
    key=generator.keys(cfg.seed)[1],
    mesh=place.meshes.generation,
    dispatch=place.locks[1],
  )
  engine.warm_up()
  front = Front(
    parts.data.tokenizer,
    check_prompt=engine.check_prompt,
    max_tokens=cfg.sampling.max_tokens,
    group_size=cfg.group_size,
  )
  hosts.heeds_stop = True
  what = f"policy version {policy.version}, {cfg.group_size} samples a prompt"
  asyncio.run(
    listen(
      front,
      engine,
      port,
      ready=lambda address: say(f"serving at {address}: {what}"),
      stopping=lambda: bool(hosts.stopping),
    )
  )


async def listen(
  front: "Front",
  engine: Any,
  port: int,
  *,
  ready: Callable[[str], None],
  stopping: Callable[[], bool],
) -> None:
  """Runs server and driver until `stopping`.

  Args:
    front: gets the requests.
    engine: a `jetstream.engine.engine_api.Engine`, in its driver's hands.
    port: 0 for any that is free.
    ready: gets HOST:PORT, once it listens.
    stopping: looked at four times a second. Requests under way then have ten
      seconds to end.

  Raises:
    InputError: the port is taken.
  """
  package = jetstream.load()
  server = package.grpc.aio.server(
    maximum_concurrent_rpcs=_MOST_REQUESTS,
    # Else a second server of the port would share its requests.
    options=(("grpc.so_reuseport", 0),),
  )
  try:
    port = server.add_insecure_port(f"{HOST}:{port}")
  except RuntimeError as error:
    raise types.InputError(
      f"--port: expected one that is free on {HOST}, got {port}. Name another, "
      "or leave it out for any."
    ) from error
  package.services.add_OrchestratorServicer_to_server(front, server)
  params = [engine.load_params()]
  driver = package.orchestrator.Driver(
    prefill_engines=[engine],
    generate_engines=[engine],
    prefill_params=params,
    generate_params=params,
    interleaved_mode=True,
    jax_padding=False,
  )
  front.orchestrator = package.orchestrator.LLMOrchestrator(driver)
  try:
    await server.start()
    ready(f"{HOST}:{port}")
    while not stopping():
      await server.wait_for_termination(_LOOK_S)
  finally:
    # In this order, and the driver beside the loop: its threads still hand over
    # tokens, and would end the process if they could not.
    await server.stop(_GRACE_S)
    await asyncio.to_thread(driver.stop)


class Front:
  """The service `Orchestrator` of JetStream, before its own.

  Attributes:
    orchestrator: JetStream's; set before the first request.
  """

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    *,
    check_prompt: Callable[[Sequence[int]], None],
    max_tokens: int,
    group_size: int,
  ) -> None:
    """Makes a front.

    Args:
      tokenizer: of the model.
      check_prompt: raises `InputError` at ids that the engine does not take.
      max_tokens: longest completion that the engine makes.
      group_size: completions of each prompt.
    """
    self.orchestrator: Any = None
    self._tokenizer, self._check_prompt = tokenizer, check_prompt
    self._max_tokens, self._group_size = max_tokens, group_size
    package = jetstream.load()
    self._messages = package.messages
    self._refused = package.grpc.StatusCode.INVALID_ARGUMENT

  async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
    """Answers a prompt, block by block.

    Args:
      request: a `DecodeRequest`. Text is taken as it is; ids get the model's
        begin token in front, if it has one and they do not begin with it.
      context: of gRPC.

    Yields:
      `DecodeResponse`s with `group_size` samples each: new token ids, without
      the stop token, and with text prompts their text. At most `max_tokens` of
      the request a sample.
    """
    try:
      ids = self._prompt(request)
    except types.InputError as error:
      await context.abort(self._refused, str(error))
      return
    is_text = request.WhichOneof("content") == "text_content"
    samples = [
      Sample(request.max_tokens, self._tokenizer.decode if is_text else None)
      for _ in range(self._group_size)
    ]
    asked = self._messages.DecodeRequest(
      max_tokens=request.max_tokens,
      priority=request.priority,
      token_content=self._messages.DecodeRequest.TokenContent(
        token_ids=_without_bos(ids, self._tokenizer.bos_id)
      ),
    )
    async for response in self.orchestrator.Decode(asked, context):
      made = [
        sample.take(some.token_ids)
        for sample, some in zip(
          samples, response.stream_content.samples, strict=True
        )
      ]
      if any(new for new, _ in made):
        yield self._response(made)
    rest = [((), sample.rest()) for sample in samples]
    if any(text for _, text in rest):
      yield self._response(rest)

  async def HealthCheck(self, request: Any, context: Any) -> Any:
    """Says that the driver lives."""
    return await self.orchestrator.HealthCheck(request, context)

  def _response(self, made: Sequence[tuple[Sequence[int], str]]) -> Any:
    content = self._messages.DecodeResponse.StreamContent
    samples = [content.Sample(text=text, token_ids=ids) for ids, text in made]
    return self._messages.DecodeResponse(
      stream_content=content(samples=samples)
    )

  def _prompt(self, request: Any) -> tuple[int, ...]:
    """Returns the ids of a prompt, begin token included, or refuses it."""
    kind, most = request.WhichOneof("content"), self._max_tokens
    rules = (
      (kind, "content", "text_content or token_content", "neither"),
      (
        1 <= request.max_tokens <= most,
        "max_tokens",
        f"1 to {most}, the sampling.max_tokens of the server",
        request.max_tokens,
      ),
      (
        not request.session_cache,
        "session_cache",
        "none, as nothing is kept between requests",
        repr(request.session_cache),
      ),
    )
    for holds, name, rule, value in rules:
      if not holds:
        raise types.InputError(
          f"{name}: expected {rule}, got {value}. Correct the request."
        )
    if kind == "text_content":
      ids, _ = self._tokenizer.prompt_ids(request.text_content.text)
    else:
      ids = tuple(request.token_content.token_ids)
      bos_id = self._tokenizer.bos_id
      if bos_id is not None:
        ids = (bos_id, *_without_bos(ids, bos_id))
    self._check_prompt(ids)
    return ids


def _without_bos(ids: Sequence[int], bos_id: int | None) -> Sequence[int]:
  """Returns a prompt without its begin token, which JetStream puts there."""
  return ids[1:] if bos_id is not None and ids[:1] == (bos_id,) else ids


class Sample:
  """One completion on its way to a client, cut and turned into text."""

  def __init__(
    self, max_tokens: int, decode: Callable[[Sequence[int]], str] | None
  ) -> None:
    """Begins with nothing.

    Args:
      max_tokens: most tokens to let through.
      decode: token ids to text; None for no text.
    """
    self._max_tokens, self._decode = max_tokens, decode
    self._ids: list[int] = []
    # Text is out up to `_told`; from `_start` on tokens are decoded again, so
    # that the next ones are read in the context of the last that were told.
    self._start, self._told = 0, 0

  def take(self, ids: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Takes the tokens of a block.

    Returns:
      Those that are within `max_tokens`, and the text that they complete: a
      character of which only a part has come waits for the rest of it.
    """
    new = tuple(ids)[: self._max_tokens - len(self._ids)]
    self._ids += new
    text = self._untold()
    if text.endswith(_HALF):
      return new, ""
    self._start, self._told = self._told, len(self._ids)
    return new, text

  def rest(self) -> str:
    """Returns the text that still waits when there are no more tokens."""
    text = self._untold()
    self._told = len(self._ids)
    return text

  def _untold(self) -> str:
    if self._decode is None:
      return ""
    told = self._decode(self._ids[self._start : self._told])
    return self._decode(self._ids[self._start :])[len(told) :]
