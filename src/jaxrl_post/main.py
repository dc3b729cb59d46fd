"""The command line: flags, modes, exit codes.

Exit codes: 0 finished, 1 the run failed, 2 the user's input was wrong.
"""

import json
import pathlib
import sys
import time
from collections.abc import Sequence

import jax
from absl import app, flags, logging

from jaxrl_post import config, loop, prepare, types
from jaxrl_post.runtime import folder, summary

_EXP = flags.DEFINE_string(
  "exp",
  None,
  "The experiment: a name in experiments/, or path.py, or path.py:function.",
)
_SET = flags.DEFINE_multi_string(
  "set", [], "A setting, name=value; may be repeated, the last one wins."
)
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "The run folder: made if missing, continued if it holds this run. The "
  "default is runs/NAME-TIME.",
)
_MODE = flags.DEFINE_enum(
  "mode",
  "train",
  ["train", "eval", "dry_run"],
  "train; eval tests the newest checkpoint of --workdir, or the first weights "
  "without it; dry_run only checks and prints.",
)

_INPUT_ERROR = 2


def main(_: Sequence[str]) -> int:
  """Runs what the flags say.

  Returns:
    The exit code.
  """
  try:
    return _run()
  except types.InputError as error:
    # One line for what the user can mend; a traceback would hide it.
    print(f"error: {error}", file=sys.stderr)
    return _INPUT_ERROR
  except SystemExit as error:  # of an experiment or a library, with any code
    print(f"error: something called exit({error.code})", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print(
      "interrupted; the same command continues from the newest checkpoint",
      file=sys.stderr,
    )
    return 1


def _run() -> int:
  if _EXP.value is None:
    raise types.InputError(
      "--exp: expected the name of an experiment, got none. For a first run: "
      "--exp=tiny."
    )
  if _WORKDIR.value == "":
    raise types.InputError(
      "--workdir: expected a folder, got an empty name. Name one, or leave it "
      "out."
    )
  cfg = config.load(_EXP.value, pathlib.Path("experiments"))
  cfg = config.override(cfg, _SET.value)
  if cfg.placement.cpu_devices is not None:
    jax.config.update("jax_num_cpu_devices", cfg.placement.cpu_devices)
  parts = prepare.prepare(cfg)
  plan = prepare.plan(cfg, parts, jax.device_count())
  print(config.describe(cfg))
  print(plan, flush=True)
  if _MODE.value == "dry_run":
    return 0
  if _MODE.value == "eval":
    return _eval(cfg, parts)
  with folder.open_folder(
    _workdir(), config.to_json(cfg), config.may_change(cfg)
  ) as path:
    print(f"run folder: {path.resolve()}", flush=True)
    loop.run(cfg, parts, path)
    print(summary.text(summary.read(path)))
    print(f"run folder: {path.resolve()}", flush=True)
  return 0


def _eval(cfg: config.Run, parts: prepare.Parts) -> int:
  """Tests the newest checkpoint of --workdir; without it, first weights."""
  path = None
  if _WORKDIR.value is not None:
    names = (*config.may_change(cfg), "evaluation", "data.held_out")
    path = folder.find_folder(_WORKDIR.value, config.to_json(cfg), names)
  step, values = loop.test_newest(cfg, parts, path)
  print(json.dumps({"step": step, **values}, sort_keys=True))
  return 0


def _workdir() -> str:
  if _WORKDIR.value is not None:
    return _WORKDIR.value
  name = pathlib.Path(str(_EXP.value).partition(":")[0]).stem
  return f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _parse(argv: Sequence[str]) -> list[str]:
  """Reads the flags; a wrong one is the user's input, not a crash."""
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    print(f"error: {error}. See --help.", file=sys.stderr)
    sys.exit(_INPUT_ERROR)
  if len(rest) > 1:
    print(
      f"error: expected flags only, got {rest[1]!r}. Write --set NAME=VALUE.",
      file=sys.stderr,
    )
    sys.exit(_INPUT_ERROR)
  # Libraries talk at INFO; what a user needs is printed or a warning.
  logging.set_verbosity(logging.WARNING)
  return rest


if __name__ == "__main__":
  # Spawned reward workers import the main module anew. This one would bring
  # JAX and all the rest along, so it takes its name off the door.
  __spec__ = None
  del __file__
  app.run(main, flags_parser=_parse)
