"""`--mode=export`: of which checkpoint, what is written, and what is refused.

Where torch is installed, here or beside the interpreter that the environment's
TRANSFORMERS_PYTHON names, `transformers` loads what was written.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_post import config, export, loop, prepare, types
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import gemma3, transformer, weights
from jaxrl_post.runtime import checkpoint
from jaxrl_post.runtime import folder as folders
from jaxrl_post.training import lora
from tests.e2e import runs
from tests.reference import tiny_folder

LOADER = runs.ROOT / "tests" / "reference" / "load_with_transformers.py"
STEPS = ("checkpoint.every=2", "checkpoint.keep=2")
LORA = ("optim.trained.rank=2", "optim.trained.alpha=8")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that has ended.

  Attributes:
    cfg: its settings.
    folder: its folder, with checkpoints of steps 2 and 4.
    state: what it ended with.
  """

  cfg: config.Run
  folder: pathlib.Path
  state: types.TrainState

  def export(self, to: pathlib.Path, **options) -> export.Exported:
    form = export.Form(**options)
    return export.run(self.cfg, self.folder, to, form=form)


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory) -> Run:
  """Trains a model that was drawn at random."""
  path = tmp_path_factory.mktemp("trained")
  cfg = runs.configured(*STEPS)
  # As the command does.
  with folders.open_folder(path, config.to_json(cfg)), runs.compile_cache():
    return Run(cfg, path, runs.train(path, *STEPS).state)


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory):
  """Makes a run of a tiny folder, once; its steps change weights at random."""

  @functools.cache
  def made(family: str, *assignments: str) -> Run:
    path = tmp_path_factory.mktemp(family)
    tiny_folder.write(path / "model", family, seed=3)
    name = f"model.path={path / 'model'}"
    settings = (name, "model.config=none", "data.alphabet=none", *assignments)
    cfg = runs.configured(*STEPS, *settings)
    place = loop.build(cfg, prepare.prepare(cfg))
    trainer = place.trainer(cfg.algo, cfg.optim, cfg.num_steps)
    state = trainer.start(place.draw())
    draw = np.random.default_rng(0)

    def other(x: jax.Array) -> jax.Array:
      change = 0.1 * draw.standard_normal(x.shape).astype(np.float32)
      return jax.device_put(np.asarray(x) + change, x.sharding)

    store = checkpoint.Store(path / "run" / "checkpoints", cfg.checkpoint)
    for step in (2, 4):
      if state.adapters is None:
        params = jax.tree.map(other, state.params)
        state = dataclasses.replace(state, params=params)
      else:
        adapters = jax.tree.map(other, state.adapters)
        state = dataclasses.replace(state, adapters=adapters)
      store.save(step, state, {})
    store.close()
    return Run(cfg, path / "run", state)

  return made


def assert_same(one: types.Tree, other: types.Tree) -> None:
  jax.tree.map(np.testing.assert_array_equal, one, other)


def read(folder: pathlib.Path) -> tuple[transformer.Config, types.Tree]:
  cfg = weights.read_config(str(folder))
  return cfg, weights.read_params(str(folder), cfg)


# ------------------------------------------------------------------ from runs


def test_a_model_drawn_at_random_becomes_a_whole_folder(trained, tmp_path):
  run = trained
  done = run.export(tmp_path / "to")
  assert done.step == 4
  names = sorted(path.name for path in (tmp_path / "to").iterdir())
  assert names == [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
  ]
  assert done.files == len(names)
  sizes = [path.stat().st_size for path in (tmp_path / "to").iterdir()]
  assert done.size == sum(sizes)
  cfg, params = read(tmp_path / "to")
  assert cfg == run.cfg.model.config
  assert_same(params, run.state.params)
  ours = tokenizers.characters(run.cfg.data.alphabet)
  theirs = tokenizers.load(str(tmp_path / "to"))
  assert theirs.encode("dabc") == ours.encode("dabc")
  assert (theirs.eos_ids, theirs.pad_id) == (ours.eos_ids, ours.pad_id)
  assert theirs.decode((2, 3, 1)) == ours.decode((2, 3, 1))


def test_a_model_from_a_folder_takes_its_tokenizer_along(made, tmp_path):
  run = made("qwen3")
  source = run.folder.parent / "model"
  tools = "additional_chat_templates/tool_use.jinja"
  (source / tools).parent.mkdir(exist_ok=True)
  (source / tools).write_text("{{ tools }}")
  (tmp_path / "to").mkdir()  # An empty one is as good as none.
  done = run.export(tmp_path / "to", shard_bytes=50_000)
  written = [p for p in (tmp_path / "to").rglob("*") if p.is_file()]
  assert done.files == len(written)
  for name in ("tokenizer.json", "generation_config.json", tools):
    assert (tmp_path / "to" / name).read_bytes() == (source / name).read_bytes()
  ours, theirs = (tokenizers.load(str(x)) for x in (source, tmp_path / "to"))
  chat = ({"role": "user", "content": "3 + 4"},)
  assert theirs.prompt_ids(chat) == ours.prompt_ids(chat)
  assert theirs.digest == ours.digest
  cfg, params = read(tmp_path / "to")
  assert cfg == weights.read_config(str(source))
  assert_same(params, run.state.params)
  before = weights.read_params(str(source), cfg)
  assert np.abs(params["embed"] - before["embed"]).max() > 0
  assert (tmp_path / "to").stat().st_mode & 0o777 == 0o755


def test_a_template_for_tools_of_a_gguf_file_is_written_too(tmp_path):
  """A file and its tokenizer are read; a folder is written beside them."""
  source = tmp_path / "model.gguf"
  tokenizer = tokenizers.Tokenizer(
    backend=tiny_folder.byte_tokenizer(),
    pad_id=0,
    eos_ids=(2,),
    template="plain",
    tool_template="{{ tools|length }} tools",
  )
  for name, own in (
    ("both", tokenizer),
    ("one", dataclasses.replace(tokenizer, tool_template=None)),
  ):
    (tmp_path / name).mkdir()
    export.write_tokenizer(tmp_path / name, source, own)
    read = tokenizers.load(str(tmp_path / name))
    assert read.template == "plain"
    assert read.tool_template == own.tool_template
  text = (tmp_path / "both" / "tokenizer_config.json").read_text()
  assert json.loads(text)["chat_template"] == [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "{{ tools|length }} tools"},
  ]
  text = (tmp_path / "one" / "tokenizer_config.json").read_text()
  assert json.loads(text)["chat_template"] == "plain"


def test_a_shape_that_no_config_can_say_is_refused_before_anything_is_read(
  tmp_path,
):
  window = "model.config.window"
  cfg = runs.configured()
  shape = dataclasses.replace(
    gemma3.config(tiny_folder.FAMILIES["gemma3"]),
    vocab_size=cfg.model.config.vocab_size,
  )
  shared = dataclasses.replace(shape.window, rope_theta=None)
  model = dataclasses.replace(
    cfg.model, config=dataclasses.replace(shape, window=shared)
  )
  with refused(rf"^{window}\.rope_theta: expected a number for a Gemma"):
    export.run(
      dataclasses.replace(cfg, model=model), tmp_path / "run", tmp_path / "to"
    )
  assert list(tmp_path.iterdir()) == []


def test_adapters_name_the_modules_of_a_model_that_reads_images(
  tmp_path, monkeypatch
):
  """The command asks the folder beneath what its modules are called."""
  folder = tmp_path / "model"
  hf = tiny_folder.write(folder, "gemma3")
  beside = {"model_type": "gemma3", "text_config": hf}
  (folder / "config.json").write_text(json.dumps(beside))
  own = (f"model.path={folder}", "model.config=none", "data.alphabet=none")
  cfg = runs.configured(*own, *LORA)
  shape = gemma3.config(hf)
  tree = lora.spec(transformer.spec(shape), cfg.optim.trained)
  adapters = jax.tree.map(lambda w: np.ones(w.shape, np.float32), tree)
  monkeypatch.setattr(export.fields, "find", lambda *_: tmp_path / "4")
  monkeypatch.setattr(export.fields, "read", lambda *_: {"adapters": adapters})
  form = export.Form(adapter=True)
  export.run(cfg, tmp_path / "run", tmp_path / "to", form=form)
  file = tmp_path / "to" / "adapter_model.safetensors"
  names = set(safetensors.numpy.load_file(file))
  assert names and all(
    name.startswith("base_model.model.model.language_model.layers.")
    for name in names
  )


def test_the_step_that_is_asked_for_is_written(trained, tmp_path):
  run = trained
  older = export.run(run.cfg, run.folder, tmp_path / "two", step=2)
  newer = export.run(run.cfg, run.folder, tmp_path / "four", step=4)
  assert (older.step, newer.step) == (2, 4)
  _, two = read(tmp_path / "two")
  _, four = read(tmp_path / "four")
  assert_same(four, run.state.params)
  assert np.abs(two["embed"] - four["embed"]).max() > 0


def test_a_newest_checkpoint_that_is_torn_is_passed_over(
  trained, tmp_path, caplog
):
  run = trained
  copy = tmp_path / "run" / "checkpoints"
  copy.mkdir(parents=True)
  for step in (2, 4):
    (copy / str(step)).symlink_to(run.folder / "checkpoints" / str(step))
  (copy / "6").mkdir()
  done = export.run(run.cfg, tmp_path / "run", tmp_path / "to")
  assert done.step == 4
  assert "6 is not whole" in caplog.text


def test_adapters_are_merged_or_alone(made, tmp_path):
  run = made("llama", *LORA)
  run.export(tmp_path / "merged")
  _, params = read(tmp_path / "merged")
  setting = run.cfg.optim.trained
  assert isinstance(setting, lora.Lora)
  expected = lora.merge(run.state.params, run.state.adapters, setting)
  for got, wanted in zip(
    jax.tree.leaves(params), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
  done = run.export(tmp_path / "alone", adapter=True)
  assert done.files == 2
  alone = tmp_path / "alone"
  tensors = safetensors.numpy.load_file(alone / "adapter_model.safetensors")
  about = json.loads((alone / "adapter_config.json").read_text())
  assert about["base_model_name_or_path"] == run.cfg.model.path
  head = "base_model.model.model.layers.1.mlp.down_proj.lora_"
  product = tensors[f"{head}B.weight"] @ tensors[f"{head}A.weight"]
  change = expected["layers"]["down"][1] - run.state.params["layers"]["down"][1]
  scaled = about["lora_alpha"] / about["r"] * product.T
  np.testing.assert_allclose(scaled, change, atol=1e-6)
  assert np.abs(change).max() > 1e-4


# ------------------------------------------------------------- from the shell


def test_the_command_writes_a_folder_once(trained, tmp_path):
  run = trained
  words = (
    runs.experiment(),
    "--mode=export",
    f"--workdir={os.path.relpath(run.folder, tmp_path)}",
    "--to=out/model",
    "--dtype=bfloat16",
    "--shard_mb=1",
    *runs.settings(*STEPS, "num_steps=9"),
  )
  first = runs.run(tmp_path, *words)
  assert first.code == 0, first.err
  made_here = tmp_path / "out" / "model"
  files = list(made_here.iterdir())
  size = sum(path.stat().st_size for path in files)
  line = f"step 4: {len(files)} files of {size:,} bytes in out/model"
  assert first.out.splitlines()[-1] == line
  hf = json.loads((made_here / "config.json").read_text())
  assert hf["dtype"] == "bfloat16"
  again = runs.run(tmp_path, *words)
  assert again.code == 2
  lines = again.err.splitlines()
  assert [x for x in lines if x.startswith("error: --to: expected a folder")]
  assert "Traceback" not in again.err


# ----------------------------------------------------------------- refusals


def refused(match: str):
  return pytest.raises(types.InputError, match=match)


def test_what_cannot_be_written_is_refused_by_name(trained, tmp_path):
  run = trained
  file = tmp_path / "file"
  file.write_text("mine")
  full = tmp_path / "full"
  full.mkdir()
  (full / "notes.txt").write_text("mine")
  link = tmp_path / "link"
  link.symlink_to(tmp_path / "nowhere")
  for to, got in (
    (file, "got a file or a link"),
    (full, "got one with files in it"),
    (link, "got a file or a link"),
    (file / "below", "expected a folder that can be written"),
  ):
    with refused(got):
      run.export(to)
  assert file.read_text() == (full / "notes.txt").read_text() == "mine"
  with refused(r"--step: expected that of a checkpoint \(2, 4\)"):
    export.run(run.cfg, run.folder, tmp_path / "to", step=3)
  with refused("--workdir: expected a checkpoint that is whole, got none"):
    export.run(run.cfg, tmp_path, tmp_path / "to")
  with refused("leaf .*embed"):
    other = runs.configured(*STEPS, "model.config.width=32")
    export.run(other, run.folder, tmp_path / "to")
  with refused("leaf .adapters"):
    export.run(runs.configured(*LORA), run.folder, tmp_path / "to")
  assert not (tmp_path / "to").exists()


def test_adapters_alone_need_a_model_that_others_have(tmp_path):
  form = export.Form(adapter=True)
  folder = tmp_path / "model"
  tiny_folder.write(folder)
  own = (f"model.path={folder}", "model.config=none", "data.alphabet=none")
  for settings, name in (
    ((), "optim.trained"),
    (LORA, "model.path"),
    ((*own, *LORA, "warmup.num_steps=1"), "warmup.num_steps"),
  ):
    with refused(rf"^{name}: expected .* with --adapter"):
      export.run(
        runs.configured(*settings), tmp_path, tmp_path / "to", form=form
      )


def test_files_that_a_link_brings_from_elsewhere_are_not_copied(made, tmp_path):
  run = made("qwen3")
  source = run.folder.parent / "model"
  (tmp_path / "secret").write_text("of somebody else")
  (source / "merges.txt").symlink_to(tmp_path / "secret")
  try:
    with refused("merges.txt: expected a file in its own folder"):
      run.export(tmp_path / "to")
  finally:
    (source / "merges.txt").unlink()
  assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_disk_that_is_full_leaves_what_was_there(made, tmp_path):
  run = made("qwen3")
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  # No file may be larger than this: Python ignores the signal of it.
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
  try:
    with pytest.raises(types.RunError, match=r"^--to: expected to write") as e:
      run.export(tmp_path / "to")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert e.value.__cause__ is None and e.value.__context__ is None
  assert list(tmp_path.iterdir()) == []
  run.export(tmp_path / "to")


# ------------------------------------------------------------ by transformers


def interpreter() -> str | None:
  """Returns a Python that has torch and transformers."""
  named = os.environ.get("TRANSFORMERS_PYTHON")
  here = all(map(importlib.util.find_spec, ("torch", "transformers")))
  return named or (sys.executable if here else None)


@functools.partial(jax.jit, static_argnums=1)
def logits_of(params, cfg, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden, _ = transformer.forward(params, cfg, tokens, positions)
  return transformer.logits(params, cfg, hidden)


@pytest.mark.skipif(
  interpreter() is None,
  reason="no torch and transformers here; TRANSFORMERS_PYTHON names another",
)
def test_transformers_computes_the_same_model(made, tmp_path):
  """Logits to 1e-4, the greedy answer, and the ids of a chat."""
  python = interpreter()
  assert python is not None
  models = {name: made(name) for name in tiny_folder.FAMILIES}
  adapted = made("llama", *LORA)
  tokens = np.random.RandomState(7).randint(3, 259, (2, 40))
  np.save(tmp_path / "tokens.npy", tokens)
  for name, run in models.items():
    run.export(tmp_path / name, shard_bytes=80_000)
  models["adapted"] = adapted
  adapted.export(tmp_path / "adapted")
  names = list(models)
  code = "import peft"
  if not subprocess.run([python, "-c", code], capture_output=True).returncode:
    adapted.export(tmp_path / "alone", adapter=True)
    names.append("alone")
  done = subprocess.run(
    [python, LOADER, "tokens.npy", "out.npz", *names],
    capture_output=True,
    cwd=tmp_path,
    text=True,
    timeout=250,
  )
  assert done.returncode == 0, done.stderr
  theirs = np.load(tmp_path / "out.npz")
  for name in names:
    folder = tmp_path / ("adapted" if name == "alone" else name)
    cfg, params = read(folder)
    ours = np.asarray(logits_of(params, cfg, jnp.asarray(tokens)))
    assert ours.std() > 0.5
    np.testing.assert_allclose(theirs[f"{name}/logits"], ours, atol=1e-4)
    row = np.zeros_like(tokens)
    row[0, :8] = tokens[0, :8]
    for at in range(8, 8 + len(theirs[f"{name}/greedy"])):
      row[0, at] = logits_of(params, cfg, jnp.asarray(row))[0, at - 1].argmax()
    answer = row[0, 8 : 8 + len(theirs[f"{name}/greedy"])]
    np.testing.assert_array_equal(theirs[f"{name}/greedy"], answer)
    if name == "alone":
      continue
    tokenizer = tokenizers.load(str(folder))
    assert tuple(theirs[f"{name}/text"]) == tokenizer.encode("3 + 4 é")
    chat = ({"role": "user", "content": "Name three fruits."},)
    assert tuple(theirs[f"{name}/chat"]) == tokenizer.prompt_ids(chat)[0]
    assert set(theirs[f"{name}/ends"]) == set(tokenizer.eos_ids)
