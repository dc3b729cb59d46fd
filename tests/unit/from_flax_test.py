"""Models of the user's own: what they are to a run, and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxrl_post import config, types
from jaxrl_post.models import decoder, from_flax, named, network
from jaxrl_post.models import spec as specs
from jaxrl_post.training import optim
from tests.e2e import own_models as own
from tests.house import docs_test, source

TOKENS = jnp.array([[2, 3, 4, 5, 2], [5, 5, 3, 2, 4]], jnp.int32)
HERE = dict(
  positions=jnp.broadcast_to(jnp.arange(5), (2, 5)),
  segment_ids=jnp.ones((2, 5), jnp.int32),
)
TAKES = ("positions", "mask")


class Tied(nn.Module):
  """Gives states; its head is the embedding."""

  def setup(self) -> None:
    self.embed = nn.Embed(own.VOCAB, 8)
    self.mix = nn.Dense(8)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(self.mix(self.embed(tokens)))

  def head(self) -> jax.Array:
    return self.embed.embedding.T


class Apart(nn.Module):
  """Gives states; its head is used for nothing else."""

  def setup(self) -> None:
    self.embed = nn.Embed(own.VOCAB, 8)
    self.last = self.param("last", nn.initializers.normal(), (8, own.VOCAB))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.embed(tokens)

  def head(self) -> jax.Array:
    return self.last


class TiedNnx(nnx.Module):
  """The same in nnx."""

  def __init__(self, rngs: nnx.Rngs) -> None:
    self.embed = nnx.Embed(own.VOCAB, 8, rngs=rngs)
    self.mix = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return jnp.tanh(self.mix(self.embed(tokens)))

  def head(self) -> jax.Array:
    return self.embed.embedding[...].T


class Normed(nn.Module):
  """Keeps statistics of batches."""

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(own.VOCAB, 8)(tokens)
    return nn.Dense(own.VOCAB)(nn.BatchNorm(use_running_average=True)(x))


class Counting(nn.Module):
  """Has a weight of whole numbers."""

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    self.param("count", lambda key: jnp.zeros((), jnp.int32))
    return nn.Embed(own.VOCAB, own.VOCAB)(tokens)


class Named(nn.Module):
  """Names a dim by a word that nobody knows."""

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    drawn = nn.with_partitioning(nn.initializers.normal(), ("rows", None))
    return nn.Embed(own.VOCAB, own.VOCAB, embedding_init=drawn)(tokens)


class TwoOf(nn.Module):
  """Gives two things."""

  @nn.compact
  def __call__(self, tokens: jax.Array):
    return nn.Embed(own.VOCAB, own.VOCAB)(tokens), tokens


def built(model: decoder.Model):
  """Returns the decoder and the first weights."""
  assert isinstance(model.config, network.Network)
  made = decoder.Decoder(model.config, model.dtype, chunk=model.chunk)
  return made, decoder.init(model.config, jax.random.key(3), "float32")


def small(**options):
  return from_flax.nnx(
    lambda rngs: own.Small(rngs, **options), takes=("positions",), **own.SIZES
  )


def _logits(model, tokens):
  return model(tokens) @ model.head()


@pytest.mark.parametrize(
  ("make", "module", "head"),
  [
    (from_flax.linen, Tied(), Tied.head),
    (from_flax.linen, Apart(), Apart.head),
    (from_flax.nnx, TiedNnx, TiedNnx.head),
  ],
)
def test_a_head_scores_in_chunks_what_its_logits_say(make, module, head):
  """Log-probability, entropy and their gradients, of all logits and of few."""
  made, params = built(make(module, head=head, chunk=3, **own.SIZES))
  plain, same = built(make(module, call=_logits, **own.SIZES))
  assert jax.tree.all(
    jax.tree.map(lambda x, y: bool((x == y).all()), params, same)
  )

  def scored(made):
    def total(params):
      found, entropy = decoder.logprobs(
        made,
        params,
        tokens=TOKENS,
        temperature=jnp.full((2, 5), 0.7),
        wanted=jnp.broadcast_to(jnp.arange(5) > 1, (2, 5)),
        **HERE,
      )
      return jnp.sum(found * entropy), (found, entropy)

    return jax.grad(total, has_aux=True)(params)

  for x, y in zip(
    jax.tree.leaves(scored(made)),
    jax.tree.leaves(scored(plain)),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, atol=2e-6)
  given = dict(temperature=jnp.ones((2, 5)), wanted=jnp.ones((2, 5), bool))
  both = []
  for one in (made, plain):
    hidden = decoder.states(one, params, tokens=TOKENS, **HERE)
    both.append(decoder.most_probable(one, params, hidden, 2, **given))
  np.testing.assert_array_equal(both[0][0], both[1][0])
  np.testing.assert_allclose(both[0][1], both[1][1], atol=1e-6)


def test_scores_are_those_of_the_plain_formula():
  made, params = built(small())
  logits = decoder.states(made, params, tokens=TOKENS, **HERE)
  found, entropy = decoder.logprobs(
    made, params, tokens=TOKENS, temperature=jnp.full((2, 5), 2.0), **HERE
  )
  wanted = jax.nn.log_softmax(np.asarray(logits) / 2.0)
  for row, token in ((0, 1), (1, 4)):
    before = wanted[row, token - 1]
    assert found[row, token] == pytest.approx(
      float(before[TOKENS[row, token]]), abs=1e-6
    )
    assert entropy[row, token] == pytest.approx(
      float(-(np.exp(before) * before).sum()), abs=1e-6
    )
  assert found[0, 0] == entropy[0, 0] == 0


def test_a_packed_row_scores_as_its_sequences_do():
  """A shared prompt, two continuations, and a stranger behind them."""
  made, params = built(from_flax.linen(own.Step(), takes=TAKES, **own.SIZES))
  assert made.config.packs
  tokens = jnp.array([[2, 3, 3, 4, 3, 5, 5, 4]], jnp.int32)
  packed = decoder.states(
    made,
    params,
    tokens=tokens,
    positions=jnp.array([[0, 1, 2, 3, 2, 3, 0, 1]]),
    segment_ids=jnp.array([[1, 1, 2, 2, 3, 3, 4, 4]]),
    prefix_ids=jnp.array([[1, 1, 1, 1, 1, 1, 4, 4]]),
  )
  for alone, places in (
    ([2, 3, 3, 4], [0, 1, 2, 3]),
    ([2, 3, 3, 5], [0, 1, 4, 5]),
    ([5, 4], [6, 7]),
  ):
    row = jnp.array([alone], jnp.int32)
    one = decoder.states(
      made,
      params,
      tokens=row,
      positions=jnp.arange(len(alone))[None],
      segment_ids=jnp.ones_like(row),
    )
    np.testing.assert_allclose(
      packed[0, np.array(places)], one[0], atol=1e-5, rtol=1e-5
    )


def test_the_axes_of_weights_are_as_named_or_the_largest_that_fits():
  tree = small().config.spec()
  assert tree["embed"]["embedding"].axes == ("", "embed")
  assert tree["place"]["embedding"].axes == (specs.ANY, specs.ANY)
  assert from_flax.linen(own.Plain(), **own.SIZES).config.spec()["embed"][
    "embedding"
  ].axes == ("", "embed")
  rules, sizes = {"embed": "fsdp"}, {"fsdp": 4}
  for shape, axes, wanted in (
    ((8, 16), None, (None, "fsdp")),
    ((16, 8), None, ("fsdp", None)),
    ((8, 18), None, ("fsdp", None)),
    ((6, 18), None, (None, None)),
    ((8, 16), ("embed", None), ("fsdp", None)),
    ((8, 16), ("fsdp", "embed"), (None, "fsdp")),
    ((), None, ()),
  ):
    given = jax.ShapeDtypeStruct(shape, jnp.float32)
    declared = {"w": network.weight("w", given, axes)}
    found = specs.partition(declared, rules, sizes)["w"]
    assert tuple(found) == wanted
    # Where no such rule holds, as for generation, all of it is everywhere.
    none = specs.partition(declared, {}, {"data": 4})["w"]
    assert tuple(none) == (None,) * len(shape)


def test_first_weights_follow_the_key_and_are_float32():
  model = from_flax.linen(own.Plain(), dtype="bfloat16", **own.SIZES)
  _, params = built(model)
  leaves = jax.tree.leaves(params)
  assert {x.dtype for x in leaves} == {jnp.dtype("float32")}
  other = decoder.init(model.config, jax.random.key(4), "float32")
  assert not jax.tree.all(
    jax.tree.map(lambda x, y: bool((x == y).all()), params, other)
  )


def test_vectors_do_not_decay():
  """They are told by their dims, and by name where layers are stacked."""
  params = {
    name: jnp.ones(shape)
    for name, shape in (
      ("kernel", (2, 3)),
      ("shift", (3,)),
      ("scale", (2, 3)),
      ("bias", (2, 3)),
    )
  }
  made = optim.build(optim.Optim("sgd", 0.1, weight_decay=0.5), 1)
  none = jax.tree.map(jnp.zeros_like, params)
  with jax.numpy_dtype_promotion("standard"):
    moved, _ = made.update(none, made.init(params), params)
  assert [k for k, x in moved.items() if x.any()] == ["kernel"]


def test_a_model_is_told_from_others_by_what_it_is():
  told = [
    from_flax.linen(module, call=call, **own.SIZES).config.about
    for module, call in (
      (own.Plain(), None),
      (own.Plain(width=8), None),
      (own.Plain(), _logits),
    )
  ]
  assert len({*told}) == 3
  assert told[1].startswith("linen tests.e2e.own_models:Plain(width=8, ")
  assert told[2].endswith(f" by {__name__}:_logits")
  assert not any("\n" in text or " at 0x" in text for text in told)
  assert from_flax.nnx(own.Small, **own.SIZES).config.about == (
    "nnx tests.e2e.own_models:Small of tokens"
  )


class Odd(nn.Module):
  """Has settings of every kind."""

  setting: object = None

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return tokens


class Plain:
  """Has no text of its own."""


@dataclasses.dataclass(frozen=True)
class Held:
  what: object


def test_no_address_and_no_order_of_a_set_is_in_the_text_of_a_model():
  """In the text of what a run is continued by, each process says the same."""
  here = f"{__name__}:_logits"
  words = {f"w{i}" for i in range(9)}
  in_order = ", ".join(map(repr, sorted(words)))
  cases = [
    (Plain(), f"<{__name__}.Plain object>"),
    (Held(_logits), f"{Held(what=0)!r}".replace("0", "<function _logits>")),
    ((_logits, [_logits]), f"({here}, [{here}])"),
    ({"a": Plain(), "b": {"c": _logits}}, None),
    (functools.partial(_logits, Plain()), None),
    (words, f"set({in_order})"),
    (jnp.float32, "jax.numpy:float32"),
  ]
  for setting, wanted in cases:
    text = named.text(Odd(setting=setting))
    assert not re.search("0x[0-9a-f]", text), text
    if wanted is not None:
      assert text == f"{__name__}:Odd(setting={wanted})"
  made = [named.text(Odd(setting={"a": Plain()})) for _ in range(2)]
  assert made[0] == made[1]
  # What differs, still does.
  assert len({named.text(x) for x in ([1], (1,), {1}, 1, {1: 1})}) == 5
  assert named.text(str.strip) == "builtins:str.strip"


def test_a_reward_with_a_function_in_it_is_named_alike_in_each_process():
  given = functools.partial(_logits, Plain(), key=_logits, by={"b", "a"})
  text = config.to_json(given)
  assert text == (
    f"{__name__}:_logits(0=<{__name__}.Plain object>, key={__name__}:_logits, "
    "by=set('a', 'b'))"
  )


def linen(module, **more):
  return from_flax.linen(module, **own.SIZES, **more)


@pytest.mark.parametrize(
  ("model", "text"),
  [
    (lambda: small(out=5), r"shape \[2, 5, 6\], got float32 \[2, 5, 5\]"),
    (lambda: linen(TwoOf()), "an array .* as logits, got tuple"),
    (
      lambda: linen(own.Plain(dropout=0.5, deterministic=False)),
      "draws no random numbers .* asks for a random key",
    ),
    (lambda: small(dropout=0.5), "draws no random numbers .* of its rngs"),
    (lambda: linen(Normed()), "parameters only, got variables of batch_stats"),
    (
      lambda: small(norm=nnx.BatchNorm),
      "parameters only, got BatchStat in norm/mean",
    ),
    (lambda: linen(Counting()), "floating point, got int32 in count"),
    (lambda: linen(Named()), r"names of embed, .* got 'rows'"),
    (
      lambda: linen(Tied(), head=lambda m: m.embed.embedding),
      r"the head .* shape \[8, 6\], got float32 \[6, 8\]",
    ),
    (
      lambda: linen(own.Plain(), decode=lambda model, token: model(token)),
      "the collection cache, got nothing",
    ),
    (
      lambda: from_flax.nnx(lambda rngs: 3, **own.SIZES),
      "makes a flax.nnx module, got one that makes int",
    ),
    (lambda: linen(own.Plain), "expected a flax.linen module, got type"),
    (lambda: from_flax.nnx(3, **own.SIZES), "what makes a model, got int"),
    (lambda: linen(own.Plain(), takes=("masks",)), "expected takes of"),
    (lambda: linen(own.Plain(), chunk=8), "chunk only with head, got 8"),
    (
      lambda: from_flax.nnx(own.Small, decode=own.small_step, **own.SIZES),
      "both of decode and cache",
    ),
    (
      lambda: from_flax.linen(own.Plain(), vocab_size=0, max_positions=8),
      "vocab_size: expected >= 2, got 0",
    ),
    (
      lambda: dataclasses.replace(linen(own.Plain()), remat="dots"),
      "model.remat: expected none",
    ),
  ],
)
def test_a_model_that_is_not_one_is_refused_in_one_line(model, text):
  with pytest.raises(types.InputError, match=text) as error:
    network.check(model().config, "float32")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("model", "text"),
  [
    (small(causal=False), "expected a causal model, got outputs that"),
    (
      linen(own.Step(shift=1), takes=TAKES, decode=own.step),
      "expected decode to give what the whole sequence gives",
    ),
  ],
)
def test_a_model_that_looks_ahead_or_decodes_otherwise_is_refused(model, text):
  _, params = built(model)
  network.check(model.config, "float32")
  with pytest.raises(types.InputError, match=text):
    network.probe(model.config, params)


@pytest.mark.parametrize(
  "model",
  [
    linen(own.Plain()),
    linen(own.Step(), takes=TAKES, decode=own.step),
    own.nnx_cached().model,
  ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_model_passes_in_either_dtype(model, dtype):
  network.check(model.config, dtype)
  if dtype == "float32":
    network.probe(model.config, built(model)[1])


def test_the_example_of_the_documents_is_two_models():
  text = (source.ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
  (code,) = [c for c in docs_test.blocks(text) if "from_flax" in c]
  seen = {}
  exec(compile(code, "docs/adding.md", "exec"), seen)
  words = from_flax.linen(seen["Words"](16), vocab_size=32, max_positions=64)
  for model in (words, seen["model"]):
    network.check(model.config, "float32")
    network.probe(model.config, built(model)[1])
  assert seen["model"].config.read is not None
