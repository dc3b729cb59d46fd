"""A checkpoint of a run as a folder that other programs load: `--mode=export`.

The weights of the checkpoint are read into the host's memory, whatever devices
they were trained on, and are written from there.
"""

import dataclasses
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxrl_post import config, prepare, types
from jaxrl_post.data import dataset
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.models import adapted, safetensors_io, transformer, weights
from jaxrl_post.models import export as exports
from jaxrl_post.models import spec as specs
from jaxrl_post.runtime import fields
from jaxrl_post.runtime import folder as folder_lib
from jaxrl_post.training import lora, trained

_TO = flags.DEFINE_string(
  "to",
  None,
  "With --mode=export, the folder to write: not there yet, or empty.",
)
_STEP = flags.DEFINE_integer(
  "step",
  None,
  "With --mode=export, the step of the checkpoint; the default is the newest.",
  lower_bound=0,
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  None,
  ["float32", "bfloat16"],
  "With --mode=export, the type of the numbers; the default is float32.",
)
_SHARD_MB = flags.DEFINE_integer(
  "shard_mb",
  None,
  "With --mode=export, most megabytes of a file; the default is 5000.",
  lower_bound=1,
)
_ADAPTER = flags.DEFINE_bool(
  "adapter",
  None,
  "With --mode=export, write adapters alone, as peft keeps them, and not the "
  "weights that they make of those beneath.",
)
FLAGS = (_TO, _STEP, _DTYPE, _SHARD_MB, _ADAPTER)

# What decides which weights a checkpoint has, and which tokens they know.
_BOUND = ("data", "model", "optim", "warmup")
# What a tokenizer may be made of, and what says how to sample.
_COPIED = (
  "added_tokens.json",
  "additional_chat_templates/tool_use.jinja",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "merges.txt",
  "special_tokens_map.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "vocab.json",
)


@dataclasses.dataclass(frozen=True)
class Form:
  """How weights are written.

  Attributes:
    dtype: of the numbers.
    shard_bytes: most bytes of tensors in a file.
    adapter: adapters alone, and not the weights they make of those beneath.
  """

  dtype: exports.Dtype = "float32"
  shard_bytes: int = exports.SHARD_BYTES
  adapter: bool = False


@types.host_record
class Exported:
  """What was written.

  Attributes:
    step: of the checkpoint.
    files: how many.
    size: of all of them, in bytes.
  """

  step: int
  files: int
  size: int


def main(cfg: config.Run, workdir: str | None) -> int:
  """Does what the flags say, and prints what was written.

  Args:
    cfg: the run.
    workdir: its folder.

  Returns:
    The exit code.

  Raises:
    InputError: as `run`; or a folder is not named, or not one of this run.
    RunError: as `run`.
  """
  to = _TO.value
  if not workdir or not to:
    raise types.InputError(
      "--workdir, --to: expected two folders with --mode=export, got "
      f"{workdir!r} and {to!r}. Name a run, and what to write."
    )
  unused = {field.name for field in dataclasses.fields(cfg)} - {*_BOUND}
  names = (*config.may_change(cfg), *unused)
  folder = folder_lib.find_folder(workdir, config.to_json(cfg), names)
  form = Form(adapter=bool(_ADAPTER.value))
  if _DTYPE.value is not None:
    form = dataclasses.replace(form, dtype=_DTYPE.value)
  if _SHARD_MB.value is not None:
    size = _SHARD_MB.value * 10**6
    form = dataclasses.replace(form, shard_bytes=size)
  made = run(cfg, folder, pathlib.Path(to), step=_STEP.value, form=form)
  print(f"step {made.step}: {made.files} files of {made.size:,} bytes in {to}")
  return 0


def run(
  cfg: config.Run,
  folder: pathlib.Path,
  to: pathlib.Path,
  *,
  step: int | None = None,
  form: Form | None = None,
) -> Exported:
  """Writes a checkpoint as a Hugging Face folder, or its adapters for `peft`.

  Args:
    cfg: the run.
    folder: of the run.
    to: the folder to write: not there yet, or empty. It comes to be at once,
      when all of it is on the disk.
    step: of the checkpoint; None is the newest that is whole.
    form: how weights are written.

  Returns:
    What was written: weights and config.json, the tokenizer with its chat
    template, and generation_config.json; of adapters only what `peft` keeps.

  Raises:
    InputError: there is no such checkpoint, it is of another model, the folder
      is not empty, or there are no adapters that can be alone.
    RunError: the disk is full or broken. What was there before, still is.
  """
  form, to = form or Form(), pathlib.Path(os.path.abspath(to))
  _check_empty(to)
  if form.adapter:
    _check_adapter(cfg)
  shape = prepare.model(cfg).config
  if not isinstance(shape, transformer.Config):
    raise types.InputError(
      "--mode=export: expected a model of one of our families, got "
      f"{shape.about}. Take its weights from the checkpoint."
    )
  # A shape that no config.json can say is told before anything is read.
  hf = {} if form.adapter else weights.hf_config(shape)
  tokenizer = dataset.tokenizer_of(
    cfg.data, model_path=cfg.model.path, vocab_size=shape.vocab_size
  )
  path = fields.find(folder / "checkpoints", step)
  found = fields.read(path, _wanted(cfg, shape, form))
  made, fault = _temporary(to), None
  sizes: list[int] = []
  try:
    if form.adapter:
      _write_adapter(made, cfg, shape, found["adapters"], dtype=form.dtype)
    else:
      _write_config(made, hf, tokenizer, form.dtype)
      _write_model(made, cfg, shape, found, form=form)
      write_tokenizer(made, _source(cfg), tokenizer)
    files = [path for path in made.rglob("*") if path.is_file()]
    sizes = [file.stat().st_size for file in files]
    _put(made, to)
  except OSError as error:
    fault = error
  finally:
    shutil.rmtree(made, ignore_errors=True)
  if fault is not None:
    raise types.RunError(
      f"--to: expected to write {to}, got {fault}. Make room or repair the "
      "disk, and export again."
    )
  return Exported(step=int(path.name), files=len(sizes), size=sum(sizes))


def _check_empty(to: pathlib.Path) -> None:
  got = None
  if to.is_symlink() or (to.exists() and not to.is_dir()):
    got = "a file or a link"
  elif to.is_dir() and any(to.iterdir()):
    got = "one with files in it"
  if got is not None:
    raise types.InputError(
      f"--to: expected a folder that is empty or not there, got {got}: {to}. "
      "Name another."
    )


def _check_adapter(cfg: config.Run) -> None:
  """Refuses adapters of a model that nobody else could put beneath them."""
  path, steps = cfg.model.path, cfg.warmup.num_steps
  has = isinstance(cfg.optim.trained, lora.Lora)
  is_folder = path is not None and pathlib.Path(path).is_dir()
  for holds, name, rule, value in (
    (has, "optim.trained", "a lora.Lora", cfg.optim.trained),
    (is_folder, "model.path", "a Hugging Face folder", path),
    (not steps, "warmup.num_steps", "0, as it changes that model", steps),
  ):
    if not holds:
      raise types.InputError(
        f"{name}: expected {rule} with --adapter, got {value}. Leave --adapter "
        "out, and write whole weights."
      )


def _wanted(
  cfg: config.Run, shape: transformer.Config, form: Form
) -> dict[str, types.Tree]:
  """Declares what is read."""
  tree = transformer.spec(shape)
  adapters = trained.spec(cfg.optim.trained, tree)
  wanted = {} if form.adapter else {"params": tree}
  if adapters is not None:
    wanted["adapters"] = adapters
  return specs.abstract(wanted, jnp.float32)


# ------------------------------------------------------------------ the folder


def _temporary(to: pathlib.Path) -> pathlib.Path:
  """Makes a folder beside the one to write, to take its place."""
  try:
    to.parent.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
  except OSError as error:
    raise types.InputError(
      f"--to: expected a folder that can be written, got {to} "
      f"({error.strerror}). Name another."
    ) from error


def _put(made: pathlib.Path, to: pathlib.Path) -> None:
  """Gives a folder its name, once all of it is on the disk."""
  for path in made.rglob("*"):
    folder_lib.sync(path)
  folder_lib.sync(made)
  made.chmod(0o755)  # mkdtemp makes it private.
  os.replace(made, to)
  folder_lib.sync(to.parent)


def _write_model(
  made: pathlib.Path,
  cfg: config.Run,
  shape: transformer.Config,
  found: types.Tree,
  *,
  form: Form,
) -> None:
  """Writes weights, adapters merged into them."""
  layers = dict(found["params"]["layers"])
  if isinstance(cfg.optim.trained, lora.Lora):
    # As `lora.attach`, which would bring all of it to a device.
    scale = np.float32(cfg.optim.trained.scale)
    for name, change in found["adapters"]["layers"].items():
      layers[name] = adapted.Adapted(
        weight=layers[name], a=change["a"], b=scale * change["b"]
      )
  params = {**found["params"], "layers": layers}
  exports.write(
    made, shape, params, dtype=form.dtype, shard_bytes=form.shard_bytes
  )


def _write_adapter(
  made: pathlib.Path,
  cfg: config.Run,
  shape: transformer.Config,
  adapters: types.Tree,
  *,
  dtype: exports.Dtype,
) -> None:
  assert isinstance(cfg.optim.trained, lora.Lora), "it is checked"
  assert cfg.model.path is not None, "it is checked"
  exports.write_adapter(
    made,
    shape,
    adapters,
    alpha=cfg.optim.trained.alpha,
    base=cfg.model.path,
    prefix=weights.module_prefix(cfg.model.path),
    dtype=dtype,
  )


# --------------------------------------------------------------- the tokenizer


def _source(cfg: config.Run) -> pathlib.Path | None:
  """Returns the folder or GGUF file that the run's tokenizer is from."""
  path = cfg.data.tokenizer or cfg.model.path
  if cfg.data.alphabet is not None or path is None:
    return None
  return pathlib.Path(path)


def _ids(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
  """Returns the tokens that begin and end a text, as both configs have them."""
  ids: dict[str, Any] = {"eos_token_id": list(tokenizer.eos_ids)}
  if tokenizer.bos_id is not None:
    ids["bos_token_id"] = tokenizer.bos_id
  return ids


def _write_config(
  made: pathlib.Path,
  hf: dict[str, Any],
  tokenizer: tokenizers.Tokenizer,
  dtype: exports.Dtype,
) -> None:
  # The older name of the field, for older readers, and the newer one.
  kind = {"dtype": dtype, "torch_dtype": dtype}
  about = {**hf, **_ids(tokenizer), **kind}
  exports.write_json(made / "config.json", about)


def _template(tokenizer: tokenizers.Tokenizer) -> Any:
  """Returns chat templates as tokenizer_config.json has them."""
  plain, with_tools = tokenizer.template, tokenizer.tool_template
  if plain is None or with_tools is None:
    return plain
  named = {"default": plain, "tool_use": with_tools}
  return [{"name": k, "template": v} for k, v in named.items()]


def write_tokenizer(
  made: pathlib.Path,
  source: pathlib.Path | None,
  tokenizer: tokenizers.Tokenizer,
) -> None:
  """Copies a tokenizer's own files, or writes what says the same.

  Args:
    made: the folder to write in.
    source: the folder that the tokenizer is from; a GGUF file or None have no
      files to copy.
    tokenizer: what was read of it, or made.
  """
  if source is not None and source.is_dir():
    for name in _COPIED:
      if os.path.lexists(source / name):
        (made / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(safetensors_io.contained(source, name), made / name)
  else:
    backend = tokenizer.backend
    text = backend.to_str(pretty=True)
    (made / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
      "add_bos_token": tokenizer.bos_id is not None,
      "chat_template": _template(tokenizer),
      "clean_up_tokenization_spaces": False,
      "eos_token": next(map(backend.id_to_token, tokenizer.eos_ids), None),
      "pad_token": backend.id_to_token(tokenizer.pad_id),
      "tokenizer_class": "PreTrainedTokenizerFast",
      **tokenizer.names,
    }
    kept = {
      name: value for name, value in settings.items() if value is not None
    }
    exports.write_json(made / "tokenizer_config.json", kept)
  if not (made / "generation_config.json").exists():
    exports.write_json(made / "generation_config.json", _ids(tokenizer))
