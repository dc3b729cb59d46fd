"""Loads folders of models with `transformers`, and stores what they say.

Needs torch and transformers, and neither jax nor the package under test:

  python load_with_transformers.py TOKENS.npy OUT.npz FOLDER...

A folder of adapters for `peft` is loaded on top of the model that it names.
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch
import transformers

NEW_TOKENS = 12
CHAT = [{"role": "user", "content": "Name three fruits."}]


def _model(folder: pathlib.Path) -> torch.nn.Module:
  load = transformers.AutoModelForCausalLM.from_pretrained
  about = folder / "adapter_config.json"
  if not about.exists():
    return load(folder)
  base = json.loads(about.read_text())["base_model_name_or_path"]
  peft = importlib.import_module("peft")
  return peft.PeftModel.from_pretrained(load(base), folder)


def _greedy(model: torch.nn.Module, ids: list[int]) -> list[int]:
  answer = []
  for _ in range(NEW_TOKENS):
    with torch.no_grad():
      last = model(torch.tensor([ids + answer])).logits[0, -1]
    answer.append(int(last.argmax()))
  return answer


def main(tokens_file: str, out_file: str, *folders: str) -> None:
  """Stores logits and greedy answers, and ids of a chat; see above."""
  tokens = np.load(tokens_file)
  out = {}
  for name in folders:
    folder = pathlib.Path(name)
    model = _model(folder).eval()
    with torch.no_grad():
      logits = model(torch.tensor(tokens)).logits
    out[f"{folder.name}/dtype"] = str(logits.dtype)
    out[f"{folder.name}/logits"] = logits.float().numpy()
    out[f"{folder.name}/greedy"] = _greedy(model, tokens[0, :8].tolist())
    if (folder / "tokenizer.json").exists():
      tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
      out[f"{folder.name}/text"] = tokenizer.encode(
        "3 + 4 é", add_special_tokens=False
      )
      out[f"{folder.name}/ends"] = np.ravel(
        model.generation_config.eos_token_id
      )
      if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(
          CHAT, tokenize=False, add_generation_prompt=True
        )
        out[f"{folder.name}/chat"] = tokenizer.encode(
          text, add_special_tokens=False
        )
  np.savez(out_file, **out)


if __name__ == "__main__":
  main(*sys.argv[1:])
