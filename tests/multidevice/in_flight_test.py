"""Weights that change while rollouts are in the making, on several devices."""

import dataclasses

import jax
import pytest

from jaxrl_post import loop, prepare, types
from tests.e2e import runs


@pytest.fixture(autouse=True)
def _cached():
  with runs.compile_cache():
    yield


def test_a_run_trains_only_tokens_of_the_newest_version(tmp_path):
  run = runs.train(
    tmp_path,
    "placement.mode=split",
    "max_lag=3",
    "num_steps=30",
    "sampling.block=1",
    "sampling.in_flight=recompute",
    "mask_stale_tokens=true",
  )
  shares = []
  for step, (line, groups) in enumerate(
    zip(run.metrics, run.groups, strict=True)
  ):
    versions = [r.completion.versions for g in groups for r in g.rollouts]
    sampled = sum(len(v) for v in versions)
    trained = sum(v.count(max(v)) for v in versions)
    shares.append(1 - trained / sampled)
    assert line["staleness/masked_tokens"] == pytest.approx(shares[-1])
    assert line["loss/tokens"] == trained
    assert line["staleness/max"] == max(step - max(v) for v in versions)
  assert max(shares) > 0
  # Rows are rebuilt by programs that were there.
  counts = [line["compile/count"] for line in run.metrics]
  assert len(set(counts[1:])) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8_cache"])
def test_c95_a_continued_completion_is_the_same_over_four_devices(dtype):
  cfg = runs.configured(
    "placement.mode=split",
    "placement.training.fsdp=2",
    "placement.training.tensor=2",
    "placement.generation.data=2",
    "placement.generation.tensor=2",
    f"sampling.dtype={dtype}",
  )
  place = loop.build(cfg, prepare.prepare(cfg))
  trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
  policy = place.publish(trainer.start(place.draw()))
  assert place.engine is not None
  request = types.Request(
    prompt=(2, 3), uids=(4, 5, 6), sampling=types.SamplingParams(max_tokens=5)
  )

  def finish(engine) -> set[types.Completion]:
    done = set()
    while engine.busy:
      done |= {*engine.step(policy.params, 0)}
    return done

  first, other = (place.engine(jax.random.key(1)) for _ in range(2))
  first.add(request)
  first.step(policy.params, 0)
  begun = first.partials()
  assert [len(partial.tokens) for partial in begun] == [2, 2, 2]
  other.add(dataclasses.replace(request, prompt=(7,), uids=(8, 9)))
  other.add(dataclasses.replace(request, begun=begun))
  assert {c for c in finish(other) if c.uid < 8} == finish(first)
