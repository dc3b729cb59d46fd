"""The command line is frozen: a knob is a field, never a flag.

What differs between the processes of one run cannot be a field: all of them
have one configuration. Nor can the port of a server, which is no part of a run.
"""

from absl import flags

from jaxrl_post import main


def test_there_are_four_flags_four_that_find_processes_and_a_port():
  ours = flags.FLAGS.flags_by_module_dict()[main.__name__]
  run = {"exp", "mode", "set", "workdir"}
  process = {"coordinator", "num_processes", "process_id", "distributed"}
  assert {f.name for f in ours} == run | process | {"port"}
