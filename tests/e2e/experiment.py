"""The smallest run there is, for tests; and variants that fail on purpose.

The answer is the first letter of the question. One device trains and samples,
in turn.
"""

import ctypes
import dataclasses
import pathlib
import threading
import time
from typing import Any

from jaxrl_post import config, types
from jaxrl_post.algos import divergence, grpo, ppo
from jaxrl_post.algos import objective as objectives
from jaxrl_post.data import dataset, sources
from jaxrl_post.data import pack as packing
from jaxrl_post.envs import evaluate, pass_at_k
from jaxrl_post.models import decoder, experts, transformer
from jaxrl_post.placement import mesh
from jaxrl_post.rewards import pool, protocol
from jaxrl_post.runtime import checkpoint
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim

LETTERS = "abcd"


def make(index: int) -> types.Example:
  """Makes the example of an index: two letters, of which the first counts."""
  first, second = divmod(index % len(LETTERS) ** 2, len(LETTERS))
  question = LETTERS[first] + LETTERS[second]
  return types.Example(prompt=question, reference=LETTERS[first])


def score(rollout: types.Rollout, reference: str) -> float:
  """Scores the share of right letters, and a little for being short."""
  text = rollout.text
  right = sum(letter == reference for letter in text) / max(len(text), 1)
  return right - 0.01 * len(text)


def boom(rollout: types.Rollout, reference: str) -> float:
  """Raises in the fourth group, and leaves a file that says when."""
  if rollout.prompt.uid == 3:
    pathlib.Path("raised").touch()
    raise ValueError("boom")
  return score(rollout, reference)


def hang(rollout: types.Rollout, reference: str) -> float:
  """Never answers in the fourth group."""
  if rollout.prompt.uid == 3:
    threading.Event().wait()
  return score(rollout, reference)


def hang_later(rollout: types.Rollout, reference: str) -> float:
  """Never answers in the sixth group, and leaves a file that says so."""
  if rollout.prompt.uid == 5:
    pathlib.Path("hangs").touch()
    threading.Event().wait()
  return score(rollout, reference)


def patchy(rollout: types.Rollout, reference: str) -> float:
  """Raises for one rollout of each group and has no reward for another."""
  if rollout.completion.uid % 4 == 1:
    raise ValueError("boom")
  if rollout.completion.uid % 4 == 2:
    return float("nan")
  return score(rollout, reference)


def slow(rollout: types.Rollout, reference: str) -> float:
  """Takes 300 ms more for one rollout of step 4; notes from when to when."""
  if rollout.completion.uid == 3 * 16:
    begun = time.monotonic()
    threading.Event().wait(0.3)
    pathlib.Path("slow.txt").write_text(f"{begun} {time.monotonic()}")
  return score(rollout, reference)


def constant(rollout: types.Rollout, reference: str) -> float:
  """Says nothing."""
  return 1.0


def first_seven(rollout: types.Rollout, reference: str) -> float:
  """Scores by the place of the prompt, whatever the policy says."""
  return float(rollout.prompt.uid < 7)


def get_config() -> config.Run:
  """Four prompts a step, four rollouts each, on the first device."""
  return config.Run(
    model=decoder.Model(
      config=transformer.Config(
        num_layers=1,
        width=16,
        num_heads=4,
        num_kv_heads=2,
        head_width=4,
        ff_width=32,
        vocab_size=8,
      )
    ),
    data=dataset.Data(
      train=sources.Generated(make, size=64),
      alphabet=LETTERS,
      max_prompt=3,
    ),
    rewards=pool.Rewards(functions=(score,)),
    optim=optim.Optim(learning_rate=1e-2),
    sampling=engine.Sampling(max_tokens=5, rows=32, block=2),
    # As many as the tests have: the compiled programs are then the same.
    placement=mesh.Placement(
      training=mesh.TrainingAxes(fsdp=1),
      generation=mesh.GenerationAxes(data=1),
      cpu_devices=8,
    ),
    checkpoint=checkpoint.Checkpoint(every=0),
    num_steps=4,
    groups_per_step=4,
    group_size=4,
    max_lag=0,
    logged_groups=100,
  )


def scored_by(function: protocol.Reward, **options: Any) -> config.Run:
  """The run of `get_config` with another reward."""
  rewards = pool.Rewards(functions=(function,), **options)
  return dataclasses.replace(get_config(), rewards=rewards)


def moe() -> config.Run:
  """A mixture of four experts, of which a token goes through two."""
  run = get_config()
  shape = dataclasses.replace(
    run.model.config, ff_width=16, experts=experts.Experts(4, 2)
  )
  model = dataclasses.replace(
    run.model, config=shape, balance=experts.Balance(0.01)
  )
  return dataclasses.replace(run, model=model)


def with_boom() -> config.Run:
  """A reward raises."""
  return scored_by(boom)


def with_hang() -> config.Run:
  """A reward never returns."""
  return scored_by(hang, timeout_s=1.0)


def with_late_hang() -> config.Run:
  """A reward of the second batch never returns, and may take its time."""
  return scored_by(hang_later, timeout_s=1000.0)


def with_stuck_step() -> config.Run:
  """The main thread never leaves C in the third batch, and leaves a file."""
  pack, calls = packing.pack, iter(range(2))
  mutex, c = ctypes.create_string_buffer(256), ctypes.CDLL(None)

  def stuck(*args: Any, **options: Any) -> types.Batch:
    if next(calls, None) is None:
      pathlib.Path("stuck").touch()
      # No signal interrupts this, as none interrupts a compilation.
      c.pthread_mutex_lock(mutex)
      c.pthread_mutex_lock(mutex)
    return pack(*args, **options)

  packing.pack = stuck
  return get_config()


def with_slow() -> config.Run:
  """One block makes all completions of a step, and some rewards take long."""
  run = scored_by(slow)
  sampling = dataclasses.replace(run.sampling, max_tokens=2)
  return dataclasses.replace(run, sampling=sampling, num_steps=5)


def with_patches() -> config.Run:
  """Half of the rollouts have no reward."""
  return scored_by(patchy, on_failure="mask")


def with_constant() -> config.Run:
  """All rewards agree."""
  return scored_by(constant)


def with_held_out() -> config.Run:
  """Evaluates ten prompts, of which seven count as right."""
  run = scored_by(first_seven)
  held_out = sources.Generated(make, size=10)
  return dataclasses.replace(
    run, data=dataclasses.replace(run.data, held_out=held_out)
  )


def solved(rollout: types.Rollout) -> bool:
  """Says whether a rollout counts as right."""
  return rollout.reward > 0


def with_two_sets() -> config.Run:
  """Evaluates two sets, four completions a prompt, after every step."""
  run = scored_by(first_seven)
  sets = dataset.Sets(
    names=("low", "all"),
    sources=(
      sources.Generated(make, size=6),
      sources.Generated(make, size=10),
    ),
  )
  samples = pass_at_k.Samples(number=4, success=solved, answer=str.strip)
  return dataclasses.replace(
    run,
    data=dataclasses.replace(run.data, held_out=sets),
    evaluation=evaluate.Evaluation(every=1, temperature=1.0, samples=samples),
  )


def with_held_out_letters() -> config.Run:
  """The run of `get_config`, with ten prompts to be tested on."""
  run = get_config()
  held_out = sources.Generated(make, size=10)
  return dataclasses.replace(
    run, data=dataclasses.replace(run.data, held_out=held_out)
  )


def with_kl() -> config.Run:
  """Holds the policy near its first weights."""
  algo = dataclasses.replace(grpo.objective(), kl=divergence.Kl(0.1))
  return dataclasses.replace(get_config(), algo=algo)


def with_a_word() -> config.Run:
  """A trust region that is none."""
  words: Any = {"region": "clip"}
  return dataclasses.replace(get_config(), algo=objectives.Objective(**words))


def with_a_sum() -> config.Run:
  """A loss of the user's own that is one number."""
  algo = objectives.Objective(region=lambda log_ratio, _: log_ratio.sum())
  return dataclasses.replace(get_config(), algo=algo)


def from_file() -> config.Run:
  """Reads its prompts from data.jsonl in the folder it is started in."""
  run = get_config()
  train = sources.Jsonl("data.jsonl")
  return dataclasses.replace(
    run, data=dataclasses.replace(run.data, train=train)
  )


def from_folder() -> config.Run:
  """Asks for a model folder that is not there."""
  run = get_config()
  folder = str(pathlib.Path("no") / "such" / "model")
  return dataclasses.replace(run, model=decoder.Model(path=folder))


def with_critic() -> config.Run:
  """PPO, with a second transformer as its critic."""
  return dataclasses.replace(
    get_config(), algo=_learning_fast(ppo.objective("own"))
  )


def with_critic_head() -> config.Run:
  """PPO, with a second head on the policy; a rollout for each prompt."""
  return dataclasses.replace(
    get_config(),
    algo=_learning_fast(ppo.objective("head")),
    groups_per_step=16,
    group_size=1,
  )


def _learning_fast(algo: objectives.Objective) -> objectives.Objective:
  critic = dataclasses.replace(algo.baseline, learning_rate=1e-2)
  return dataclasses.replace(algo, baseline=critic)
