"""Stores what `transformers` computes, for tests to compare with.

Run it from the repository's root where torch is installed; tests do not run it:

  pip install torch transformers accelerate gguf safetensors
  python -m tests.reference.make_transformers_values SMOLLM2.gguf

The stored values came from transformers 5.24.0 and torch 2.13.0 on CPU.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.reference import tiny_folder

VALUES = pathlib.Path(__file__).parent / "values"

TEXTS = (
  "The capital of France is",
  "def add(a, b):\n    return a + b  # 12345 + 678 = 13023\n\nprint(add(1, 2))",
  "Ünïcödé and 漢字 and 🙂🚀; naïve café, «quotes» — and  two spaces.",
)
CHATS = ("What is 2 + 3?", "Name three fruits.")
NEW_TOKENS = 64
# Columns of the logits that are stored at every position.
COLUMNS = tuple(range(0, 49152, 701))
# Of what classifiers read, in tokens; and which they are.
LENGTHS = (1, 2, 17, 40, 33, 48)
CLASSIFIERS = {
  **{family: (family, {}) for family in ("llama", "qwen2", "qwen3")},
  "without_padding": ("llama", {"pad_token_id": None}),
}


def families() -> None:
  """Stores logits of tiny random models of each family."""
  tokens = np.random.RandomState(7).randint(0, tiny_folder.VOCAB, (2, 40))
  out = {"tokens": tokens.astype(np.int32)}
  models = {family: (family, {}) for family in tiny_folder.FAMILIES}
  for kind, (family, options) in (models | tiny_folder.VARIANTS).items():
    with tempfile.TemporaryDirectory() as name:
      tiny_folder.write(pathlib.Path(name), family, **options)
      model = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32
      )
      with torch.no_grad():
        out[kind] = model(torch.tensor(tokens)).logits.numpy()
  np.savez_compressed(VALUES / "families.npz", **out)


def mixtures() -> None:
  """Stores logits of a tiny mixture of experts, and its loads by layer."""
  tokens = np.random.RandomState(8).randint(0, tiny_folder.VOCAB, (2, 40))
  out = {"tokens": tokens.astype(np.int32)}
  for normalize in (True, False):
    with tempfile.TemporaryDirectory() as name:
      options = {"norm_topk_prob": normalize}
      hf = tiny_folder.write(pathlib.Path(name), "qwen3_moe", **options)
      model = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32
      )
      with torch.no_grad():
        made = model(torch.tensor(tokens), output_router_logits=True)
    out[f"logits_{normalize}"] = made.logits.numpy()
    out[f"balance_{normalize}"] = np.asarray(
      [
        modeling_qwen3_moe.load_balancing_loss_func(
          (layer,), hf["num_experts"], hf["num_experts_per_tok"]
        )
        for layer in made.router_logits
      ]
    )
  np.savez_compressed(VALUES / "mixtures.npz", **out)


def classifiers() -> None:
  """Stores scores of tiny random classifiers, alone and padded on one side."""
  draw = np.random.RandomState(9)
  rows = draw.randint(3, tiny_folder.VOCAB, (len(LENGTHS), max(LENGTHS)))
  rows[-1, LENGTHS[-1] - 2 :] = 0  # It ends as padding does.
  out = {"tokens": rows.astype(np.int32), "lengths": np.asarray(LENGTHS)}
  for kind, (family, options) in CLASSIFIERS.items():
    with tempfile.TemporaryDirectory() as name:
      options = tiny_folder.classifier(family, **options)
      tiny_folder.write(pathlib.Path(name), family, **options)
      model = transformers.AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch.float32
      )
    mask = np.arange(rows.shape[1]) < np.asarray(LENGTHS)[:, None]
    padded = torch.tensor(np.where(mask, rows, 0))
    with torch.no_grad():
      alone = [
        model(torch.tensor(row[None, :n])).logits[0, 0].item()
        for row, n in zip(rows, LENGTHS, strict=True)
      ]
      if options["pad_token_id"] is not None:
        together = model(padded, attention_mask=torch.tensor(mask)).logits
        np.testing.assert_allclose(together[:, 0], alone, atol=1e-5)
    out[kind] = np.asarray(alone, np.float32)
  np.savez_compressed(VALUES / "classifiers.npz", **out)


def _greedy(model, ids: list[int], stop: int | None) -> list[int]:
  answer = []
  while len(answer) < NEW_TOKENS and answer[-1:] != [stop]:
    with torch.no_grad():
      last = model(torch.tensor([ids + answer])).logits[0, -1]
    answer.append(int(last.argmax()))
  return answer


def smollm2(path: pathlib.Path) -> None:
  """Stores ids, logits and greedy answers of SmolLM2-135M-Instruct."""
  where = {"gguf_file": path.name}
  tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, dtype=torch.float32, **where
  )
  arrays, records = {}, []
  for i, text in enumerate(TEXTS):
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
      logits = model(torch.tensor([ids])).logits[0].numpy()
    arrays[f"last_{i}"] = logits[-1]
    arrays[f"columns_{i}"] = logits[:, COLUMNS]
    arrays[f"argmax_{i}"] = logits.argmax(-1).astype(np.int32)
    records.append({"text": text, "ids": ids})
  records[0]["answer"] = _greedy(
    model, records[0]["ids"], None
  )  # Past the end.
  for question in CHATS:
    message = {"role": "user", "content": question}
    text = tokenizer.apply_chat_template(
      [message], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = _greedy(model, ids, 2)
    records.append(
      {"message": message, "text": text, "ids": ids, "answer": answer}
    )
    records[-1]["answer_text"] = tokenizer.decode(answer)
  np.savez_compressed(VALUES / "smollm2.npz", **arrays)
  (VALUES / "smollm2.json").write_text(
    json.dumps({"columns": COLUMNS, "records": records}, indent=1) + "\n",
    encoding="utf-8",
  )


if __name__ == "__main__":
  VALUES.mkdir(exist_ok=True)
  families()
  mixtures()
  classifiers()
  smollm2(pathlib.Path(sys.argv[1]))
