"""Programs of a run of each family, compiled for TPUs that are not here.

`experiments/families.py` has the shapes, docs/compile.md the table.
"""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import config
from jaxrl_post.placement import mesh as meshes
from jaxrl_post.placement import trainer as trainers
from jaxrl_post.planning import chips
from jaxrl_post.planning import compile as compiles
from tests.e2e import runs
from tests.unit import topology_test

FAMILIES = ("get_config", "smollm2", "qwen2_5", "qwen3", "qwen3_moe", "gemma3")
# Eight devices each: a chip of the last is two.
SLICES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
MAIN = ("prefill", "decode", "update")


@pytest.fixture(autouse=True)
def _nothing_cached():
  with topology_test.uncached():
    yield


def _compiled(family, machine, some):
  """Compiles some programs; returns them by name."""
  cfg = config.load(f"families:{family}", runs.ROOT / "experiments")
  every = compiles._lowered

  def lowered(*args):
    return [(step, lower) for step, lower in every(*args) if step in some]

  promotes = jax.numpy_dtype_promotion("standard")
  with pytest.MonkeyPatch.context() as patch, promotes:
    patch.setattr(compiles, "_lowered", lowered)
    report = compiles.run(cfg, chips.machine(machine), lambda line: None)
  return {step.name: step for step in report.steps}


@pytest.mark.parametrize(
  ("family", "machine"), [("gemma3", "tpu7x:2x2x1"), ("qwen3_moe", "v5e:2x4")]
)
def test_a_prompt_is_read_on_a_chip(family, machine):
  step = _compiled(family, machine, ["prefill"])["prefill"]
  assert step.refusal == "" and step.xla_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("machine", SLICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_compiles_for_each_chip(family, machine):
  steps = _compiled(family, machine, MAIN)
  assert [(s.name, s.refusal) for s in steps.values()] == [
    (name, "") for name in MAIN
  ]
  for step in steps.values():
    kinds = {kind for kind, _ in step.cost.collectives}
    assert kinds and step.memory.total > 0


@pytest.mark.parametrize(
  "told", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_what_trains_gathers_a_weight_before_its_product(told):
  devices = topology_test.slices("v5p:4x4x2")
  mesh = meshes.build(meshes.TrainingAxes(fsdp=32), devices)
  options = trainers._options(mesh)
  assert options is not None
  cpu = meshes.build(meshes.TrainingAxes(fsdp=1), jax.devices()[:1])
  assert trainers._options(cpu) is None

  def of(shape, *parts):
    lie = jax.sharding.NamedSharding(mesh, jax.P(*parts))
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lie)

  product = jax.jit(jnp.dot, compiler_options=options if told else None)
  rows, weight = of((2**18, 4096), "fsdp"), of((4096, 12288), "fsdp")
  text = product.lower(rows, weight).compile().as_text()
  assert ("collective-permute" in text) is not told
  assert ("all-gather" in text) is told
