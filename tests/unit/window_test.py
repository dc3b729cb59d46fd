"""Layers with a window: one forward, whatever its keys lie in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import quantize, spec, transformer, variants
from jaxrl_post.sampling import engine as engines
from jaxrl_post.training import lora
from tests.unit import engines as making

# A window that is shorter than most prompts and all completions below.
_WINDOW = variants.Window(5, (True, False, True), rope_theta=100.0)
CONFIG = dataclasses.replace(
  making.CONFIG,
  num_layers=3,
  qk_norm=True,
  window=_WINDOW,
  gemma=variants.Gemma(query_scalar=12),
)
_MOST_PROMPT, _MOST = 23, 14


def _params(config=CONFIG):
  """Returns weights whose norms are not at their start."""
  params = making.params(config)
  keys = iter(jax.random.split(jax.random.key(1), 20))

  def moved(path, x):
    if not str(path[-1].key).endswith("norm"):
      return x
    return x + 0.3 * jax.random.normal(next(keys), x.shape)

  return jax.tree.map_with_path(moved, params)


@jax.jit
def _forced(params, tokens, segments):
  """Scores rows of one sequence each, in one forward pass."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return decoders.logprobs(
    decoders.Decoder(CONFIG),
    params,
    tokens=tokens,
    positions=positions,
    segment_ids=segments,
    temperature=jnp.ones(tokens.shape),
  )[0]


def _assert_forced(params, prompts, completions):
  """Compares what was sampled with the log-probabilities of the forward."""
  width = _MOST_PROMPT + _MOST
  tokens, segments = np.zeros((2, 12, width), np.int32)
  for row, (prompt, made) in enumerate(zip(prompts, completions, strict=True)):
    ids = (*prompt, *made.tokens)
    tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
  right = np.asarray(_forced(params, tokens, segments))
  for row, (prompt, made) in enumerate(zip(prompts, completions, strict=True)):
    sampled = np.asarray(made.versions) >= 0
    mine = np.asarray(made.logprobs)[sampled]
    other = right[row, len(prompt) :][: len(sampled)][sampled]
    np.testing.assert_allclose(mine, other, atol=1e-5, rtol=1e-5)


def _engine(**sizes):
  sizes = {"rows": 6, "block": 4} | sizes
  return making.engine(
    engines.Sampling(max_tokens=_MOST, **sizes),
    max_prompt=_MOST_PROMPT,
    group=3,
    key=3,
    config=CONFIG,
  )


def _requests(lengths=(1, 23, 9, 4)):
  draw = np.random.default_rng(0)
  return [
    types.Request(
      prompt=tuple(draw.integers(0, 64, length).tolist()),
      uids=tuple(range(3 * i, 3 * i + 3)),
      sampling=types.SamplingParams(max_tokens=_MOST),
    )
    for i, length in enumerate(lengths)
  ]


# --------------------------------------------------------------------- engine


@pytest.mark.parametrize(
  "sizes",
  [
    pytest.param({"page": 1}, marks=pytest.mark.slow),
    {"page": 4, "rows": 4},
    {"page": 32, "prefill_tokens": 7},
  ],
  ids=str,
)
def test_decode_is_the_forward_with_a_window_shorter_than_all(sizes):
  params = _params()
  policy = types.Policy(params=params, version=0, step=0)
  requests = _requests()
  made = engines.generate(_engine(**sizes), policy, requests)
  assert all(len(c.tokens) == _MOST > _WINDOW.size for c in made)
  _assert_forced(params, [r.prompt for r in requests for _ in r.uids], made)


def test_the_window_is_seen_in_what_is_sampled():
  # Else the test above would pass without any.
  params, request = _params(), _requests((20,))[0]
  tokens = jnp.asarray([request.prompt])
  scores = []
  for window in (_WINDOW, None):
    config = dataclasses.replace(CONFIG, window=window)
    hidden, _ = transformer.forward(
      params, config, tokens, jnp.arange(20)[None]
    )
    scores.append(transformer.logits(params, config, hidden)[0])
  gap = np.abs(np.asarray(scores[0] - scores[1])).max(-1)
  assert gap[-1] > 0.01


def test_a_conversation_that_is_held_goes_on_with_its_window():
  params, engine = _params(), _engine(page=4)
  prompt = _requests((9,))[0].prompt

  def run(hold, most, begun=()):
    how = types.SamplingParams(max_tokens=most)
    engine.add(
      types.Request(
        prompt=prompt, uids=(7,), sampling=how, begun=begun, hold=hold
      )
    )
    done = []
    while engine.busy:
      done += engine.step(params, 0)
    return done[0]

  first = run(True, 6)
  said = (7, 7, 2)
  begun = types.Partial(
    uid=7,
    tokens=(*first.tokens, *said),
    logprobs=(*first.logprobs, 0.0, 0.0, 0.0),
    versions=(*first.versions, -1, -1, -1),
  )
  second = run(False, _MOST, (begun,))
  assert second.tokens[:9] == begun.tokens and len(second.tokens) == _MOST
  assert engine.metrics()["engine/prefill_tokens"] == len(prompt)
  _assert_forced(params, [prompt], [second])


# -------------------------------------------------------------------- trainer


def _packed(prompt, ends):
  """Packs rollouts of a prompt behind it, as `data.pack` does."""
  shared = len(prompt) - 1
  tokens, positions = [*prompt[:-1]], [*range(shared)]
  segments, prefixes = [1] * shared, [1] * shared
  for number, end in enumerate(ends, 2):
    piece = [prompt[-1], *end]
    tokens += piece
    positions += range(shared, shared + len(piece))
    segments += [number] * len(piece)
    prefixes += [1] * len(piece)
  names = "tokens", "positions", "segment_ids", "prefix_ids"
  rows = tokens, positions, segments, prefixes
  return {n: jnp.asarray([r]) for n, r in zip(names, rows, strict=True)}


def test_rollouts_that_share_a_prompt_reach_as_far_into_it():
  params, draw = _params(), np.random.default_rng(2)
  prompt = tuple(draw.integers(0, 64, 9).tolist())
  ends = [draw.integers(0, 64, n).tolist() for n in (12, 3, 8)]
  packed = _packed(prompt, ends)
  found, _ = decoders.logprobs(
    decoders.Decoder(CONFIG),
    params,
    temperature=jnp.ones(packed["tokens"].shape),
    **packed,
  )
  alone = []
  at = len(prompt) - 1
  for end in ends:
    mine = found[0, at + 1 : at + 1 + len(end)].tolist()
    at += 1 + len(end)
    fields = dict(uid=0, versions=(0,) * len(end), finish="length")
    alone.append(
      types.Completion(tokens=tuple(end), logprobs=tuple(mine), **fields)
    )
  _assert_forced(params, [prompt] * 3, alone)


def test_gradients_are_finite_and_those_of_unrolled_layers():
  params, draw = _params(), np.random.default_rng(3)
  packed = _packed(draw.integers(0, 64, 9).tolist(), [[1] * 8, [2, 3] * 4])

  def loss(decoder, params):
    logprobs, _ = decoders.logprobs(
      decoder,
      params,
      temperature=jnp.ones(packed["tokens"].shape),
      **packed,
    )
    return jnp.sum(logprobs * jnp.cos(jnp.arange(logprobs.size)))

  def slopes(params, **how):
    decoder = decoders.Decoder(CONFIG, **how)
    return jax.jit(jax.grad(lambda x: loss(decoder, x)))(params)

  scanned = slopes(params, remat="layer")
  unrolled = slopes(transformer.unstack(params))
  layers = jax.tree.map(lambda *x: jnp.stack(x), *unrolled["layers"])
  for (path, mine), other in zip(
    jax.tree.leaves_with_path(scanned),
    jax.tree.leaves({**unrolled, "layers": layers}),
    strict=True,
  ):
    name = jax.tree_util.keystr(path)
    assert np.all(np.isfinite(mine)) and np.any(mine != 0), name
    np.testing.assert_allclose(mine, other, atol=2e-5, rtol=1e-5, err_msg=name)


def test_weights_in_8_bits_and_adapted_ones_are_the_same_model():
  params, tree = _params(), transformer.spec(CONFIG)
  settings = lora.Lora(rank=2)
  adapters = jax.tree.map(
    lambda w: 0.1 * jnp.ones(w.shape),
    lora.spec(tree, settings),
    is_leaf=lambda x: isinstance(x, spec.Weight),
  )
  tokens = jnp.asarray([_requests((16,))[0].prompt])

  def hidden(params):
    return transformer.forward(params, CONFIG, tokens, jnp.arange(16)[None])[0]

  small = quantize.quantize(tree, params)
  for one, other in (
    (small, quantize.dequantize(tree, small)),
    (
      lora.attach(params, adapters, settings),
      lora.merge(params, adapters, settings),
    ),
  ):
    np.testing.assert_allclose(hidden(one), hidden(other), atol=1e-4)


def test_the_cost_of_a_layer_is_the_mean_of_both_kinds():
  def cost(keys, window):
    config = dataclasses.replace(CONFIG, window=window)
    return transformer.layer_flops(config, keys)

  for keys in (3, 5, 300):
    mean = (2 * cost(min(keys, 5), None) + cost(keys, None)) / 3
    assert cost(keys, _WINDOW) == pytest.approx(mean)
