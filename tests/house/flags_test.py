"""The command line is frozen: a knob is a field, never a flag.

What differs between the processes of one run cannot be a field: all of them
have one configuration. Nor can the port of a server, which is no part of a run,
nor who looks at one, nor what is planned before there is one, and for where.
"""

from absl import flags

from jaxrl_post import main


def test_there_are_four_flags_and_those_that_are_no_part_of_a_run():
  ours = flags.FLAGS.flags_by_module_dict()[main.__name__]
  run = {"exp", "mode", "set", "workdir"}
  process = {"coordinator", "num_processes", "process_id", "distributed"}
  looks = {"writers", "prometheus_port", "profile_steps", "trace_slots"}
  plans = {"plan", "devices", "topology"}
  rest = looks | plans | {"port"}
  assert {f.name for f in ours} == run | process | rest
