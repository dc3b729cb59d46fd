"""A run whose trainer sends tokens where the engine sent them."""

import numpy as np
import pytest

from jaxrl_post import prepare, types
from tests.e2e import runs

REPLAY = ("model.routing.replay=true", "max_lag=1", "stream.asynchronous=true")


@pytest.mark.parametrize(
  "ends", [(2,), pytest.param((2, 4), marks=pytest.mark.slow)]
)
def test_a_run_replays_what_the_engine_chose(ends, tmp_path):
  """Two steps, and two more after a break: what had ended keeps its experts."""
  settings = (*REPLAY, "sampling.dtype=bfloat16", "checkpoint.every=1")
  with runs.compile_cache():
    made = [
      runs.train(tmp_path, *settings, f"num_steps={end}", exp="moe")
      for end in ends
    ]
  rollouts = [
    rollout
    for run in made
    for batch in run.groups
    for group in batch
    for rollout in group.rollouts
  ]
  assert len(rollouts) == 16 * ends[-1]
  for rollout in rollouts:
    count = len(rollout.prompt.tokens) + len(rollout.completion.tokens) - 1
    assert rollout.completion.routing.shape == (count, 1, 2)
    assert set(np.unique(rollout.completion.routing)) <= {0, 1, 2, 3}
  lines = made[-1].metrics
  assert [line["step"] for line in lines] == [*range(1, ends[-1] + 1)]
  assert all(0 <= line["moe/differing"] < 0.5 for line in lines)
  assert any(line["moe/differing"] > 0 for line in lines)
  assert lines[0]["mismatch/max_abs"] < 0.05
  assert not any(line["loss/skipped"] for line in lines)
  assert lines[0]["compile/count"] == lines[1]["compile/count"]


@pytest.mark.parametrize(
  ("more", "exp", "said"),
  [
    ((), "get_config", "model.routing: expected none for a model without"),
    (("debug.replay=dump",), "moe", "model.routing.replay: expected false"),
  ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(more, exp, said):
  run = runs.configured(*REPLAY[:1], *more, exp=exp)
  with pytest.raises(types.InputError, match=said) as caught:
    prepare.prepare(run)
  assert "\n" not in str(caught.value)


def test_a_router_that_chooses_notes_nothing():
  off = runs.configured("model.routing.replay=false", exp="moe")
  on = runs.configured(*REPLAY[:1], exp="moe")
  assert prepare.model(off) == prepare.model(runs.configured(exp="moe"))
  assert prepare.model(off).noted is None
  noted = prepare.model(on).noted
  assert noted is not None and noted.shape == (1, 2) and noted.dtype == "int8"
