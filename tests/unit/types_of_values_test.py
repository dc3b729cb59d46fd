"""Values of other types than settings have, as an experiment may hold them.

They are made in a process of its own: here, signatures are checked.
"""

import json
import os
import subprocess
import sys

MADE = """
import json
from jaxrl_post import types
from jaxrl_post.data import curriculum, dataset, gym, mixture, sources
from jaxrl_post.envs import pass_at_k
source = sources.Jsonl("a")
task = gym.Levels("basic_arithmetic", 3, 1)
makers = {
  "source.limit": lambda: sources.Jsonl("a", limit=2.5),
  "source.path": lambda: sources.Jsonl(5).load(),
  "data.train": lambda: dataset.Data("a.jsonl"),
  "data.held_out": lambda: dataset.Data(source, held_out="a.jsonl"),
  "data.train.tasks": lambda: curriculum.Tasks((source,)),
  "data.train.weights": lambda: curriculum.Tasks((task,), weights=("3",)),
  "mixture.weights": lambda: mixture.Mixture((source, source), ("a", 1)),
  "evaluation.samples.number": lambda: pass_at_k.Samples(2.5, bool),
  "evaluation.samples.success": lambda: pass_at_k.Samples(2, 5),
  "evaluation.samples.answer": lambda: pass_at_k.Samples(2, bool, "most"),
}
found = {}
for name, make in makers.items():
  try:
    make()
  except types.InputError as error:
    found[name] = str(error)
dataset.Data(mixture.Mixture((source, source), (1, 2.5)), held_out=source)
pass_at_k.Samples(2, bool, str)
print(json.dumps([list(makers), found]))
"""


def test_each_is_one_line_that_names_the_setting():
  done = subprocess.run(
    [sys.executable, "-c", MADE],
    env={**os.environ, "PYTHONPATH": "src"},
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  names, found = json.loads(done.stdout.splitlines()[-1])
  assert found.keys() == set(names)
  for name, line in found.items():
    assert line.startswith(f"{name}: expected ") and "got" in line
    assert "\n" not in line
