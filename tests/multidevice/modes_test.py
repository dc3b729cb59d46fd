"""The modes of a run: same devices or others, in turn or at once, how late."""

import functools

import jax
import numpy as np
import pytest

from tests.e2e import runs

SPLIT = "placement.mode=split"
TWO = ("placement.training.fsdp=2", "placement.generation.data=2")
FOUR = (*TWO, "placement.training.tensor=2", "placement.generation.tensor=2")
IN_TURN = "stream.asynchronous=false"
# One device a side where nothing else is said. Devices are compiled for one by
# one, so every other placement here costs seconds.
MODES = {
  "colocated": (IN_TURN,),
  "split in turn": (SPLIT, IN_TURN),
  "parked": (IN_TURN, "placement.park=optimizer,cache"),
  "freed first": (
    SPLIT,
    IN_TURN,
    "placement.publish.buffers=free_first",
    "placement.publish.chunk_bytes=2000",
  ),
  "split": (SPLIT,),
  "split over eight": (SPLIT, *FOUR),
  "split, lag 1": (SPLIT, "max_lag=1", "num_steps=50"),
  "split, lag 3": (SPLIT, "max_lag=3", "num_steps=8"),
  # Two threads launch programs that communicate, on the same devices.
  "colocated over two, lag 3": (*TWO, "max_lag=3", "num_steps=8"),
}
EXACT = tuple(name for name in MODES if "lag" not in name)
LAGGING = tuple(name for name in MODES if "lag" in name)
STEPS = 5


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
  """Runs each mode once, when it is first asked for."""

  @functools.cache
  def trained(name: str) -> runs.Trained:
    folder = tmp_path_factory.mktemp("run")
    return runs.train(folder, f"num_steps={STEPS}", *MODES[name])

  with runs.compile_cache():
    yield trained


def sampled(run: runs.Trained) -> list[list[tuple]]:
  """Returns what was asked, answered, and scored, by step."""
  return [
    [
      (r.prompt.uid, r.prompt.tokens, r.completion.tokens, r.reward)
      for group in groups
      for r in group.rollouts
    ]
    for groups in run.groups
  ]


def losses(run: runs.Trained) -> np.ndarray:
  names = ("loss/policy", "loss/entropy", "loss/grad_norm", "reward/mean")
  return np.array([[line[name] for name in names] for line in run.metrics])


def leaves(run: runs.Trained) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(run.state.params)]


@pytest.mark.parametrize("name", MODES)
def test_c64_c67_no_trained_token_is_older_than_the_bound(name, trained):
  run = trained(name)
  most = 0 if name in EXACT else int(name[-1])
  lags = [line["staleness/max"] for line in run.metrics]
  # From the records, too: a token's version is that of the weights it saw.
  seen = [
    step
    - min(v for g in groups for r in g.rollouts for v in r.completion.versions)
    for step, groups in enumerate(run.groups)
  ]
  assert lags == seen
  assert max(lags) <= most
  assert min(lags) >= 0


@pytest.mark.parametrize("name", LAGGING)
def test_a_run_that_may_lag_does(name, trained):
  assert max(line["staleness/max"] for line in trained(name).metrics) >= 1


@pytest.mark.parametrize("name", MODES)
def test_c127_nothing_is_compiled_after_the_second_step(name, trained):
  counts = [line["compile/count"] for line in trained(name).metrics]
  assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("name", EXACT)
def test_c34_engine_and_trainer_agree_without_lag(name, trained):
  for line in trained(name).metrics:
    assert line["mismatch/mean_abs"] <= 1e-5
    assert line["mismatch/max_abs"] <= 1e-4


@pytest.mark.parametrize("name", MODES)
def test_publish_copies_no_weights_to_the_host(name, trained):
  # The version and the step are counters of one number.
  assert set(trained(name).pulls) <= {()}


@pytest.mark.parametrize("name", MODES)
def test_what_was_admitted_is_somewhere(name, trained):
  for line in trained(name).metrics:
    fates = ("trained", "filtered", "failed", "dropped", "outstanding")
    assert line["ledger/admitted"] == sum(line[f"ledger/{x}"] for x in fates)


@pytest.mark.parametrize(
  "name", ["split in turn", "split", "parked", "freed first"]
)
def test_c72_without_lag_a_mode_changes_no_bit(name, trained):
  # The same shardings, on the same or on other devices, by one thread or two.
  reference, run = trained("colocated"), trained(name)
  assert sampled(run) == sampled(reference)
  np.testing.assert_array_equal(losses(run), losses(reference))
  for got, expected in zip(leaves(run), leaves(reference), strict=True):
    np.testing.assert_array_equal(got, expected)


def test_c113_one_device_or_eight(trained):
  reference, run = trained("colocated"), trained("split over eight")
  assert sampled(run) == sampled(reference)
  np.testing.assert_allclose(losses(run), losses(reference), atol=1e-5, rtol=0)
  logprobs = [
    np.concatenate(
      [r.completion.logprobs for gs in x.groups for g in gs for r in g.rollouts]
    )
    for x in (run, reference)
  ]
  np.testing.assert_allclose(*logprobs, atol=1e-5, rtol=0)
  for got, expected in zip(leaves(run), leaves(reference), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=0)


def test_devices_are_those_that_were_asked_for(trained):
  sizes = {
    name: len(
      jax.tree.leaves(trained(name).state.params)[0].sharding.device_set
    )
    for name in EXACT
  }
  assert sizes == {
    "colocated": 1,
    "split in turn": 1,
    "parked": 1,
    "freed first": 1,
    "split": 1,
    "split over eight": 4,
  }
