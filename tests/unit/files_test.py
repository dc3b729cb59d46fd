"""Files of every kind give the same examples; damaged ones are one line."""

import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow
import pytest
from array_record.python import array_record_module
from pyarrow import ipc, parquet

from jaxrl_post import types
from jaxrl_post.data import array_record, arrow, hf_disk, sources
from jaxrl_post.data import parquet as parquet_source

MESSAGES = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "Häßlich?"},
]
ROWS = [
  {
    "prompt": MESSAGES if i % 2 else MESSAGES[1:],
    "task": {"question": f"{i} + {i}?", "truth": {"of": [str(2 * i), None]}},
    "answer": 0.5 * i,
    "more": i,
  }
  for i in range(7)
]


def write_jsonl(path: pathlib.Path, rows: Sequence[Any]) -> str:
  path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  return str(path)


def write_parquet(path: pathlib.Path, rows: Sequence[Any]) -> str:
  table = pyarrow.Table.from_pylist(rows)
  parquet.write_table(table, path, row_group_size=3)
  return str(path)


def write_array_record(path: pathlib.Path, rows: Sequence[Any]) -> str:
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for row in rows:
    writer.write(json.dumps(row).encode())
  writer.close()
  return str(path)


def write_hf(path: pathlib.Path, rows: Sequence[Any], *files: str) -> str:
  """Writes what `datasets.Dataset.save_to_disk` does, in several files."""
  names = files or ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow")
  path.mkdir(parents=True)
  table = pyarrow.Table.from_pylist(rows)
  half = -(-len(rows) // len(names))
  for i, name in enumerate(names):
    part = table.slice(i * half, half)
    with (
      (path / name).open("wb") as file,
      ipc.new_stream(file, table.schema) as stream,
    ):
      stream.write_table(part, max_chunksize=2)
  state = {"_data_files": [{"filename": n} for n in names], "_split": None}
  (path / "state.json").write_text(json.dumps(state))
  (path / "dataset_info.json").write_text("{}")
  return str(path)


KINDS: dict[str, tuple[Callable[..., str], Callable[..., sources.Source]]] = {
  "jsonl": (write_jsonl, sources.Jsonl),
  "parquet": (write_parquet, parquet_source.Parquet),
  "array_record": (write_array_record, array_record.ArrayRecord),
  "hf_disk": (write_hf, hf_disk.HfDisk),
}
FILES = ("jsonl", "parquet", "array_record")


def refused(source: sources.Source) -> str:
  """Returns the one line that a source is refused with."""
  with pytest.raises(types.InputError) as error:
    source.load()
  assert "\n" not in str(error.value)
  return str(error.value)


# ------------------------------------------------------------------ all kinds


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_reads_messages_numbers_and_fields_of_fields(kind, tmp_path):
  write, source = KINDS[kind]
  path = write(tmp_path / "data", ROWS)
  found = source(path).load()
  assert [e.reference for e in found] == [0.5 * i for i in range(7)]
  assert found[2].prompt == tuple(MESSAGES[1:])
  assert found[3].prompt == tuple(MESSAGES)
  found = source(path, prompt="task.question", answer="task.truth", limit=5)
  assert found.load() == tuple(
    types.Example(prompt=f"{i} + {i}?", reference={"of": [str(2 * i), None]})
    for i in range(5)
  )


@pytest.mark.parametrize("kind", FILES)
def test_a_pattern_reads_its_files_by_name(kind, tmp_path):
  write, source = KINDS[kind]
  for part in (1, 0):
    rows = [{"prompt": f"{part} {i}", "answer": i} for i in range(2)]
    write(tmp_path / f"train-{part}", rows)
  write(tmp_path / "test-0", [{"prompt": "no", "answer": 0}])
  found = source(str(tmp_path / "train-*")).load()
  assert [e.prompt for e in found] == ["0 0", "0 1", "1 0", "1 1"]
  assert "which none does" in refused(source(str(tmp_path / "x-*")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_is_told_by_file_row_and_field(kind, tmp_path):
  write, source = KINDS[kind]
  rows = [{"prompt": "a", "answer": 1}, {"prompt": None, "answer": 2}]
  line = refused(source(write(tmp_path / "null", rows)))
  assert str(tmp_path / "null") in line
  assert "field 'prompt': expected text" in line and "got None" in line
  bad = {"role": "user", "content": "a", "name": "b"}
  line = refused(source(write(tmp_path / "odd", [{"prompt": [bad]}])))
  assert str(tmp_path / "odd") in line


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_field_is_told_with_those_there_are(kind, tmp_path):
  write, source = KINDS[kind]
  path = write(tmp_path / "data", ROWS)
  assert "'solution', got ['prompt', " in refused(
    source(path, answer="solution")
  )
  line = refused(source(path, answer="task.truth.off"))
  assert "expected a field 'task.truth.off', got ['of']" in line
  line = refused(source(path, answer="task.question.x"))
  assert "expected a field 'task.question.x', got '0 + 0?'" in line


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_or_empty_is_refused(kind, tmp_path):
  write, source = KINDS[kind]
  line = refused(source(str(tmp_path / "none")))
  assert "source.path: expected" in line and str(tmp_path / "none") in line
  assert kind == "hf_disk" or "(No such file or directory). Corr" in line
  with pytest.raises(types.InputError, match="source.limit: expected >= 1"):
    source("data", limit=0)
  if kind == "jsonl":
    assert "at least one row" in refused(source(write(tmp_path / "0", [])))


@pytest.mark.parametrize("kind", ["parquet", "array_record", "hf_disk"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.6, 0.9, 0.97, -1])
def test_a_file_that_was_cut_off_is_refused(kind, keep, tmp_path):
  write, source = KINDS[kind]
  path = pathlib.Path(write(tmp_path / "data", ROWS))
  file = sorted(path.glob("*.arrow"))[-1] if path.is_dir() else path
  raw = file.read_bytes()
  size = len(raw) - 1 if keep < 0 else int(keep * len(raw))
  file.write_bytes(raw[:size])
  line = refused(source(str(path)))
  assert line.startswith(str(file)) and "expected a whole" in line


@pytest.mark.parametrize("kind", ["parquet", "array_record", "hf_disk"])
def test_a_file_of_another_kind_is_refused(kind, tmp_path):
  write, source = KINDS[kind]
  path = pathlib.Path(write(tmp_path / "data", ROWS))
  file = sorted(path.glob("*.arrow"))[0] if path.is_dir() else path
  for raw in (b"PAR1" + b"\xff" * 4096, json.dumps(ROWS).encode() * 9, b"\0"):
    file.write_bytes(raw)
    line = refused(source(str(path)))
    assert line.startswith(str(file)) and "expected a whole" in line


# --------------------------------------------------------------------- tables


@pytest.mark.parametrize("kind", ["parquet", "hf_disk"])
def test_what_json_does_not_have_is_refused_by_row(kind, tmp_path):
  write, source = KINDS[kind]
  rows = [{"prompt": "a", "answer": {"at": None}}] * 3
  rows += [{"prompt": "a", "answer": {"at": datetime.date(2026, 1, 2)}}] * 3
  line = refused(source(write(tmp_path / "data", rows)))
  row = {"parquet": 3, "hf_disk": 0}[kind]  # Of the first or the second file.
  assert f"row {row}, field 'answer': expected text, numbers" in line


@pytest.mark.parametrize("kind", ["parquet", "hf_disk"])
def test_a_null_of_a_table_is_no_field_of_a_message(kind, tmp_path):
  write, source = KINDS[kind]
  tool = {"role": "user", "content": "a", "name": None}
  rows = [{"prompt": [tool], "answer": 1}]
  (found,) = source(write(tmp_path / "data", rows)).load()
  assert found.prompt == ({"role": "user", "content": "a"},)


def test_offsets_that_lead_out_of_a_batch_are_refused(tmp_path):
  path = write_hf(tmp_path / "data", [{"prompt": "abcd", "answer": 1}], "a")
  file = tmp_path / "data" / "a"
  raw = file.read_bytes()
  at = raw.rindex(b"\0\0\0\0\x04\0\0\0", 0, raw.index(b"abcd"))
  file.write_bytes(raw[:at] + b"\0\0\0\0\xff\xff\xff\x7f" + raw[at + 8 :])
  assert "expected a whole Arrow stream" in refused(hf_disk.HfDisk(path))


def test_without_the_package_the_line_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(arrow, "pyarrow", None)
  for source in (parquet_source.Parquet("x"), hf_disk.HfDisk("x")):
    assert "Run pip install 'jaxrl_post[data]'" in refused(source)


# ----------------------------------------------------------- saved by datasets


def test_a_split_is_named_where_there_are_several(tmp_path):
  for name, part in (("train", ROWS[:4]), ("test", ROWS[4:])):
    write_hf(tmp_path / name, part)
  splits = tmp_path / "dataset_dict.json"
  splits.write_text('{"splits": ["train", "test"]}')
  path = str(tmp_path)
  assert len(hf_disk.HfDisk(path, split="test").load()) == 3
  assert "one of train, test, got None" in refused(hf_disk.HfDisk(path))
  assert "got 'dev'" in refused(hf_disk.HfDisk(path, split="dev"))
  one = str(tmp_path / "train")
  assert "None, as there" in refused(hf_disk.HfDisk(one, split="train"))
  splits.write_text('{"splits": ["../train"]}')
  assert "names of splits" in refused(hf_disk.HfDisk(path, split="../train"))


@pytest.mark.parametrize(
  ("state", "told"),
  [
    ({"_data_files": [{"filename": "../data.arrow"}]}, "files beside it"),
    ({"_data_files": [{"filename": "/etc/passwd"}]}, "files beside it"),
    ({"_data_files": [3]}, "files beside it"),
    ({}, "files beside it"),
    ([], "expected a JSON object"),
    ({"_indices_files": [{"filename": "i.arrow"}]}, "flatten_indices()"),
    ({"_data_files": [{"filename": "none.arrow"}]}, "none.arrow"),
  ],
)
def test_a_folder_that_leads_elsewhere_is_refused(state, told, tmp_path):
  path = write_hf(tmp_path / "data", ROWS)
  (tmp_path / "data" / "state.json").write_text(json.dumps(state))
  assert told in refused(hf_disk.HfDisk(path))


def test_a_stream_that_lost_its_last_batches_is_refused(tmp_path):
  path = write_hf(tmp_path / "data", ROWS, "a.arrow")
  file = tmp_path / "data" / "a.arrow"
  raw = file.read_bytes()
  assert raw.endswith(b"\xff\xff\xff\xff\0\0\0\0")
  file.write_bytes(raw[:-8])  # What remains are whole batches.
  assert "without its end" in refused(hf_disk.HfDisk(path))
