"""Tokens are scored where they lie: numbers of one device, and little traffic.

Sizes are all different, so that the shape of what is sent tells what it is.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import scoring, transformer
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh as meshes

_ROWS, _LENGTH, _WIDTH, _VOCAB = 8, 24, 48, 640
_AXES = {
  "data": meshes.TrainingAxes(data=8, fsdp=1),
  "fsdp": meshes.TrainingAxes(fsdp=8),
  "tensor": meshes.TrainingAxes(fsdp=4, tensor=2),
  "context": meshes.TrainingAxes(data=2, fsdp=2, context=2),
}


def _config(tied: bool = True) -> transformer.Config:
  return transformer.Config(
    num_layers=2,
    width=_WIDTH,
    num_heads=4,
    num_kv_heads=2,
    head_width=12,
    ff_width=80,
    vocab_size=_VOCAB,
    tie_embeddings=tied,
  )


def _placed(axes: meshes.TrainingAxes, tied: bool = True):
  """Returns weights, how they lie, and how rows and positions do."""
  mesh = meshes.build(axes, jax.devices())
  tree = transformer.spec(_config(tied))
  home = meshes.weight_shardings(tree, meshes.TRAINING_RULES, mesh)
  params = specs.init(tree, jax.random.key(0), jnp.dtype("float32"))
  return params, home, meshes.token_sharding(mesh)


def _inputs():
  draw = np.random.default_rng(0)
  shape = (_ROWS, _LENGTH)
  return (
    draw.normal(size=(*shape, _WIDTH)).astype(np.float32),
    draw.integers(0, _VOCAB, shape).astype(np.int32),
    draw.uniform(0.5, 2.0, shape).astype(np.float32),
    draw.random(shape) < 0.4,
  )


def _sent(program: str) -> list[tuple[str, str, bool]]:
  """Returns operation and shape of all that is sent, and whether in a loop."""
  found, inside = [], False
  form = r"= (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective"
  for line in program.splitlines():
    if re.match(r"(ENTRY )?%?[\w.-]+ \(", line):
      inside = not line.startswith("ENTRY")
    sends = re.search(form + r"-permute)(-start)?\(", line)
    if sends:
      shapes = re.findall(r"\w+\[[\d,]*\]", sends[1])
      found += [(sends[2], shape, inside) for shape in shapes]
  return found


def _whole(shape: tuple[int, ...]) -> str:
  return "f32[" + ",".join(map(str, shape)) + "]"


@pytest.mark.parametrize("name", ["tensor", "context"])
def test_several_targets_are_scored_where_they_lie(name):
  params, home, lie = _placed(_AXES[name])
  hidden, targets, temperature, wanted = map(jnp.asarray, _inputs())
  several = (targets[..., None] + jnp.array([0, 7, 0])) % _VOCAB

  def total(head, hidden, sharding=None):
    more = dict(chunk=5, wanted=wanted, sharding=sharding)
    given = {"embed": head}, _config(), hidden
    found, _ = scoring.token_logprobs(*given, several, temperature, **more)
    best = scoring.most_probable(*given, temperature, num=4, **more)
    return jnp.sum(found * np.array([1.0, -2.0, 0.5])), (found, best)

  one, other = (
    jax.jit(
      jax.value_and_grad(
        functools.partial(total, sharding=sharding), (0, 1), has_aux=True
      ),
      **more,
    )(params["embed"], hidden)
    for sharding, more in (
      (None, {}),
      (lie, {"in_shardings": (home["embed"], lie)}),
    )
  )
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5),
    one,
    other,
  )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "head"])
@pytest.mark.parametrize("name", _AXES)
def test_tokens_are_scored_where_they_lie(name, tied):
  params, home, lie = _placed(_AXES[name], tied)
  key = "embed" if tied else "head"
  given = _inputs()

  def total(head, hidden, targets, temperature, wanted, sharding=None):
    found = scoring.token_logprobs(
      {key: head},
      _config(tied),
      hidden,
      targets,
      temperature,
      chunk=5,
      wanted=wanted,
      sharding=sharding,
    )
    return jnp.sum(found[0]) + 0.5 * jnp.sum(found[1]), found

  def graded(sharding, **more):
    value = functools.partial(total, sharding=sharding)
    return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True), **more)

  whole = jax.sharding.NamedSharding(lie.mesh, jax.P())
  spread = graded(
    lie,
    in_shardings=(home[key], *(lie,) * 4),
    out_shardings=((whole, (lie, lie)), (home[key], lie)),
  )
  program = spread.lower(params[key], *given).compile()
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5),
    program(
      jax.device_put(params[key], home[key]),
      *(jax.device_put(x, lie) for x in given),
    ),
    graded(None)(params[key], *given),
  )
  sent = _sent(program.as_text())
  share = _VOCAB // lie.mesh.shape["tensor"]
  head = _whole((share, _WIDTH) if tied else (_WIDTH, share))
  # The head, or its part, whole and once each way; of tokens only numbers, but
  # with a split vocabulary, where parts of d hidden have to be added up.
  gathered = [x for x in sent if x[0] == "all-gather" and x[1] == head]
  assert len(gathered) == (_AXES[name].fsdp != 1)
  for operation, shape, inside in sent:
    sizes = [int(n) for n in re.findall(r"\d+", shape.partition("[")[2])]
    is_sum = operation == "all-reduce" and name == "tensor"
    if _WIDTH in sizes and not is_sum:
      assert shape == head and not inside, (operation, shape)
    if inside and not is_sum:
      assert np.prod(sizes) <= 4 * _ROWS * _LENGTH, (operation, shape)


def test_split_weights_are_gathered_and_hidden_states_are_not():
  """But for the look-up, whose result goes from columns to rows."""
  params, home, lie = _placed(_AXES["fsdp"])
  decoder = decoders.Decoder(_config(), chunk=16, sharding=lie)

  def total(params, tokens, temperature):
    found = decoders.logprobs(
      decoder,
      params,
      tokens=tokens,
      positions=tokens,
      segment_ids=tokens,
      temperature=temperature,
    )
    return sum(map(jnp.sum, found))

  _, tokens, temperature, _ = _inputs()
  program = (
    jax.jit(jax.grad(total), in_shardings=(home, lie, lie), out_shardings=home)
    .lower(params, tokens, temperature)
    .compile()
  )
  sent = _sent(program.as_text())
  shapes = {shape for operation, shape, _ in sent if operation == "all-gather"}
  layer = {_whole(w.shape[1:]) for w in jax.tree.leaves(params["layers"])}
  assert _whole((_WIDTH, 80)) in shapes & layer
  rows = {shape for shape in shapes if shape.startswith(f"f32[{_ROWS},")}
  assert not rows, rows
  reduced = [s for operation, s, _ in sent if operation == "all-reduce"]
  assert not [s for s in reduced if str(_ROWS * _LENGTH) in s]
