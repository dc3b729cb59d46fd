"""Everything of a run that needs no device, made and checked before one is."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

from absl import logging

from jaxrl_post import config, types
from jaxrl_post.algos import probe
from jaxrl_post.data import curriculum, dataset, pack
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.envs import conversations, events, work
from jaxrl_post.envs import ledger as ledgers
from jaxrl_post.models import (
  decoder,
  network,
  quantize,
  transformer,
  weights,
)
from jaxrl_post.placement import mesh, programs, reward_model
from jaxrl_post.placement import network as own
from jaxrl_post.placement import reference as references
from jaxrl_post.runtime import dump
from jaxrl_post.sampling import steps
from jaxrl_post.training import trained


@dataclasses.dataclass(frozen=True)
class Parts:
  """The host's half of a run.

  Attributes:
    decoder: the model, its shape read from the checkpoint or the experiment.
    reference: likewise of the reference; None: the policy's first weights.
    judge: a reward model; None for none.
    data: tokenizer and prompts.
    env: how training prompts are asked.
    eval_env: how held-out prompts are asked.
  """

  decoder: decoder.Decoder
  data: dataset.Dataset
  env: work.Env
  eval_env: work.Env
  reference: references.Source | None = None
  judge: reward_model.Source | None = None


def model(cfg: config.Run) -> decoder.Decoder:
  """Reads the model's shape, but no weights.

  Raises:
    InputError: there is none, or settings do not fit it.
  """
  given, shape = cfg.model, weights.shape_of(cfg.model)
  if isinstance(shape, network.Network):
    own.check(
      shape,
      cfg.placement,
      cfg.sampling,
      trains=cfg.optim.trained,
      critic=cfg.algo.critic is not None,
    )
  if cfg.length > shape.max_positions:
    raise types.InputError(
      f"data.max_prompt + sampling.max_tokens: expected at most "
      f"{shape.max_positions} positions of the model, got {cfg.length}. "
      "Shorten one of them."
    )
  most = cfg.sampling.top_logprobs
  if most > shape.vocab_size:
    raise types.InputError(
      f"sampling.top_logprobs: expected at most the {shape.vocab_size} ids of "
      f"the model, got {most}. Lower it."
    )
  spec = decoder.spec(shape)
  trained.check(cfg.optim.trained, spec)
  if cfg.sampling.quantized:
    quantize.spec(spec)  # Refuses what has no 8 bits.
  return decoder.of(given, shape)


def prepare(cfg: config.Run) -> Parts:
  """Reads the model's shape, the tokenizer and the prompts.

  Raises:
    InputError: what the configuration names is missing, or does not fit.
  """
  curriculum.check(
    cfg.data.curriculum,
    filters=cfg.stream.filter_zero_signal,
    warm_up=cfg.warmup.num_steps,
  )
  shaped = model(cfg)
  shape = shaped.config
  if cfg.model.path is not None and isinstance(shape, transformer.Config):
    weights.check(cfg.model.path, shape)
  if conversations.most_rows(cfg.env) > 1 and shaped.noted is not None:
    raise types.InputError(
      "env.renewal: expected none with model.routing.replay, as the experts of "
      "rows before the newest are not kept, got both. Leave one of them out."
    )
  talker = conversations.made(cfg.env, cfg.stream, cfg.max_lag, cfg.algo.needs)
  data = dataset.load(
    cfg.data,
    model_path=cfg.model.path,
    vocab_size=shape.vocab_size,
    seed=cfg.seed,
    tools=() if talker is None else tuple(talker.schemas),
  )
  dataset.warn_leaked(data)
  if cfg.warmup.num_steps:
    _check_references(cfg, data)
  stop_ids = data.tokenizer.eos_ids
  if not 1 <= len(stop_ids) <= steps.MAX_IDS:
    raise types.InputError(
      f"data.tokenizer: expected 1 to {steps.MAX_IDS} end tokens, got "
      f"{stop_ids}. Give the tokenizer an end token."
    )
  sampling = types.SamplingParams(
    temperature=cfg.sampling.temperature,
    max_tokens=cfg.sampling.max_tokens,
    stop_ids=stop_ids,
  )
  greedy = dataclasses.replace(
    sampling,
    temperature=cfg.evaluation.temperature,
    top_k=cfg.evaluation.top_k,
    top_p=cfg.evaluation.top_p,
  )
  ask = functools.partial(
    conversations.build,
    cfg.env,
    talker,
    tokenizer=data.tokenizer,
    max_prompt=cfg.data.max_prompt,
  )
  parts = Parts(
    decoder=shaped,
    data=data,
    env=ask(cfg.group_size, sampling),
    eval_env=ask(cfg.evaluation.number, greedy),
    reference=reference(cfg, shape),
    judge=reward_model.read(
      cfg.rewards.model,
      cfg.placement,
      [asked.items[0] for asked in (data.train, *data.held_out.values())],
      talks=cfg.env is not None,
    ),
  )
  if cfg.reference is not None and cfg.reference.path is not None:
    _check_same_ids(cfg.reference.path, data.tokenizer)
  if cfg.replay is not None:
    _check_replay(cfg.replay, about(cfg, parts), routed=shaped.replays)
  if cfg.stream.follow:
    _check_events(cfg, parts)
  _warn_uncorrected(cfg)
  return parts


def reference(
  cfg: config.Run, policy: decoder.Shape
) -> references.Source | None:
  """Reads the shape of a run's reference, but no weights.

  Args:
    cfg: the run.
    policy: shape of the policy.

  Returns:
    None where it is the policy's own first weights, or there is none.

  Raises:
    InputError: there is no such model, or it does not fit the policy.
  """
  model = cfg.reference
  if model is None:
    return None
  path = model.path
  for name in ("balance", "routing"):
    if (given := getattr(model, name)) is not None:
      raise types.InputError(
        f"reference.{name}: expected none, as a reference does not train, got "
        f"{given}. Leave it out."
      )
  if path is not None and not pathlib.Path(path).exists():
    raise types.InputError(
      f"reference.path: expected a folder with config.json or a .gguf file, "
      f"got none at {path!r}. Correct the path."
    )
  shape = weights.shape_of(model)
  size, most = policy.vocab_size, shape.max_positions
  rules = (
    (shape.vocab_size == size, f"the policy's {size} ids", shape.vocab_size),
    (most >= cfg.length, f"at least {cfg.length} positions", most),
  )
  for holds, rule, value in rules:
    if not holds:
      raise types.InputError(
        f"reference: expected a model with {rule}, got one with {value}. Take "
        "another model."
      )
  made = decoder.Decoder(shape, model.dtype, chunk=model.chunk)
  if path is not None:
    weights.check(path, made.shape)
  return references.Source(made, path)


def _check_same_ids(path: str, ours: tokenizers.Tokenizer) -> None:
  """Refuses a reference to which an id is another token than to the policy."""
  mine, theirs = (
    tokenizer.backend.get_vocab(with_added_tokens=True)
    for tokenizer in (ours, tokenizers.load(path))
  )
  for token in sorted(mine.keys() | theirs.keys()):
    if mine.get(token) != theirs.get(token):
      raise types.InputError(
        f"reference.path: expected the tokens of the policy, got {token!r} as "
        f"id {theirs.get(token)} instead of {mine.get(token)}. Take a model of "
        "the same tokenizer."
      )


def check_schedule(cfg: config.Run) -> None:
  """Refuses to train at a rate that is to fall, and has no time to.

  One that is to stay where it is and never gets there is warned of, as the run
  may go on.

  Raises:
    InputError: it rises until the end.
  """
  optim, updates = cfg.optim, cfg.num_steps * cfg.optim.updates
  if optim.schedule != "constant" and optim.warmup_steps >= updates:
    raise types.InputError(
      "optim.warmup_steps: expected less than the run's "
      f"{updates} updates with optim.schedule={optim.schedule}, got "
      f"{optim.warmup_steps}. Lower it, or make the run longer."
    )
  if optim.warmup_steps > updates:
    logging.warning(
      "optim.warmup_steps=%d is more than the run's %d updates: the learning "
      "rate never gets to its top. Lower it, unless the run is to go on.",
      optim.warmup_steps,
      updates,
    )


def _warn_uncorrected(cfg: config.Run) -> None:
  """Says so where nothing corrects that the engine computes otherwise."""
  rounds = cfg.sampling.quantized or cfg.sampling.compute != cfg.model.dtype
  if rounds and not cfg.algo.corrects:
    logging.warning(
      "sampling.dtype=%s beside model.dtype=%s: rollouts are sampled from "
      "other probabilities than they train, and algo.correction is none; "
      "mismatch/* says how much",
      cfg.sampling.dtype,
      cfg.model.dtype,
    )


def _check_references(cfg: config.Run, data: dataset.Dataset) -> None:
  """Refuses a warm-up whose answers are longer than a completion may be."""
  limit = cfg.sampling.max_tokens - 1  # for the end token
  for item in data.train.items:
    tokens = len(data.tokenizer.encode(str(item.reference)))
    if tokens > limit:
      raise types.InputError(
        f"sampling.max_tokens: expected room for every reference of the "
        f"warm-up and its end token, got {cfg.sampling.max_tokens} for "
        f"{item.reference!r} of {tokens} tokens. Raise it."
      )


def about(cfg: config.Run, parts: Parts) -> dict[str, Any]:
  """Returns what a dump says of the run whose batches it has.

  Returns:
    SHA-256 of `model` (settings and shape), training `data` and `tokenizer`;
    `vocab_size` of the model; `group_size`; the most tokens of a prompt
    (`max_prompt`) and of a completion (`max_tokens`); `seed`; and the most
    rows of a rollout (`max_rows`), if that may be several.
  """
  model = [config.to_json(cfg.model), config.to_json(parts.decoder.config)]
  most_rows = conversations.most_rows(cfg.env)
  text = json.dumps(model, sort_keys=True)
  return {
    "model": hashlib.sha256(text.encode()).hexdigest(),
    "data": parts.data.train.digest,
    "tokenizer": parts.data.tokenizer.digest,
    "vocab_size": parts.decoder.config.vocab_size,
    "group_size": cfg.group_size,
    "max_prompt": cfg.data.max_prompt,
    "max_tokens": cfg.sampling.max_tokens,
    "seed": cfg.seed,
    **({"max_rows": most_rows} if most_rows > 1 else {}),
  }


def _check_replay(folder: str, ours: dict[str, Any], *, routed: bool) -> None:
  """Refuses a dump that is damaged, or that this run cannot train on."""
  if routed:
    raise types.InputError(
      "model.routing.replay: expected false with debug.replay, as a dump does "
      "not have the experts of its tokens, got true. Set one of the two."
    )
  for path in dump.batches(folder):
    theirs = dump.about(path)
    rules = [
      (theirs.get(name) == ours[name], name, f"{ours[name]}")
      for name in ("group_size", "vocab_size", "tokenizer")
    ]
    for name in ("max_prompt", "max_tokens", "max_rows"):
      most, size = ours.get(name, 1), theirs.get(name, 1)
      fits = name in {*theirs, "max_rows"} and isinstance(size, int)
      rules.append((fits and size <= most, name, f"at most {most}"))
    for holds, name, rule in rules:
      if not holds:
        raise types.InputError(
          f"debug.replay: expected a dump of {name} {rule}, as this run has, "
          f"got {theirs.get(name)} in {path}. Replay it with the settings that "
          "it was written with."
        )


def digest(cfg: config.Run, parts: Parts, *, placed: bool) -> str:
  """Returns a digest of all that decides what a run samples and trains.

  Args:
    cfg: the run.
    parts: from `prepare`.
    placed: whether the placement, which decides the last bits, counts too.
  """
  others = ("debug", "stream.follow", "evaluation", "data.held_out")
  free = (*config.may_change(cfg), *others)
  settings = [
    line
    for line in config.describe(cfg).split("\n")
    if not line.startswith(free) or (placed and line.startswith("placement"))
  ]
  text = json.dumps([settings, about(cfg, parts)], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _check_events(cfg: config.Run, parts: Parts) -> None:
  """Refuses events of other settings, and of a shorter run."""
  log = events.read(cfg.stream.follow, digest(cfg, parts, placed=True))
  batches = sum(isinstance(event, ledgers.Consume) for event in log)
  if batches < cfg.num_steps:
    raise types.InputError(
      f"stream.follow: expected events of {cfg.num_steps} batches, got those "
      f"of {batches} in {cfg.stream.follow}. Set num_steps={batches}, or "
      "follow a longer run."
    )


def check_follow(cfg: config.Run, folder: pathlib.Path) -> None:
  """Refuses to follow the events that this run would write itself.

  Args:
    cfg: the run.
    folder: of the run.
  """
  ours = folder / events.NAME
  theirs = pathlib.Path(cfg.stream.follow or "/")
  if ours.exists() and theirs.samefile(ours):
    raise types.InputError(
      f"stream.follow: expected the events of another run, got {theirs}, which "
      "this one would write. Name another --workdir."
    )


def layout(cfg: config.Run, shape: decoder.Shape, devices: int) -> pack.Layout:
  """Returns the shape of a batch of `cfg.rows` rollouts.

  Args:
    cfg: the run.
    shape: of the model.
    devices: that train.
  """
  axes = cfg.placement.training
  return pack.layout(
    cfg.rows,
    cfg.group_size,
    max_prompt=cfg.data.max_prompt,
    max_tokens=cfg.sampling.max_tokens,
    flops=decoder.layer_flops(shape),
    microbatches=cfg.optim.microbatches,
    minibatches=cfg.optim.minibatches,
    row_parts=mesh.row_parts(axes, devices),
    length_parts=mesh.context_parts(axes, devices),
    alone=not decoder.packs(shape),
    routing=decoder.of(cfg.model, shape).noted,
    most_rows=conversations.most_rows(cfg.env),
  )


def fit(
  cfg: config.Run,
  shape: decoder.Shape,
  num_devices: int,
  processes: int = 1,
  *,
  engines: int = 1,
) -> tuple[mesh.Shares, pack.Layout]:
  """Checks sizes against a number of devices.

  Args:
    cfg: the run.
    shape: of the model.
    num_devices: how many there are.
    processes: how many hold them, equally many each.
    engines: how many sample.

  Returns:
    Devices of each side, and the shape of a batch.

  Raises:
    InputError: it does not fit; names both numbers.
  """
  shares = mesh.shares(cfg.placement, num_devices, processes)
  programs.check_rows(
    cfg.placement,
    shares,
    rollouts=cfg.rows,
    cut=cfg.optim,
    engine_rows=cfg.sampling.rows,
    engines=engines,
  )
  made = layout(cfg, shape, shares.training)
  probe.probe(cfg.algo, made.sequences, (made.rows, made.length))
  return shares, made


def plan(
  cfg: config.Run, parts: Parts, num_devices: int, processes: int = 1
) -> str:
  """Checks the run against a number of devices and says what a step is.

  Args:
    cfg: the run.
    parts: from `prepare`.
    num_devices: how many there are.
    processes: how many hold them, equally many each.

  Returns:
    One line: prompts x group -> microbatches -> rows -> tokens, and where.

  Raises:
    InputError: it does not fit; names both numbers.
  """
  if cfg.placement.mode == "roles":
    engines = cfg.placement.processes.generation_replicas
  else:
    engines = processes
  if processes > 1 and cfg.evaluation.beside is not None:
    raise types.InputError(
      f"evaluation.beside: expected none with several processes, of which each "
      f"takes newer weights by itself, got {processes}. Set it to none."
    )
  if processes > 1 and (cfg.stream.deterministic or cfg.stream.follow):
    raise types.InputError(
      "stream.deterministic, stream.follow: expected one process, got "
      f"{processes}, among which clocks decide who samples what. Leave them "
      "out."
    )
  shares, made = fit(
    cfg, parts.decoder.config, num_devices, processes, engines=engines
  )
  reward_model.check(
    cfg.rewards.model, cfg.placement, shares, processes=processes
  )
  draws, ladder = len(parts.data.train), parts.data.train.ladder
  draws = draws if ladder is None else curriculum.asked(ladder, draws)
  if draws < cfg.groups_per_step:
    raise types.InputError(
      f"groups_per_step: expected at most the {draws} prompts "
      f"of all epochs, got {cfg.groups_per_step}. Lower it, or raise "
      "data.epochs."
    )
  cut = made.microbatches * made.minibatches
  idle = f", {shares.idle} idle" if shares.idle else ""
  many = f" in {processes} processes" if processes > 1 else ""
  same = " (the same)" if cfg.placement.mode == "colocated" else ""
  return (
    f"a step: {cfg.groups_per_step} prompts x {cfg.group_size} = {cfg.rows} "
    f"rollouts -> {cut} x {made.rows // cut} rows of {made.length} tokens "
    f"({made.rows * made.length} in all); {shares.training} devices train, "
    f"{shares.generation}{same} generate{idle}{many}; max_lag {cfg.max_lag}; "
    f"{parts.data.train.size} prompts, {parts.data.train.dropped} dropped"
  )
