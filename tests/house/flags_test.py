"""The command line is frozen: a knob is a field, never a flag."""

from absl import flags

from jaxrl_post import main


def test_there_are_four_flags():
  ours = flags.FLAGS.flags_by_module_dict()[main.__name__]
  assert sorted(f.name for f in ours) == ["exp", "mode", "set", "workdir"]
