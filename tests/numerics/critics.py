"""A batch with tokens of tools, and the steps of a critic over it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import types
from jaxrl_post.algos import baselines, ppo
from jaxrl_post.data import pack
from jaxrl_post.models import decoder as decoders
from jaxrl_post.training import critic as critics
from jaxrl_post.training import optim, step
from tests.numerics import laying
from tests.unit import engines as making

CONFIG = making.CONFIG
DECODER = decoders.Decoder(CONFIG, chunk=7)
ROWS, LENGTH, NUM = 8, 24, 6
REWARDS = (1.0, 0.0, 0.5, 2.0, 0.0, -1.0)
# No gradient is clipped: the first moment is then a tenth of it.
SETTINGS = optim.Optim(learning_rate=0.01, clip_norm=1e9)
HEAD = "value_head"


def groups(rewards=REWARDS, versions=0):
  """Makes two groups of three; tokens 1 and 2 of long ones are of a tool."""
  draw, made = np.random.default_rng(0), []
  asked = [draw.integers(0, 64, size).tolist() for size in (3, 2)]
  for number, reward in enumerate(rewards):
    prompt = types.Prompt(
      uid=number // 3,
      tokens=tuple(asked[number // 3 % 2]),
      text="",
      reference=None,
    )
    size = 1 + 2 * number
    made_by = [versions] * size
    if size > 4:
      made_by[1:3] = [-1, -1]
    completion = types.Completion(
      uid=number,
      tokens=tuple(draw.integers(0, 64, size).tolist()),
      logprobs=tuple((-4 - draw.random(size)).tolist()),
      versions=tuple(made_by),
      finish="length" if number == 3 else "stop",
    )
    made.append(
      types.Rollout(
        prompt=prompt,
        completion=completion,
        temperature=1.0,
        text="",
        reward=float(reward),
      )
    )
  return [
    types.Group(prompt=made[i].prompt, rollouts=tuple(made[i : i + 3]))
    for i in range(0, len(made), 3)
  ]


def packed(given=None, **cut):
  return pack.pack(
    given or groups(), pack.Layout(rows=ROWS, length=LENGTH, **cut)
  )


def apart(given=None):
  """Returns the same sequences with a row for each."""
  return laying.apart(given or groups(), pack.Layout(rows=ROWS, length=LENGTH))


def algorithm(model="own", **options):
  """Returns PPO whose critic learns fast, and is not whitened."""
  made = ppo.objective(model)
  words = {"learning_rate": 0.01, "whiten": False, **options}
  critic = made.critic
  assert isinstance(critic, baselines.Critic)
  return dataclasses.replace(
    made, baseline=dataclasses.replace(critic, **words)
  )


def tx(algo):
  return critics.optimizer(algo.critic, SETTINGS, 20)


def laid(sharding):
  """Returns the model whose rows and positions lie on a mesh."""
  return dataclasses.replace(DECODER, sharding=sharding)


def policy_tx():
  return optim.build(SETTINGS, 20)


def start(algo, seed: int | None = 3):
  """Returns a state whose value head is drawn, or 0 as in a run."""
  params = making.params(CONFIG)
  critic = critics.start(params, algo.critic, tx(algo))
  if critic is not None and seed is not None:
    head = jax.random.normal(jax.random.key(seed), (CONFIG.width,))
    own = {**critic.params, HEAD: 0.3 * head}
    critic = dataclasses.replace(critic, params=own)
  return step.init(params, jax.random.key(1), policy_tx(), critic=critic)


@functools.cache
def steps(algo, microbatches=1, minibatches=1, epochs=1):
  score = functools.partial(
    step.score,
    decoder=DECODER,
    algo=algo,
    microbatches=microbatches * minibatches,
    updates=minibatches * epochs,
  )
  update = functools.partial(
    step.update,
    decoder=DECODER,
    algo=algo,
    optimizer=policy_tx(),
    critic_optimizer=tx(algo),
    microbatches=microbatches,
    minibatches=minibatches,
    epochs=epochs,
  )
  return jax.jit(score), jax.jit(update)


def own(state):
  return None if state.critic is None else state.critic.params


def train(algo, batch, state=None, **cut):
  """Returns the scored batch, the next state and the metrics."""
  state = start(algo) if state is None else state
  score, update = steps(algo, **cut)
  scored = score(state.params, batch, critic=own(state))
  return scored, *update(state, scored)


def states(params, batch):
  """Returns hidden states, behind each token."""
  return decoders.states(
    DECODER,
    params,
    tokens=jnp.asarray(batch.tokens),
    positions=jnp.asarray(batch.positions),
    segment_ids=jnp.asarray(batch.segment_ids),
    prefix_ids=jnp.asarray(batch.prefix_ids),
  )


def trained(batch, number):
  """Returns row and places of the trained tokens of a sequence."""
  rows, places = np.nonzero(
    (np.asarray(batch.sequence) == number) & (np.asarray(batch.loss_mask) > 0)
  )
  return rows, places
