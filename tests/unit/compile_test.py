"""All steps of a run, compiled for machines that are not there."""

import contextlib
import dataclasses
import json
import math

import jax
import pytest
from absl.testing import flagsaver

from jaxrl_post import config, main, types
from jaxrl_post.algos import distill, divergence
from jaxrl_post.data import dataset, sources
from jaxrl_post.models import decoder, transformer
from jaxrl_post.models import spec as specs
from jaxrl_post.placement import mesh
from jaxrl_post.planning import chips, table
from jaxrl_post.planning import compile as compiles
from jaxrl_post.rewards import exact, pool
from jaxrl_post.sampling import engine
from jaxrl_post.training import optim
from tests.e2e import runs
from tests.unit import topology_test


def _never(index: int) -> types.Example:
  raise AssertionError("no prompt is read")


def _shape(num_layers: int = 2) -> transformer.Config:
  return transformer.Config(
    num_layers=num_layers,
    width=256,
    num_heads=8,
    num_kv_heads=4,
    head_width=128,
    ff_width=512,
    vocab_size=1024,
  )


def _run(**changes) -> config.Run:
  made = config.Run(
    model=decoder.Model(config=_shape(), dtype="bfloat16", remat="layer"),
    data=dataset.Data(train=sources.Generated(_never, size=8), max_prompt=128),
    rewards=pool.Rewards(functions=(exact.exact,)),
    optim=optim.Optim(microbatches=2),
    sampling=engine.Sampling(
      max_tokens=128, rows=16, prefill_tokens=64, dtype="bfloat16"
    ),
    placement=mesh.Placement(
      mode="split", generation=mesh.GenerationAxes(data=1, tensor=2)
    ),
    groups_per_step=4,
    group_size=4,
  )
  return dataclasses.replace(made, **changes)


STEPS = ["prefill", "extend", "insert", "decode", "score", "update", "publish"]


def _compiled(name: str, some: list[str], **changes) -> compiles.Report:
  """Compiles some of the steps for a machine."""
  every, said = compiles._lowered, []

  def lowered(*args):
    return [(step, lower) for step, lower in every(*args) if step in some]

  cache = (
    contextlib.nullcontext if name.startswith("h") else topology_test.uncached
  )
  # The gradient of attention mixes dtypes, as a run lets it.
  promotes = jax.numpy_dtype_promotion("standard")
  with pytest.MonkeyPatch.context() as patch, promotes, cache():
    patch.setattr(compiles, "_lowered", lowered)
    made = compiles.run(_run(**changes), chips.machine(name), said.append)
  assert [step.name for step in made.steps] == some
  assert len(said) == 1 + len(some)
  assert all(line.endswith(" s") for line in said[1:])
  return made


@pytest.fixture(name="report", scope="module")
def _report() -> compiles.Report:
  """All steps, by the compiler for CPUs, which takes less long."""
  return _compiled("h100:4", STEPS)


@pytest.fixture(name="on_tpu", scope="module")
def _on_tpu() -> compiles.Report:
  return _compiled("v5e:2x2", ["prefill", "score", "publish"])


def test_a_step_is_compiled_for_each_program_of_a_batch(report):
  # 4 prompts of two chunks, one at a time; 16 rollouts at once, of 16 blocks.
  calls = {step.name: step.calls for step in report.steps}
  assert calls == dict(
    prefill=4, extend=4, insert=4, decode=16, score=1, update=1, publish=1
  )
  assert all(step.compile_s > 0 for step in report.steps)


def test_gpus_are_an_estimate_and_marked_as_one(report, on_tpu):
  assert report.machine.is_estimate and not on_tpu.machine.is_estimate
  assert len(report.machine.devices) == len(on_tpu.machine.devices) == 4
  first = table.text(report).splitlines()[0]
  assert first == "AN ESTIMATE: compiled for CPUs in place of these devices."
  assert table.to_json(report)["estimate"] is True
  assert "ESTIMATE" not in table.text(on_tpu)


def test_the_compiler_for_tpus_estimates_its_own_time(report, on_tpu):
  prefill = on_tpu.steps[0]
  assert prefill.cost is not None and prefill.memory is not None
  assert prefill.xla_s == pytest.approx(prefill.cost.cycles / 1.5e9)
  assert 0 < max(prefill.limits(on_tpu.machine.chip).values()) < prefill.xla_s
  assert prefill.cost.collectives.keys() == {("all-reduce", "tensor")}
  assert prefill.cost.flops == report.steps[0].cost.flops
  assert all(math.isnan(step.xla_s) for step in report.steps)


def test_memory_is_of_one_device_and_adds_up(report):
  cfg = _run().model.config
  spec = transformer.spec(cfg)
  count = sum(
    math.prod(weight.shape)
    for weight in jax.tree.leaves(spec, is_leaf=lambda x: hasattr(x, "axes"))
  )
  training, generation = report.held
  # Norms are on every device; all else is split in two.
  assert training["parameters"] == pytest.approx(4 * count / 2, rel=0.01)
  assert training["optimizer"] == pytest.approx(8 * count / 2, rel=0.01)
  assert generation["engine weights"] == pytest.approx(2 * count / 2, rel=0.01)
  assert generation["next weights"] == generation["engine weights"]
  rows, tokens, heads = 16, 2 * 128, cfg.num_kv_heads // 2
  cache = rows * tokens * cfg.num_layers * 2 * heads * cfg.head_width * 2
  assert generation["cache"] == cache
  update = report.steps[5]
  # Weights and moments are updated in place.
  assert update.memory.aliased >= sum(training.values())
  parts = report.parts(update)
  assert sum(parts.values()) == update.memory.total
  assert report.fits(False) and report.fits(True)
  assert report.worst(False).name == "update"


def test_products_and_collectives_are_those_of_the_model(report):
  costs = {step.name: step.cost for step in report.steps}
  cfg, tokens = _run().model.config, 16 * 256
  # Forward, again for remat, and twice backward; and the head, of which three
  # quarters of the work are in the backward pass. Two devices share it.
  layers = cfg.num_layers * transformer.layer_flops(cfg, 256)
  head = 2 * cfg.width * cfg.vocab_size
  expected = tokens * (4 * layers + 4 * head) / 2
  assert costs["update"].flops == pytest.approx(expected, rel=0.25)
  assert ("all-gather", "fsdp") in costs["update"].collectives
  found = {axes for _, axes in costs["decode"].collectives}
  assert "tensor" in found and found <= {"tensor", "none"}
  for step in report.steps:
    limits = step.limits(report.machine.chip)
    assert limits.keys() == {"flops", "HBM", "ICI"}
    assert limits["HBM"] > 0


def test_the_table_is_80_wide_and_says_what_to_turn(report):
  text = table.text(report)
  assert max(map(len, text.splitlines())) <= 80
  assert "training, largest: of update; raise optim.microbatches (2)" in text
  shown = json.loads(json.dumps(table.to_json(report)))
  assert shown["topology"] == "h100:4" and shown["devices"] == 4
  assert [step["name"] for step in shown["steps"]][3] == "decode"
  side = shown["memory"]["training"]
  assert side["fits"] and side["total"] == sum(side["parts"].values())
  update = shown["steps"][5]
  assert update["roofline_s"] == max(update["limits_s"].values())


def test_a_step_that_does_not_fit_is_shown_with_what_it_needs(report):
  steps = list(report.steps)
  steps[5] = dataclasses.replace(
    steps[5],
    memory=None,
    cost=None,
    refusal="RESOURCE_EXHAUSTED: Ran out of memory on HBM",
    used=90 * 2**30,
  )
  short = dataclasses.replace(report, steps=tuple(steps))
  assert not short.fits(False) and short.fits(True)
  text = table.text(short)
  assert "refused: it needs 90.00 GiB" in text
  assert "training, largest: of update; raise optim.microbatches" in text
  assert max(map(len, text.splitlines())) <= 80
  shown = json.loads(json.dumps(table.to_json(short)))["steps"][5]
  assert shown["memory"] == {"total": 90 * 2**30}
  assert shown["refusal"].startswith("RESOURCE_EXHAUSTED")


@pytest.mark.parametrize(
  ("refusal", "size"),
  [
    (
      "Ran out of memory on HBM, the total memory required for HLO temporaries "
      "(256.00G) exceeds available HBM (95.74G).",
      256 * 2**30,
    ),
    (
      "Ran out of memory in memory space hbm. Used 20M of 15.75G hbm.",
      20 << 20,
    ),
    ("INTERNAL: RET_CHECK failure", 0),
  ],
)
def test_what_the_compiler_wanted_is_read_from_its_refusal(refusal, size):
  assert compiles._wanted(refusal) == size


def test_what_is_parked_counts_only_while_it_is_used(report):
  away = frozenset({"cache"})
  absent = {step.name: frozenset() for step in report.steps} | {"update": away}
  held = report.held[0] | report.held[1]
  parked = dataclasses.replace(
    report, shared=True, held=(held, held), absent=absent
  )
  by_name = {step.name: parked.parts(step) for step in parked.steps}
  assert "cache" in by_name["decode"] and "cache" not in by_name["update"]
  assert by_name["update"]["engine weights"] > 0
  cfg = _run(placement=mesh.Placement(park=("cache",)))
  assert compiles._absent("update", cfg) == away
  assert compiles._absent("decode", cfg) == frozenset()


def test_a_reference_of_its_own_counts_with_its_shape_and_dtype():
  policy = _run()
  small = dataclasses.replace(
    policy.model, remat="none", dtype="bfloat16", config=_shape(num_layers=1)
  )
  asked = dict(algo=distill.objective(), reference=small)
  report = _compiled("h100:4", ["score"], **asked)
  weights = specs.count(transformer.spec(_shape(num_layers=1)))
  # In bfloat16, over the two devices that train.
  assert report.held[0]["reference"] == pytest.approx(weights, rel=0.01)
  uses = {name: compiles._uses(name, _run(**asked)) for name in STEPS}
  assert "reference" in uses["score"] and "reference" not in uses["update"]
  moving = dataclasses.replace(
    policy.algo, kl=divergence.Kl(0.1, every=2, share=0.5)
  )
  assert "reference" in compiles._uses("update", _run(algo=moving))


def test_what_to_turn_is_a_setting_that_a_run_takes():
  placed = mesh.split(_run().placement, jax.devices()[:4])
  model = dataclasses.replace(_run().model, remat="none")
  knobs = compiles._knobs(_run(model=model), placed)
  assert knobs["of update"] == "set model.remat=layer"
  assert "microbatches" in compiles._knobs(_run(), placed)["of update"]


@pytest.mark.slow
def test_all_steps_compile_for_a_tpu():
  report = _compiled("v5e:2x2", STEPS)
  assert report.fits(False) and report.fits(True)
  assert all(step.xla_s > 0 for step in report.steps)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("v5p", r"expected CHIP:SHAPE with one of v4, v5e"),
    ("v9:2x2", "got 'v9:2x2'"),
    ("v5p:4xx4", "got 'v5p:4xx4'"),
    ("h100:0", "expected 1 to 65536 chips, got 0"),
    ("h100:4096", "expected at most the 8 devices"),
    ("v5e:3x7", "expected a slice that libtpu knows, got 'v5e:3x7'"),
  ],
)
def test_an_unknown_machine_is_one_line(name, message):
  with pytest.raises(types.InputError, match=message) as refused:
    chips.machine(name)
  assert "\n" not in str(refused.value)


def test_what_the_run_refuses_is_refused_before_compiling():
  machine = chips.machine("v5e:2x2")
  wrong = mesh.Placement(training=mesh.TrainingAxes(fsdp=3))
  with pytest.raises(types.InputError, match="placement"):
    compiles.run(_run(placement=wrong), machine, pytest.fail)
  roles = mesh.Placement(mode="roles")
  with pytest.raises(types.InputError, match="placement.mode: expected coloc"):
    compiles.check(_run(placement=roles))


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"mode": "compile"}, "--topology: expected a machine with --mode=compile"),
    ({"mode": "compile", "topology": "v7:1"}, "got 'v7:1'"),
    ({"topology": "v5e:2x2"}, "--topology: expected none with --mode=train"),
    (
      {"mode": "compile", "topology": "h100:4", "workdir": "/dev/null"},
      "--workdir: expected a folder to write to, got /dev/null (File exists)",
    ),
    ({"mode": "report", "process_id": 1}, "--process_id: expected none with"),
  ],
)
def test_the_command_line_says_what_is_missing_and_exits_2(
  given, message, capsys
):
  main.flags.FLAGS(["test"])
  with flagsaver.flagsaver(exp=str(runs.EXPERIMENT), **given):
    assert main.main([]) == 2
  err = capsys.readouterr().err
  assert message in err and err.count("\n") == 1
