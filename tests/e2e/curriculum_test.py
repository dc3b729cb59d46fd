"""A run whose task has levels."""

import dataclasses

from jaxrl_post import loop, prepare
from jaxrl_post.data import curriculum, dataset
from tests.e2e import experiment, runs


@dataclasses.dataclass(frozen=True)
class Letters:
  """Two levels of the questions of the experiment."""

  name = "letters"

  def levels(self):
    made = [experiment.make(i) for i in range(16)]
    return made[:8], made[8:]


def test_a_run_tells_the_level_of_its_task(tmp_path):
  run = runs.configured(
    "num_steps=3", "rewards.functions=tests.e2e.experiment:constant"
  )
  run = dataclasses.replace(
    run,
    data=dataset.Data(
      train=curriculum.Tasks((Letters(),)),
      alphabet=run.data.alphabet,
      max_prompt=run.data.max_prompt,
      curriculum=curriculum.Curriculum(groups=1),
    ),
  )
  loop.run(run, prepare.prepare(run), tmp_path)
  lines = [line for line in runs.metrics(tmp_path) if line["step"]]
  assert [line["step"] for line in lines] == [1, 2, 3]
  found = [
    {k: v for k, v in line.items() if k.startswith("curriculum/")}
    for line in lines
  ]
  # With the first groups every rollout is right: one level up, and no further.
  assert found[-1]["curriculum/letters/level"] == 1.0
  assert found[-1]["curriculum/letters/solved"] == 1.0
  assert found[-1]["curriculum/letters/late"] >= 1.0
  assert all(line.keys() == found[0].keys() for line in found)
