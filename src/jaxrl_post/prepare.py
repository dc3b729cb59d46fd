"""Everything of a run that needs no device, made and checked before one is."""

import dataclasses

from jaxrl_post import config, types
from jaxrl_post.data import dataset
from jaxrl_post.envs import single_turn
from jaxrl_post.models import decoder, weights
from jaxrl_post.placement import mesh, programs


@dataclasses.dataclass(frozen=True)
class Parts:
  """The host's half of a run.

  Attributes:
    decoder: the model, its shape read from the checkpoint or the experiment.
    data: tokenizer and prompts.
    env: how training prompts are asked.
    eval_env: how held-out prompts are asked.
  """

  decoder: decoder.Decoder
  data: dataset.Dataset
  env: single_turn.SingleTurn
  eval_env: single_turn.SingleTurn


def prepare(cfg: config.Run) -> Parts:
  """Reads the model's shape, the tokenizer and the prompts.

  Raises:
    InputError: something that the configuration names is not there, or does
      not fit the rest.
  """
  model = cfg.model
  shape = model.config
  if shape is None:
    assert model.path is not None, "Model checks it"
    shape = weights.read_config(model.path)
  if cfg.length > shape.max_positions:
    raise types.InputError(
      f"data.max_prompt + sampling.max_tokens: expected at most "
      f"{shape.max_positions} positions of the model, got {cfg.length}. "
      "Shorten one of them."
    )
  data = dataset.load(
    cfg.data,
    model_path=model.path,
    vocab_size=shape.vocab_size,
    seed=cfg.seed,
  )
  if cfg.warmup.num_steps:
    _check_references(cfg, data)
  stop_ids = data.tokenizer.eos_ids
  if not 1 <= len(stop_ids) <= cfg.sampling.max_stop_ids:
    raise types.InputError(
      f"sampling.max_stop_ids: expected 1 to {cfg.sampling.max_stop_ids} end "
      f"tokens of the tokenizer, got {stop_ids}. Raise the limit, or give the "
      "tokenizer an end token."
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
  return Parts(
    decoder=decoder.Decoder(shape, model.dtype, model.remat, model.chunk),
    data=data,
    env=single_turn.SingleTurn(cfg.group_size, sampling, data.tokenizer.decode),
    eval_env=single_turn.SingleTurn(1, greedy, data.tokenizer.decode),
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
    One line: prompts x group -> rows -> microbatches -> tokens, and where.

  Raises:
    InputError: it does not fit; names both numbers.
  """
  if cfg.placement.mode == "roles":
    engines = cfg.placement.roles.generation_replicas
  else:
    engines = processes
  shares = mesh.shares(cfg.placement, num_devices, processes)
  programs.check_rows(
    cfg.placement,
    shares,
    rows=cfg.rows,
    length=cfg.length,
    microbatches=cfg.optim.microbatches,
    engine_rows=cfg.sampling.rows,
    engines=engines,
  )
  if cfg.warmup.num_steps:
    programs.check_rows(
      cfg.placement,
      shares,
      rows=cfg.warmup.rows,
      length=cfg.length,
      microbatches=cfg.warmup.optim.microbatches,
      engine_rows=cfg.sampling.rows,
      engines=engines,
      rows_name="warmup.rows",
    )
  if len(parts.data.train) < cfg.groups_per_step:
    raise types.InputError(
      f"groups_per_step: expected at most the {len(parts.data.train)} prompts "
      f"of all epochs, got {cfg.groups_per_step}. Lower it, or raise "
      "data.epochs."
    )
  cut = cfg.optim.microbatches
  idle = f", {shares.idle} idle" if shares.idle else ""
  many = f" in {processes} processes" if processes > 1 else ""
  same = " (the same)" if cfg.placement.mode == "colocated" else ""
  return (
    f"a step: {cfg.groups_per_step} prompts x {cfg.group_size} = {cfg.rows} "
    f"rows -> {cut} x {cfg.rows // cut} rows of {cfg.length} tokens "
    f"({cfg.rows * cfg.length} in all); {shares.training} devices train, "
    f"{shares.generation}{same} generate{idle}{many}; max_lag {cfg.max_lag}; "
    f"{parts.data.train.size} prompts, {parts.data.train.dropped} dropped"
  )
