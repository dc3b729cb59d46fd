"""Folders of models that are damaged or malicious: refused in one line each."""

import json
import os
import pathlib
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxrl_post import prepare, types
from jaxrl_post.models import weights
from tests.e2e import runs
from tests.reference import tiny_folder

NAME = "model.layers.1.mlp.up_proj.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(name="folder")
def _folder(tmp_path: pathlib.Path) -> pathlib.Path:
  """Returns a sound folder, with a file beside it that is none of its own."""
  folder = tmp_path / "models" / "main" / "model"
  tiny_folder.write(folder)
  (tmp_path / "secret").write_text("of somebody else")
  return folder


def refusal(folder: pathlib.Path) -> str:
  """Reads a folder, and returns the one line that refuses it."""
  with pytest.raises(types.InputError) as caught:
    weights.read_params(str(folder), weights.read_config(str(folder)))
  line = str(caught.value)
  assert line.isprintable() and len(line) < 600, line
  assert ": expected " in line
  return line


# ----------------------------------------------------------------- one file


def parts(folder: pathlib.Path) -> tuple[dict[str, Any], bytes]:
  data = (folder / FILE).read_bytes()
  (size,) = struct.unpack_from("<Q", data)
  return json.loads(data[8 : 8 + size]), data[8 + size :]


def put(
  folder: pathlib.Path, header: dict[str, Any] | str, body: bytes
) -> None:
  text = header if isinstance(header, str) else json.dumps(header)
  raw = text.encode()
  (folder / FILE).write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def edited(**fields: Any) -> Callable[[pathlib.Path], None]:
  """Replaces fields of a tensor's entry in the header."""

  def edit(folder: pathlib.Path) -> None:
    header, body = parts(folder)
    put(folder, {**header, NAME: {**header[NAME], **fields}}, body)

  return edit


def resized(size: int) -> Callable[[pathlib.Path], None]:
  def edit(folder: pathlib.Path) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(struct.pack("<Q", size) + data[8:])

  return edit


def cut(size: int) -> Callable[[pathlib.Path], None]:
  def edit(folder: pathlib.Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:size])

  return edit


def moved(step: int) -> Callable[[pathlib.Path], None]:
  """Moves where a tensor lies, so that it overlaps with another."""

  def edit(folder: pathlib.Path) -> None:
    header, body = parts(folder)
    begin, end = header[NAME]["data_offsets"]
    entry = {**header[NAME], "data_offsets": [begin + step, end + step]}
    put(folder, {**header, NAME: entry}, body)

  return edit


def doubled(folder: pathlib.Path) -> None:
  """Names a tensor twice; both names stand for the same bytes."""
  header, body = parts(folder)
  text = json.dumps(header)
  again = json.dumps({NAME: header[NAME]})
  put(folder, f"{text[:-1]}, {again[1:]}", body)


def longer(folder: pathlib.Path) -> None:
  header, body = parts(folder)
  put(folder, header, body + b"\0" * 64)


def renamed(name: str) -> Callable[[pathlib.Path], None]:
  def edit(folder: pathlib.Path) -> None:
    header, body = parts(folder)
    header[name] = header.pop(NAME)
    put(folder, header, body)

  return edit


def spare(name: str, shape: tuple[int, ...] = (2,)) -> Callable:
  def edit(folder: pathlib.Path) -> None:
    tensors = tiny_folder.arrays(tiny_folder.FAMILIES["llama"])
    tensors[name] = np.zeros(shape, np.float32)
    tiny_folder.write_weights(folder, tensors)

  return edit


WHOLE = "expected a whole safetensors file"


@pytest.mark.parametrize(
  ("spoil", "line"),
  [
    (cut(0), WHOLE),
    (cut(7), WHOLE),
    (cut(1000), WHOLE),
    (cut(-1), WHOLE),
    (longer, WHOLE),
    (resized(2**60), WHOLE),
    (resized(2**63 + 5), WHOLE),
    (resized(10**8), WHOLE),
    (resized(3), WHOLE),
    (moved(4), WHOLE),
    (moved(-4096), WHOLE),
    (edited(data_offsets=[0, 15360]), WHOLE),
    (edited(data_offsets=[2**62, 2**62 + 15360]), WHOLE),
    (edited(data_offsets=[-15360, 0]), WHOLE),
    (edited(data_offsets=[15360, 0]), WHOLE),
    (edited(data_offsets="all"), WHOLE),
    (edited(shape=[2**40, 2**40]), WHOLE),
    (edited(shape=[-80, -48]), WHOLE),
    (edited(shape=[80, 49]), WHOLE),
    (edited(shape=[48, 80]), r"of shape (80, 48), got (48, 80)"),
    (edited(shape=[3840]), r"of shape (80, 48), got (3840,)"),
    (edited(dtype="F7"), WHOLE),
    (edited(dtype="I32"), "F64, got I32"),
    (edited(dtype="BOOL\n"), WHOLE),
    (doubled, f"'{NAME}' twice"),
    (lambda folder: put(folder, "[" * 100_000, b""), WHOLE),
    (lambda folder: put(folder, "[1, 2]", b""), WHOLE),
    (lambda folder: put(folder, "{}", b""), "expected tensor model."),
    (renamed("x\nerror: all is well"), f"expected tensor {NAME}, got none"),
    (spare("x\nerror: all is well"), r"got 'x\nerror: all is well'"),
    (spare("model.layers.3.mlp.up_proj.weight"), "got 'model.layers.3.mlp"),
    (spare("z" * 5000), "besides those of the model, got 'zzz"),
  ],
)
def test_a_file_that_is_not_sound_is_one_line(folder, spoil, line):
  spoil(folder)
  assert line in refusal(folder)


# ------------------------------------------------------------ several files


def indexed(folder: pathlib.Path, **changes: Any) -> None:
  """Cuts the weights into files, and edits what the index says of one."""
  tensors = tiny_folder.arrays(tiny_folder.FAMILIES["llama"])
  (folder / FILE).unlink()
  tiny_folder.write_weights(folder, tensors, shards=2)
  index = json.loads((folder / INDEX).read_text())
  index["weight_map"] |= changes
  (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
  ("name", "line"),
  [
    ("../other.safetensors", "names of files in its own folder"),
    ("/etc/passwd", "names of files in its own folder"),
    ("/etc/x.safetensors", "names of files in its own folder"),
    ("sub/x.safetensors", "names of files in its own folder"),
    ("..\\x.safetensors", "names of files in its own folder"),
    ("x\0.safetensors", "names of files in its own folder"),
    ("pytorch_model.bin", "names of files in its own folder"),
    ("", "names of files in its own folder"),
    (7, "names of files in its own folder"),
    (["a.safetensors"], "names of files in its own folder"),
    ("model-00009-of-00002.safetensors", "00009-of-00002.safetensors"),
    ("folder.safetensors", "folder.safetensors: expected a file"),
    ("pipe.safetensors", "pipe.safetensors: expected a file"),
    ("loop.safetensors", "loop.safetensors: expected a file"),
    ("out.safetensors", "in its own folder, got a link to"),
    ("far.safetensors", "in its own folder, got a link to"),
  ],
)
def test_an_index_that_leads_elsewhere_is_one_line(folder, name, line):
  (folder / "folder.safetensors").mkdir()
  os.mkfifo(folder / "pipe.safetensors")
  (folder / "loop.safetensors").symlink_to("loop.safetensors")
  (folder / "out.safetensors").symlink_to("../../../secret")
  (folder / "far.safetensors").symlink_to("/etc/passwd")
  indexed(folder, **{NAME: name})
  assert line in refusal(folder)


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("", "expected a JSON file"),
    ("[]", "expected a JSON object, got list"),
    ("{}", "expected a weight_map, got NoneType"),
    ('{"weight_map": []}', "expected a weight_map, got list"),
    ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
    ("\udcff", "expected a JSON file, got UnicodeDecodeError"),
  ],
)
def test_an_index_that_is_none_is_one_line(folder, text, line):
  (folder / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
  assert line in refusal(folder)


def test_a_link_within_the_folder_or_to_the_hubs_blobs_is_followed(tmp_path):
  folder = tmp_path / "models--x" / "snapshots" / "abc"
  tiny_folder.write(folder, shards=2)
  blobs = tmp_path / "models--x" / "blobs"
  blobs.mkdir()
  first, second = sorted(folder.glob("*.safetensors"))
  first.rename(blobs / "1f")
  first.symlink_to("../../blobs/1f")
  (folder / "store").mkdir()
  second.rename(folder / "store" / "own")
  second.symlink_to("store/own")
  cfg = weights.read_config(str(folder))
  assert weights.read_params(str(folder), cfg)["embed"].shape == (264, 48)
  (tmp_path / "alias").symlink_to(folder)
  weights.check(str(tmp_path / "alias"), cfg)


def test_a_link_out_of_the_folder_is_refused_as_a_single_file_too(folder):
  (folder / FILE).rename(folder.parent / "stolen")
  (folder / FILE).symlink_to("../stolen")
  assert "got a link to" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "a.ckpt"])
def test_a_pickle_is_refused_and_not_run(folder, name):
  class Bomb:
    def __reduce__(self):
      return os.mkdir, (str(folder / "executed"),)

  (folder / FILE).unlink()
  (folder / name).write_bytes(pickle.dumps(Bomb()))
  assert f"got {name}, a pickle" in refusal(folder)
  (folder / FILE).write_bytes(pickle.dumps(Bomb()))  # under a good name
  assert WHOLE in refusal(folder)
  assert not (folder / "executed").exists()


# ------------------------------------------------------------------ config


@pytest.mark.parametrize(
  ("text", "line"),
  [
    ("null", "expected a JSON object, got NoneType"),
    ('"llama"', "expected a JSON object, got str"),
    ("{", "expected a JSON file"),
    ("[" * 100_000, "expected a JSON file, got RecursionError"),
    ('{"x": ' + "9" * 5000 + "}", "expected a JSON file, got ValueError"),
    ('{"model_type": "llama", "model_type": "qwen2"}', "'model_type' twice"),
  ],
)
def test_a_config_that_is_no_object_is_one_line(folder, text, line):
  (folder / "config.json").write_text(text)
  assert line in refusal(folder)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("num_hidden_layers", 10**12),
    ("num_hidden_layers", 10_001),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", True),
    ("vocab_size", 10**300),
    ("vocab_size", 10**400),
    ("vocab_size", 2**31),
    ("hidden_size", 1e300),
    ("hidden_size", float("inf")),
    ("num_attention_heads", 10**9),
    ("num_attention_heads", 0),
    ("max_position_embeddings", []),
    ("rope_scaling", "llama3"),
    ("rope_scaling", [8.0]),
    ("rope_parameters", 3),
    ("rope_theta", "1e6"),
    ("layer_types", 5),
    ("tie_word_embeddings", "false"),
    ("model_type", ["llama"]),
    ("model_type", "m" * 10_000),
    ("architectures", {"x\ny": 1}),
    ("hidden_act", {"gelu": []}),
  ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(folder, field, value):
  hf = json.loads((folder / "config.json").read_text())
  hf.pop("rope_scaling")
  (folder / "config.json").write_text(json.dumps({**hf, field: value}))
  line = refusal(folder)
  ours = {"num_attention_heads": "head_dim"}.get(field, field)
  assert field in line or ours in line


def test_a_size_that_the_weights_do_not_have_makes_no_array(folder):
  hf = json.loads((folder / "config.json").read_text())
  hf |= {"vocab_size": 2**31 - 1, "intermediate_size": 2**31 - 1}
  (folder / "config.json").write_text(json.dumps(hf))
  assert "Config and weights are of two models" in refusal(folder)


def test_a_run_looks_for_its_weights_before_it_takes_devices(tmp_path):
  tiny_folder.write(tmp_path / "whole", "llama", seed=0)
  settings = ("model.config=none", "data.alphabet=none")
  cfg = runs.configured(f"model.path={tmp_path / 'whole'}", *settings)
  prepare.prepare(cfg)
  (tmp_path / "whole" / "model.safetensors").unlink()
  with pytest.raises(types.InputError, match=r"whole: expected .*safetensors"):
    prepare.prepare(cfg)
