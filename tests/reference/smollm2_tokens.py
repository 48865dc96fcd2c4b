"""Makes tests/data/weights/smollm2_tokens.npz: 1,000 varied strings and their ids by transformers' AutoTokenizer.

Needs transformers, not ptjax. MODEL_DIR is a Hugging Face directory of SmolLM2 (`weights.safetensors.export_hf` writes
one). With --llamacpp=FILE.gguf the ids are also compared with those of llama.cpp (package xllamacpp), an independent
tokenizer that reads the GGUF file itself.

  python tests/reference/smollm2_tokens.py MODEL_DIR [--llamacpp=FILE.gguf] [--write]
"""

import argparse
import json
import pathlib
import random
import urllib.request

import numpy as np
import transformers

OUT = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'weights' / 'smollm2_tokens.npz'
WORDS = """
    the of and to in is was for that with as his on be at by had not are but from or have an they which one you
    were her all she there would their we him been has when who will more no if out so said what up its about into
    than them can only other new some could time these two may then do first any my now such like our over man me
    even most made after also did many before must through back years where much your way well down should because
    each just those people how DON'T we'll I'm you've he'd it's THE'RE naïve café Straße résumé ÅNGSTRÖM façade
    coöperate
""".split()
CODE = [
    'def f(x, y=3):\n    return x ** y', 'for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}',
    'x = {"a": [1, 2.5e-3]}', 'SELECT * FROM t WHERE id >= 10;', '<div class="c">&nbsp;</div>',
    '#!/bin/sh\nls -la | grep "x"\n', 'lambda s: s[::-1]', "f'{value!r:>10}'",
    'std::vector<std::pair<int,int>>', '$\\frac{1}{2}\\alpha_{ij}^2$',
    'if not (a and b) or c != d:\n        pass', '// see f(x): 2\r\n', 'https://example.org/a?b=c&d=%20#e',
    '0xDEADBEEF', '\t\treturn;\n\n\n}', 'np.einsum("BTD,DNH->BTNH", x, w)', '__init__', 'snake_case_name',
    'camelCaseName', '</s>',
]
EMOJI = ['😀', '👩‍👩‍👧', '🇫🇷', '👍🏽', '❤️', '🚀🚀', '☃', '🤷‍♂️']
SCRIPTS = ['你好，世界', '漢字仮名交じり文', 'こんにちは', '안녕하세요', 'Привет, мир', 'Γειά σου', 'שלום עולם', 'مرحبا بالعالم',
           'नमस्ते दुनिया', 'สวัสดีชาวโลก', 'ტესტი', 'Tiếng Việt', 'ﬁ ligature', 'e\u0301 combining', '𝔘𝔫𝔦𝔠𝔬𝔡𝔢']
DIGITS = [
    '0', '7', '12', '345', '1234567890', '3.14159', '1,000,000', '-5', '+1e10', '٣٤', '½', '²', 'Ⅷ', '①',
    '१२३', '1st', 'v2.0.1', '2^10', '50%', '12:30', '(1)(2)', 'x1y2z3',
]
SPACES = [
    ' ', '  ', '   ', '\n', '\n\n', '\t', ' \n ', '\r\n', '\u00a0', '\u2003', '\u3000', '        ', '\x0b',
    '\u200b', '\u2028',
]
MARKS = list('!"#$%&\'()*+,-./:;<=>?@[]^_`{|}~') + ['...', '—', '“”', '¿', '。', '!!!', '->', '==', '•']
SPECIAL = [
    '<|im_start|>', '<|im_end|>', '<|endoftext|>', '<|im_start|>user\n', '<|im_end|>\n', '<|im_en',
    '<file_sep>', '<jupyter_code>',
]
ODD = ['\x00', '\x7f', '\ufeff', '\ufffd', '\U0010fffd', '\u202e', 'a' * 60, 'Ġ', 'Ċ', 'ĠĠ']


def strings(count: int = 1000, seed: int = 0) -> list[str]:
  """Words, code, scripts, digits, spaces, marks, special tokens and odd characters, in random order and glue."""
  rng = random.Random(seed)
  kinds = [WORDS, WORDS, CODE, EMOJI, SCRIPTS, DIGITS, DIGITS, SPACES, SPACES, MARKS, SPECIAL, ODD]
  singles = list(dict.fromkeys(sum(kinds, [])))
  made = [''] + singles
  while len(made) < count:
    pieces = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(2, 14))]
    made.append(rng.choice(['', ' ', ' ', '  ']).join(pieces))
  return made[:count]


def llamacpp_ids(gguf: str, texts: list[str]) -> list[list[int]]:
  import xllamacpp

  params = xllamacpp.CommonParams()
  params.model.path = gguf
  params.n_ctx, params.n_parallel, params.warmup = 64, 1, False
  server = xllamacpp.Server(params)
  ids = []
  for text in texts:
    body = json.dumps(dict(content=text, add_special=False, parse_special=True)).encode()
    request = urllib.request.Request(server.listening_address + '/tokenize', body, {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request) as response:
      ids.append(json.load(response)['tokens'])
  return ids


def differences(name: str, texts, ours, theirs) -> None:
  wrong = [i for i in range(len(texts)) if list(ours[i]) != list(theirs[i])]
  print(f'{name}: {len(wrong)} of {len(texts)} differ')
  for i in wrong[:8]:
    print('  ', repr(texts[i]), ours[i], theirs[i])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('model_dir')
  parser.add_argument('--llamacpp')
  parser.add_argument('--write', action='store_true')
  args = parser.parse_args()
  texts = strings()
  tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_dir)
  ids = [tokenizer(text)['input_ids'] for text in texts]
  if args.llamacpp:
    differences('llama.cpp', texts, ids, llamacpp_ids(args.llamacpp, texts))
  raw = [text.encode() for text in texts]
  made = dict(text=np.frombuffer(b''.join(raw), np.uint8), text_length=np.asarray([len(r) for r in raw], np.int32),
              ids=np.asarray(sum(ids, []), np.uint16), ids_length=np.asarray([len(i) for i in ids], np.int32))
  if args.write:
    np.savez_compressed(OUT, **made)
  stored = np.load(OUT)
  same = all(np.array_equal(stored[name], made[name]) for name in made)
  print(f'{len(texts)} strings, {len(made["ids"])} ids; {OUT.name} {"agrees" if same else "DIFFERS"}')


if __name__ == '__main__':
  main()
