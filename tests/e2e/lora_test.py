"""Runs that train adapters, or some weights: what is sampled, kept, refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.training import lora, trained
from tests.e2e import runs

LORA = ("optim.trained.rank=2", "optim.trained.alpha=8")
ONLY = ("optim.trained.patterns=layers/*,final_norm",)
KL = "with_kl"
MOVING = ("algo.kl.every=2", "algo.kl.share=0.5")
SPLIT = ("placement.mode=split", "stream.asynchronous=false")
CUT = ("optim.microbatches=2", "optim.minibatches=2", "algo.correction=none")


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory):
  """Makes each run once, when it is first asked for."""

  @functools.cache
  def made(*assignments: str, exp: str = "get_config") -> runs.Trained:
    return runs.train(tmp_path_factory.mktemp("run"), *assignments, exp=exp)

  with runs.compile_cache():
    yield made


def begun(*assignments, exp="get_config"):
  """Returns a run's settings, its programs and its first state."""
  cfg = runs.configured(*assignments, exp=exp)
  place = loop.build(cfg, prepare.prepare(cfg))
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  return cfg, place, trainer.start(place.draw())


def same(one, other):
  return [
    np.array_equal(x, y)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  ]


# ------------------------------------------------------------- on the policy


@pytest.mark.parametrize("more", [(), SPLIT])
def test_the_engine_samples_from_what_the_adapters_make(more, made):
  """Weights move, and engine and trainer agree on every one of them."""
  run = made(*LORA, *more, exp=KL)
  assert [line["policy_version"] for line in run.metrics][-1] == 4
  for line in run.metrics:
    assert line["loss/update_norm"] > 0
    assert line["mismatch/mean_abs"] <= 1e-5
    assert line["mismatch/max_abs"] <= 1e-4
    assert line["loss/ess"] == pytest.approx(1.0, abs=1e-4)
  kls = [line["loss/kl"] for line in run.metrics]
  assert kls[0] == pytest.approx(0.0, abs=1e-6)
  assert kls[-1] > 1e-3


def test_the_weights_beneath_are_those_of_the_start(made):
  run = made(*LORA, exp=KL)
  _, _, state = begun(*LORA, exp=KL)
  assert all(same(run.state.params, state.params))
  assert not any(same(run.state.adapters, state.adapters))
  assert run.state.reference is None


def test_the_kl_is_to_the_weights_beneath(made):
  """At the start it is 0; later it is that of the merged weights to them."""
  run = made(*LORA, exp=KL)
  cfg, place, _ = begun(*LORA, exp=KL)
  parts = prepare.prepare(cfg)
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  rows = loop.pack.pack(
    run.groups[-1], loop.pack.Layout(rows=cfg.rows, length=cfg.length)
  )
  found = trainer.score(run.state, trainer.put(rows))
  # The same by a run whose weights all train, with a copy of the first ones.
  plain = runs.configured(exp=KL)
  full = loop.build(plain, parts).trainer(
    plain.algo, plain.optim, plain.num_steps
  )
  expected = full.score(full.start(place.draw()), full.put(rows))
  np.testing.assert_allclose(
    found.reference_logprobs, expected.reference_logprobs, atol=1e-6
  )


@pytest.mark.parametrize(
  "more", [(), SPLIT, ("sampling.dtype=bfloat16",), (*SPLIT, *CUT)]
)
def test_what_is_published_is_bit_for_bit_the_merged_weights(more):
  cfg, place, state = begun(*LORA, *more)
  first = place.publish(state)
  draw = np.random.default_rng(0)
  state = dataclasses.replace(
    state,
    adapters=jax.tree.map(
      lambda x: jax.device_put(
        draw.standard_normal(x.shape).astype(np.float32), x.sharding
      ),
      state.adapters,
    ),
  )
  whole, changed = place.publish(state), place.publish(state, first)
  for policy in (first, whole, changed):
    place.verify(policy)
  merge = jax.jit(functools.partial(lora.merge, cfg=cfg.optim.trained))
  expected = merge(state.params, state.adapters)
  for name in ("embed", "final_norm"):
    assert changed.params[name] is first.params[name]
  for sent in (whole, changed):
    for got, x, old in zip(
      jax.tree.leaves(sent.params),
      jax.tree.leaves(expected),
      jax.tree.leaves(state.params),
      strict=True,
    ):
      assert got.dtype == cfg.sampling.dtype
      np.testing.assert_array_equal(got, np.asarray(x).astype(got.dtype))
      if x.ndim > 2:
        assert np.abs(np.asarray(x) - np.asarray(old)).max() > 0.1


def test_frozen_weights_are_sent_once():
  for setting, frozen in ((LORA, 4), (ONLY, 1), ((), 0)):
    _, place, _ = begun(*setting, *SPLIT)
    stay = {leaf.name for leaf in place.publisher.leaves} - place.resent.chosen
    assert len(stay) == frozen
    assert (place.resent.bytes < place.publisher.bytes) == bool(frozen)


@pytest.mark.parametrize("setting", [LORA, ONLY])
def test_an_update_leaves_frozen_weights_where_they_are(setting):
  """Also where they are the engine's own memory, and so never donated."""
  cfg, place, state = begun(*setting)
  assert place.publisher.aliases
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  layout = loop.pack.Layout(rows=cfg.rows, length=cfg.length)
  rows = loop.pack.pack((), layout)
  after, _ = trainer.update(state, trainer.score(state, trainer.put(rows)))
  _, frozen = trained.split(cfg.optim.trained, state.params)
  _, same_ones = trained.split(cfg.optim.trained, after.params)
  pairs = zip(jax.tree.leaves(frozen), jax.tree.leaves(same_ones), strict=True)
  assert frozen["embed"] is not None
  for old, new in pairs:
    assert new is old


def test_only_what_is_named_trains(made):
  run = made(*ONLY, *SPLIT)
  _, _, state = begun(*ONLY, *SPLIT)
  equal = same(run.state.params, state.params)
  paths = [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree.leaves_with_path(state.params)
  ]
  assert [p for p, x in zip(paths, equal, strict=True) if x] == ["['embed']"]
  assert run.metrics[-1]["mismatch/max_abs"] <= 1e-4
  _, place, _ = begun(*SPLIT)
  assert 0 < run.metrics[-1]["sync/bytes"] < place.resent.bytes


# -------------------------------------------------------------- on the disk


@pytest.mark.parametrize(
  "setting", [(*LORA, *CUT), pytest.param(ONLY, marks=pytest.mark.slow)]
)
def test_c95_two_halves_equal_the_run_in_one_go(setting, made, tmp_path):
  whole = made(*setting)
  runs.train(tmp_path, "num_steps=2", *setting)
  rest = runs.train(tmp_path, *setting)
  assert len(rest.groups) == 2
  for part in ("params", "adapters", "opt_state"):
    assert all(same(getattr(whole.state, part), getattr(rest.state, part)))
  assert (whole.state.adapters is None) == (setting == ONLY)
  stored = runs.state(tmp_path, runs.configured(*setting))
  assert all(same(stored.adapters, whole.state.adapters))


@pytest.mark.parametrize(("before", "after"), [((), LORA), (LORA, ONLY)])
def test_a_checkpoint_of_another_setting_is_refused(
  before, after, made, tmp_path
):
  runs.train(tmp_path, "num_steps=1", *before)
  cfg = runs.configured(*after)
  with pytest.raises(types.InputError, match="checkpoint .*, leaf ") as error:
    loop.run(cfg, prepare.prepare(cfg), tmp_path)
  assert "\n" not in str(error.value)


# -------------------------------------------------------------- wrong settings


def refused(end: runs.Outcome) -> str:
  assert end.code == 2, end.err
  lines = [x for x in end.err.splitlines() if x.startswith("error: ")]
  assert len(lines) == 1 and "Traceback" not in end.err
  return lines[0]


@pytest.mark.parametrize(
  ("setting", "line"),
  [
    ("optim.trained.targets=query", "among q, k, v, o, gate, up, down, got"),
    ("optim.trained.rank=9", "expected at most 8, the smaller side of k"),
    ("optim.trained.patterns=blocks/*", "got 'blocks/*'"),
  ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(setting, line, tmp_path):
  end = runs.run(
    tmp_path,
    runs.experiment(),
    "--mode=dry_run",
    *runs.settings(setting),
  )
  assert line in refused(end)


def test_another_setting_in_a_run_folder_is_one_line_and_exit_2(tmp_path):
  args = (runs.experiment(), "--workdir=run", *runs.settings("num_steps=1"))
  assert runs.run(tmp_path, *args).code == 0
  end = runs.run(tmp_path, *args, *runs.settings(*LORA))
  assert "optim.trained" in refused(end)


def test_a_reference_that_moves_is_refused_with_adapters():
  with pytest.raises(types.InputError, match=r"algo\.kl\.every: expected 0"):
    runs.configured(*LORA, *MOVING, exp=KL)
  run = runs.configured(*ONLY, *MOVING, exp=KL)
  assert isinstance(run.optim.trained, trained.Only)


def test_settings_are_described_by_their_class_and_leaves():
  lines = config.describe(runs.configured(*LORA)).split("\n")
  assert "optim.trained = jaxrl_post.training.lora:Lora" in lines
  assert "optim.trained.rank = 2" in lines
  assert runs.configured("optim.trained=none").optim.trained is None
