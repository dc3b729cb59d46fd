"""A model beside the policy that never trains: reference, or teacher, of a run.

It is read once and lies on the training mesh, as its own shape says and in its
own dtype. No state has it: so nothing updates, publishes or saves it.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_post import types
from jaxrl_post.models import decoder as decoders
from jaxrl_post.models import spec as specs
from jaxrl_post.models import weights
from jaxrl_post.placement import fingerprint
from jaxrl_post.placement import mesh as meshes


@dataclasses.dataclass(frozen=True)
class Source:
  """Which model it is.

  Attributes:
    decoder: its shape, and how it is computed; its weights have that dtype.
    path: its checkpoint; None draws random weights.
  """

  decoder: decoders.Decoder
  path: str | None = None


@dataclasses.dataclass(frozen=True)
class Reference:
  """The model in memory.

  Attributes:
    params: its weights; None in a run without such a model.
    digest: tells its weights from others, on whatever mesh they lie; empty
      without.
  """

  params: types.Tree = None
  digest: str = ""


@dataclasses.dataclass(frozen=True)
class Placed:
  """Where it lies.

  Attributes:
    decoder: the model, and how rows and positions of what it scores lie.
    abstract: shape of each weight, and how it lies in the memory of devices.
    load: reads or draws the weights.
  """

  decoder: decoders.Decoder
  abstract: types.Tree
  load: Callable[[], Reference]


def place(
  source: Source, mesh: jax.sharding.Mesh, *, key: jax.Array, host: str | None
) -> Placed:
  """Lays a model out on the training mesh. Reads nothing.

  Args:
    source: the model; its decoder is for rows that lie on `mesh`.
    mesh: the training mesh.
    key: the run's key.
    host: the kind of memory that the weights wait in; None is the devices'.
  """
  spec = decoders.spec(source.decoder.config)
  home = meshes.weight_shardings(spec, meshes.TRAINING_RULES, mesh)
  dtype = source.decoder.dtype

  def load() -> Reference:
    if source.path is None:
      start = functools.partial(
        decoders.init, source.decoder.config, dtype=jnp.dtype(dtype)
      )
      # The policy's own weights are of 0.
      own = jax.random.fold_in(key, 1)
      params = jax.jit(start, out_shardings=home)(own)
    else:
      params = weights.read_params(
        source.path, source.decoder.shape, home, dtype
      )
    digest = _digest(params, home)
    if host is not None:
      away = jax.tree.map(lambda s: s.with_memory_kind(host), home)
      params = jax.device_put(params, away)
    return Reference(params, digest)

  abstract = specs.on(specs.abstract(spec, dtype), home)
  return Placed(decoder=source.decoder, abstract=abstract, load=load)


def _digest(params: types.Tree, home: types.Tree) -> str:
  """Returns a SHA-256 of the checksums of all weights, by their names."""
  check = fingerprint.checker(fingerprint.by_name(home))
  sums = {
    name: int(x.addressable_shards[0].data[0])
    for name, x in check(fingerprint.by_name(params)).items()
  }
  text = json.dumps(sums, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
