"""What a run says of its conversations, checked and made."""

from collections.abc import Collection, Sequence

from jaxrl_post import types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.envs import multi_turn, renewal, schedule, single_turn


def made(
  cfg: multi_turn.Conversation | None,
  stream: schedule.StreamConfig,
  max_lag: int,
  needs: Collection[str] = (),
) -> multi_turn.Environment | None:
  """Makes the environment of a run; None without one.

  Args:
    cfg: how conversations go; None is one turn.
    stream: how generation runs beside training.
    max_lag: of the run.
    needs: of its algorithm, see `algos.objective.Objective.needs`.

  Raises:
    InputError: it is none; or the stream is one that answers, which take
      whatever time, do not allow, or the algorithm one that rows do not.
  """
  if cfg is None:
    return None
  if stream.follow:
    raise types.InputError(
      "stream.follow: expected none with env, whose answers come when they "
      f"come and are no events, got {stream.follow}. Leave it out."
    )
  if stream.deterministic and max_lag:
    raise types.InputError(
      "stream.deterministic: expected max_lag=0 with env, as conversations "
      "that a checkpoint breaks may begin anew with newer weights, got "
      f"max_lag={max_lag}. Set max_lag=0."
    )
  if cfg.timeout_s >= stream.stall_s:
    raise types.InputError(
      f"env.timeout_s: expected less than stream.stall_s = {stream.stall_s:g}, "
      f"got {cfg.timeout_s:g}: an answer would pass for a stall. Lower it."
    )
  if cfg.renewal is not None and "one_row" in needs:
    raise types.InputError(
      "env.renewal: expected none with an algorithm that adds up what follows "
      "a token (a critic's, REINFORCE++), which may be in another row, got "
      f"max_rows={cfg.most_rows}. Take another algo, or leave it out."
    )
  environment = cfg.environment()
  if not isinstance(environment, multi_turn.Environment):
    raise types.InputError(
      "env.environment: expected a function that returns what has schemas, "
      f"reset, step and failed, got one that returns {environment!r}. Correct "
      "it."
    )
  if hasattr(environment, "save") != hasattr(environment, "restore"):
    raise types.InputError(
      "env.environment: expected both save and restore, or neither, got one of "
      f"them in {environment!r}. Write the other, too."
    )
  return environment


def most_rows(cfg: multi_turn.Conversation | None) -> int:
  """Returns how many training rows a rollout may have; 1 without `env`."""
  return 1 if cfg is None else cfg.most_rows


def build(
  cfg: multi_turn.Conversation | None,
  environment: multi_turn.Environment | None,
  group_size: int,
  sampling: types.SamplingParams,
  tokenizer: tokenizers.Tokenizer,
  *,
  max_prompt: int = 0,
) -> single_turn.SingleTurn | multi_turn.MultiTurn:
  """Returns how prompts are asked.

  Args:
    cfg: how conversations go; None is one turn.
    environment: from `made`.
    group_size: rollouts of each prompt.
    sampling: how each is sampled.
    tokenizer: of the run.
    max_prompt: longest prompt that the engine takes; read with `cfg.renewal`.

  Raises:
    InputError: conversations are to be told anew without a chat template.
  """
  single = single_turn.SingleTurn(group_size, sampling, tokenizer.decode)
  if cfg is None or environment is None:
    return single
  schemas = tuple(environment.schemas)
  templated = tokenizer.has_chat_template
  if cfg.renewal is not None and cfg.renewal.retell and not templated:
    raise types.InputError(
      "env.renewal.retell: expected false without a chat template, which alone "
      "can tell a conversation anew, got true. Leave it out."
    )

  def encode(
    messages: Sequence[multi_turn.Message], ended: bool
  ) -> tuple[int, ...]:
    return tokenizer.continuation(messages, tools=schemas, ended=ended)

  def render(messages: Sequence[multi_turn.Message]) -> tuple[int, ...]:
    if templated:
      return tokenizer.prompt_ids(messages, tools=schemas)[0]
    text = renewal.text(messages)
    if not text:
      raise types.RunError(
        "env.environment: expected messages with some text in the place of the "
        f"others, got {messages!r}. Mend the environment."
      )
    return tokenizer.prompt_ids(text)[0]

  if cfg.renewal is None:
    return multi_turn.MultiTurn(single, cfg, environment, encode)
  return multi_turn.MultiTurn(
    single, cfg, environment, encode, render, max_prompt
  )
