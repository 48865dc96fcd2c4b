"""Checks with transformers that an exported directory gives the logits of its reference file; needs torch, not ptjax.

REFERENCE.npz holds either `ids` [T] and `logits` [T, V] (tests/data/weights/tiny_*/logits.npz) or the SmolLM2 entries
`p2_ids` and `p2_full_logits` (tests/data/smollm2_logits.npz). The tokenizer must load too and know its special tokens.

  python tests/reference/check_export.py EXPORTED_DIR REFERENCE.npz
"""

import sys

import numpy as np
import torch
import transformers


def main(directory: str, reference: str) -> None:
  stored = np.load(reference)
  ids, logits = (stored['ids'], stored['logits']) if 'ids' in stored else (stored['p2_ids'], stored['p2_full_logits'])
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, output_loading_info=True)
  assert not any(report.values()), report
  with torch.no_grad():
    found = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
  tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
  chat = tokenizer.apply_chat_template([dict(role='user', content='Hi')], add_generation_prompt=True, tokenize=False)
  print(f'max |logit difference| {np.abs(found - logits).max():.2e}; same top-1: '
        f'{(found.argmax(-1) == logits.argmax(-1)).all()}')
  print(f'bos {tokenizer.bos_token!r}, eos {tokenizer.eos_token!r}, pad {tokenizer.pad_token!r}; generation ends at '
        f'{model.generation_config.eos_token_id}; chat {chat!r}')


if __name__ == '__main__':
  main(*sys.argv[1:])
