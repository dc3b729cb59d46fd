"""The command line is frozen: a knob is a field, never a flag.

What differs between the processes of one run cannot be a field: all of them
have one configuration. Nor can the port of a server, which is no part of a run,
nor who looks at one, nor what is planned before there is one, and for where,
nor the form in which its weights are given away.
"""

from absl import flags

from jaxrl_post import export, main


def test_there_are_four_flags_and_those_that_are_no_part_of_a_run():
  modules = flags.FLAGS.flags_by_module_dict()
  ours = {f.name for m in (main, export) for f in modules[m.__name__]}
  run = {"exp", "mode", "set", "workdir"}
  process = {"coordinator", "num_processes", "process_id", "distributed"}
  looks = {"writers", "prometheus_port", "profile_steps", "trace_slots"}
  plans = {"plan", "devices", "topology"}
  exports = {"to", "step", "dtype", "shard_mb", "adapter"}
  rest = looks | plans | exports | {"port"}
  assert ours == run | process | rest
