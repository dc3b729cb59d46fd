"""The command line: flags, modes, exit codes.

Exit codes: 0 finished, 1 the run failed, 2 the user's input was wrong.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import jax
from absl import app, flags, logging

from jaxrl_post import (
  collect,
  config,
  export,
  loop,
  prepare,
  roles,
  serve,
  types,
)
from jaxrl_post import show as shows
from jaxrl_post.planning import costs, table
from jaxrl_post.planning import plan as planning
from jaxrl_post.rewards import blame
from jaxrl_post.runtime import (
  compare,
  folder,
  log,
  report,
  signals,
  summary,
  writers,
)
from jaxrl_post.runtime import hosts as hosts_lib

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
  ["train", "eval", "rollout", "serve", "export", "compile", "dry_run"]
  + ["inspect", "report", "compare", "plan"],
  "train; eval tests the newest checkpoint of --workdir, or the first weights "
  "without it; rollout samples and scores num_steps batches with them, trains "
  "none, and writes a dump; serve answers requests over gRPC with them; "
  "export writes a checkpoint as a Hugging Face folder; "
  "compile compiles all steps for --topology and says what they take; "
  "dry_run only checks and prints; inspect shows the prompts as the model will "
  "see them, or inspect RUN what a run sampled; report RUN [EARLIER] diagnoses "
  "a finished run, by its folder, and writes report.html there; compare A B "
  "[C...] says of finished runs whether a change from A worked; plan RUN... "
  "simulates other placements, sizes and lags by their costs, and recommends.",
)
_PLAN = flags.DEFINE_string(
  "plan",
  None,
  "A file of costs: --mode=plan writes it, --mode=train logs plan/error by it.",
)
_DEVICES = flags.DEFINE_integer(
  "devices", None, "With --mode=plan, how many to plan for.", lower_bound=1
)
_PORT = flags.DEFINE_integer(
  "port",
  None,
  "With --mode=serve, the port to listen at; 0, the default, is any free one.",
  lower_bound=0,
  upper_bound=2**16 - 1,
)
_WRITERS = flags.DEFINE_list(
  "writers",
  [],
  "Who else gets the metrics: tensorboard, wandb (offline), or both.",
)
_PROMETHEUS_PORT = flags.DEFINE_integer(
  "prometheus_port",
  None,
  "Answer Prometheus at this port, on this machine only; 0 is any free one.",
  lower_bound=0,
  upper_bound=2**16 - 1,
)
_PROFILE_STEPS = flags.DEFINE_string(
  "profile_steps",
  None,
  "FIRST:LAST, the steps that jax.profiler captures into the run folder.",
)
_TRACE_SLOTS = flags.DEFINE_bool(
  "trace_slots", False, "Give each row of the engine a lane in trace.json."
)
_TOPOLOGY = flags.DEFINE_string(
  "topology",
  None,
  "With --mode=compile, the machine: a TPU and the shape of a slice, as in "
  "v5p:4x4x4, or a GPU and how many, as in h100:8.",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "HOST:PORT of process 0, in each of several processes. Not needed where "
  "SLURM, Open MPI or a TPU pod started them.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "How many processes there are; with --coordinator."
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "Which of them this one is, from 0; with --coordinator."
)
_DISTRIBUTED = flags.DEFINE_enum(
  "distributed",
  "auto",
  ["auto", "on", "off"],
  "auto asks the environment whether a launcher started several processes; on "
  "always lets JAX ask the launcher; off is one process.",
)

flags.adopt_module_key_flags(export)

# Modes that read finished runs: least and most folders, and what is printed.
_READERS: dict[
  str, tuple[int, int | None, Callable[[Sequence[pathlib.Path]], str]]
] = {
  "inspect": (1, 1, shows.rollouts),
  "report": (1, 2, report.report),
  "compare": (2, 26, compare.text),
  "plan": (
    1,
    None,
    lambda paths: planning.text(
      paths, devices=_DEVICES.value, save=_PLAN.value
    ),
  ),
}
# Modes of which there may be several processes.
_RUNS = ("train", "eval", "rollout", "serve", "dry_run")
_INPUT_ERROR = 2
_ADVICE = "; the same command goes on from the newest checkpoint, if any"


def main(argv: Sequence[str]) -> int:
  """Runs what the flags say.

  Args:
    argv: the program, and the folders of a mode that reads finished runs.

  Returns:
    The exit code.
  """
  work = "the requests under way" if _MODE.value == "serve" else "this step"
  stopper = signals.Stopper(_ADVICE if _MODE.value == "train" else "", work)
  signals.listen(stopper.heard)
  try:
    _check_flags()
    watch = _watch()
    if _MODE.value in _READERS and (argv[1:] or _MODE.value != "inspect"):
      return _read(argv[1:])
    return _run(stopper, watch)
  except (types.InputError, types.RunError) as error:
    # One line for what the user can mend; a traceback would hide it, but for
    # that of the user's own reward.
    wrong, own = isinstance(error, types.InputError), blame.traceback_of(error)
    if not (wrong or own) and (error.__cause__ or error.__context__):
      raise  # Where that came from, only a traceback tells.
    print(log.visible(f"{own}error: {error}"), file=sys.stderr)
    return _INPUT_ERROR if wrong else 1
  except SystemExit as error:  # of an experiment or a library, with any code
    print(f"error: something called exit({error.code})", file=sys.stderr)
  return 1


def _check_flags() -> None:
  """Refuses flags that the mode does not read."""
  for flag, modes in (
    (_PORT, ("serve",)),
    (_TOPOLOGY, ("compile",)),
    (_PLAN, ("plan", "train")),
    (_DEVICES, ("plan",)),
    *((flag, ("export",)) for flag in export.FLAGS),
    *((flag, _RUNS) for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID)),
  ):
    if flag.value is not None and _MODE.value not in modes:
      raise types.InputError(
        f"--{flag.name}: expected none with --mode={_MODE.value}, got "
        f"{flag.value}. Leave it out, or set --mode={modes[0]}."
      )


def _read(names: Sequence[str]) -> int:
  """Prints what a mode says of the folders of finished runs."""
  least, most, told = _READERS[_MODE.value]
  for flag in (_EXP, _WORKDIR, _SET):
    name, value = flag.name, flag.value
    if value:
      raise types.InputError(
        f"--{name}: expected none with --mode={_MODE.value}, got {value}. Give "
        "the folders of runs, without a flag."
      )
  if len(names) < least or (most is not None and len(names) > most):
    rule = f"{least}" if least == most else f"{least} to {most or 'more'}"
    raise types.InputError(
      f"--mode={_MODE.value}: expected the folders of {rule} runs, got "
      f"{len(names)}. Name them after the flags."
    )
  print(told([pathlib.Path(name) for name in names]))
  return 0


def _run(stopper: signals.Stopper, watch: writers.Watch) -> int:
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
  watch.check(cfg.num_steps)
  launch = _launch()
  if _MODE.value in ("train", "dry_run"):
    prepare.check_schedule(cfg)
  if _MODE.value in ("rollout", "serve"):
    _check_alone(cfg, launch, _MODE.value)
  if _MODE.value == "serve":
    serve.check(cfg)
  if _MODE.value in ("compile", "export", "inspect"):
    return _without_devices(cfg)
  if cfg.placement.cpu_devices is not None:
    jax.config.update("jax_num_cpu_devices", cfg.placement.cpu_devices)
  with contextlib.ExitStack() as stack:
    if cfg.placement.mode == "roles" and _MODE.value != "dry_run":
      launch = stack.enter_context(
        roles.cluster(cfg.placement, launch, sys.argv[1:])
      )
    hosts = _hosts(launch, cfg.placement.peer_timeout_s)
    stopper.hosts = hosts
    signals.take()  # from JAX and Ray
    return _run_in(stack.enter_context(hosts), cfg, watch)


def _watch() -> writers.Watch:
  """Returns who looks at the run; only training has something to see."""
  steps = _PROFILE_STEPS.value
  watch = writers.Watch(
    writers=tuple(_WRITERS.value),
    prometheus_port=_PROMETHEUS_PORT.value,
    profile=None if steps is None else writers.steps(steps),
    slots=_TRACE_SLOTS.value,
  )
  if _MODE.value != "train" and watch != writers.Watch():
    raise types.InputError(
      "--writers, --prometheus_port, --profile_steps, --trace_slots: expected "
      f"none with --mode={_MODE.value}, got some. Leave them out, or train."
    )
  if _MODE.value == "train" and _PLAN.value is not None:
    costs.read(_PLAN.value)  # A wrong file is told before a device is taken.
  return watch


def _without_devices(cfg: config.Run) -> int:
  """Inspects, exports or compiles; a table of the last, JSON in --workdir."""
  if _MODE.value == "inspect":
    print(shows.prompts(cfg))
    return 0
  if _MODE.value == "export":
    return export.main(cfg, _WORKDIR.value)
  if _TOPOLOGY.value is None:
    raise types.InputError(
      "--topology: expected a machine with --mode=compile, as v5p:4x4x4, got "
      "none. Name one."
    )
  report = table.make(cfg, _TOPOLOGY.value, _WORKDIR.value, print)
  return 0 if all(step.memory or step.used for step in report.steps) else 1


def _launch() -> hosts_lib.Launch | None:
  """Returns how the other processes are found; None if there are none."""
  found = hosts_lib.launcher(os.environ)
  given = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  launch = hosts_lib.Launch(*given)
  if _DISTRIBUTED.value == "off":
    if launch.coordinator is not None:
      raise types.InputError(
        f"--distributed=off: expected no --coordinator, got {given[0]}. Leave "
        "one of them out."
      )
    return None
  wanted = _DISTRIBUTED.value == "on" or launch.coordinator or found
  return launch if wanted else None


def _hosts(
  launch: hosts_lib.Launch | None, silence_s: float
) -> hosts_lib.Hosts:
  if launch is None:
    return hosts_lib.Hosts()
  return hosts_lib.start(launch, silence_s)


def _run_in(
  hosts: hosts_lib.Hosts, cfg: config.Run, watch: writers.Watch
) -> int:
  """Does what --mode says, in each of the processes."""
  parts = prepare.prepare(cfg)
  _check_same(hosts, cfg, parts)
  plan = prepare.plan(cfg, parts, jax.device_count(), hosts.count)
  _say(hosts, f"{config.describe(cfg)}\n{plan}")
  if _MODE.value == "dry_run":
    return 0
  if _MODE.value == "eval":
    return _eval(hosts, cfg, parts)
  if _MODE.value == "rollout":
    return _rollout(hosts, cfg, parts)
  if _MODE.value == "serve":
    return _serve(hosts, cfg, parts)
  watch = dataclasses.replace(watch, planned_s=_planned_s(hosts, cfg))
  with contextlib.ExitStack() as stack:
    path = hosts.share(lambda: _open(cfg, stack))
    prepare.check_follow(cfg, path)
    _say(hosts, f"run folder: {path}")
    state = loop.run(cfg, parts, path, hosts, watch=watch)
    if hosts.stopping and int(state.step) < cfg.num_steps:
      _say(hosts, f"stopped by {hosts.stopping}; the same command continues")
    if hosts.is_head:
      _say(hosts, summary.text(summary.read(path)))
    _say(hosts, f"run folder: {path}")
  return 0


def _planned_s(hosts: hosts_lib.Hosts, cfg: config.Run) -> float | None:
  """Says what --plan expects of the run; returns the seconds of a step."""
  if _PLAN.value is None:
    return None
  tree, count = config.to_json(cfg), jax.device_count()
  expected = planning.predict(_PLAN.value, tree, count)
  rate = expected.consumed_per_device_hour
  _say(hosts, f"planned: {rate:.0f} rollouts consumed per device-hour")
  return expected.step_s


def _check_same(
  hosts: hosts_lib.Hosts, cfg: config.Run, parts: prepare.Parts
) -> None:
  """Refuses a process that was started for another run than the head's."""
  digest = f"digest of data.train = {parts.data.train.digest}"
  flags_of_run = [f"--mode={_MODE.value}", f"--workdir={_WORKDIR.value}"]
  ours = [*flags_of_run, *config.describe(cfg).split("\n"), digest]
  theirs = hosts.share(lambda: ours)
  for here, there in itertools.zip_longest(ours, theirs, fillvalue="nothing"):
    if here != there:
      raise types.InputError(
        f"process {hosts.index}: expected {there} as in process 0, got {here}. "
        "Give all processes the same flags, experiment and data."
      )


def _open(cfg: config.Run, stack: contextlib.ExitStack) -> pathlib.Path:
  """Takes the run folder, until `stack` ends."""
  opened = folder.open_folder(
    _workdir(), config.to_json(cfg), config.may_change(cfg)
  )
  return stack.enter_context(opened).resolve()


def _say(hosts: hosts_lib.Hosts, text: str) -> None:
  """Prints at the head; the others would say the same."""
  if hosts.is_head:
    print(log.visible(text), flush=True)


def _eval(hosts: hosts_lib.Hosts, cfg: config.Run, parts: prepare.Parts) -> int:
  """Tests the newest checkpoint of --workdir; without it, first weights."""
  path = None
  if _WORKDIR.value is not None:
    names = (*config.may_change(cfg), "evaluation", "data.held_out")
    path = folder.find_folder(_WORKDIR.value, config.to_json(cfg), names)
  step, values = loop.test_newest(cfg, parts, path, hosts)
  _say(hosts, summary.tested(step, values))
  return 0


def _check_alone(
  cfg: config.Run, launch: hosts_lib.Launch | None, to: str
) -> None:
  """Refuses what --mode=rollout and --mode=serve do not do."""
  mode, source = cfg.placement.mode, cfg.replay
  follow = cfg.stream.follow
  alone = launch is None or launch.num_processes == 1
  for holds, name, rule, value in (
    (mode != "roles", "placement.mode", "colocated or split", mode),
    (alone, "--distributed", "one process", "several"),
    (source is None, "debug.replay", "none", source),
    (not follow, "stream.follow", "none", follow),
  ):
    if not holds:
      raise types.InputError(
        f"{name}: expected {rule} with --mode={to}, got {value}. "
        "Change it, or the mode."
      )


def _rollout(
  hosts: hosts_lib.Hosts, cfg: config.Run, parts: prepare.Parts
) -> int:
  """Samples with the newest checkpoint of --workdir, or the first weights."""
  with contextlib.ExitStack() as stack:
    if (pathlib.Path(_workdir()) / folder.CONFIG_FILE).exists():
      # Of a run that may go on meanwhile: it is read, and a folder is added.
      others = ("num_steps", "evaluation", "data.held_out", "debug", "stream")
      names = (*config.may_change(cfg), *others)
      path = folder.find_folder(_workdir(), config.to_json(cfg), names)
      path = path.resolve()
    else:
      path = _open(cfg, stack)
    target = path / time.strftime("rollouts-%Y%m%d-%H%M%S")
    _say(hosts, f"dump: {target}")
    made = collect.run(cfg, parts, path, target, hosts)
  if hosts.stopping and made.batches < cfg.num_steps:
    _say(hosts, f"stopped by {hosts.stopping}")
  _say(
    hosts,
    f"weights of step {made.trained}: {made.batches} batches, {made.rollouts} "
    f"rollouts, {made.rewarded} of them with a reward, mean {made.reward:.4f}",
  )
  _say(hosts, f"dump: {target}")
  return 0


def _serve(
  hosts: hosts_lib.Hosts, cfg: config.Run, parts: prepare.Parts
) -> int:
  """Serves the newest checkpoint of --workdir; without it, first weights."""
  path = None
  if _WORKDIR.value is not None:
    sizes = ("sampling", "group_size", "groups_per_step", "num_steps")
    unused = ("evaluation", "data.held_out", "debug", "stream")
    names = (*config.may_change(cfg), *sizes, *unused)
    path = folder.find_folder(_WORKDIR.value, config.to_json(cfg), names)
  say = functools.partial(_say, hosts)
  serve.run(cfg, parts, path, hosts, port=_PORT.value or 0, say=say)
  say(f"stopped by {hosts.stopping}")
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
  if len(rest) > 1 and _MODE.value not in _READERS:
    print(
      f"error: expected flags only, got {rest[1]!r}. Write --set NAME=VALUE.",
      file=sys.stderr,
    )
    sys.exit(_INPUT_ERROR)
  # Libraries talk at INFO; what a user needs is printed or a warning.
  logging.set_verbosity(logging.WARNING)
  # What Orbax logs of a save that fails, a traceback a thread, it raises, too.
  logging.get_absl_logger().addFilter(
    lambda record: "/orbax/checkpoint/_src/futures/" not in record.pathname
  )
  return rest


if __name__ == "__main__":
  # Spawned reward workers import the main module anew. This one would bring
  # JAX and all the rest along, so it takes its name off the door.
  __spec__ = None
  del __file__
  app.run(main, flags_parser=_parse)
