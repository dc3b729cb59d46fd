"""The command line is frozen: a knob is a field, never a flag.

What differs between the processes of one run cannot be a field: all of them
have one configuration.
"""

from absl import flags

from jaxrl_post import main


def test_there_are_four_flags_and_four_that_find_other_processes():
  ours = flags.FLAGS.flags_by_module_dict()[main.__name__]
  run = {"exp", "mode", "set", "workdir"}
  process = {"coordinator", "num_processes", "process_id", "distributed"}
  assert {f.name for f in ours} == run | process
