"""Text <-> token ids, from a tokenizer.json, a GGUF vocabulary, or a byte table made in code.

Every kind ends as one `tokenizers.Tokenizer`, so that training, sampling and the exported directory split text
alike. A vocabulary whose pre-tokenizer is not in `PRE_TOKENIZERS` is refused: a guess would give plausible but wrong
ids. The end of a sequence is never recognised by the padding id, which many models share with it.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import pathlib
import re

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+")
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r'\p{N}{1,3}', r'\p{N}')


def _by_regex(words: str):
  return pre_tokenizers.Sequence([
      pre_tokenizers.Split(tokenizers.Regex(words), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# `tokenizer.ggml.pre` of a GGUF file -> how text is cut before merging; values are made anew at each use.
PRE_TOKENIZERS = {
    'gpt-2': lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    'smollm': lambda: pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    'llama-bpe': lambda: _by_regex(_WORDS_LLAMA3),
    'qwen2': lambda: _by_regex(_WORDS_QWEN2),
}
_IGNORES_MERGES = ('llama-bpe',)  # a word that is itself a token is taken whole
_NORMALIZERS = {'qwen2': normalizers.NFC}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A vocabulary with its special ids and chat template."""

  backend: tokenizers.Tokenizer
  bos_id: int | None
  eos_id: int | None
  pad_id: int | None
  eos_ids: tuple[int, ...]  # every id that ends a turn or a document; eos_id is among them
  chat_template: str | None
  max_length: int | None = None  # tokens, for the exported tokenizer_config.json

  def __len__(self) -> int:
    return self.backend.get_vocab_size(with_added_tokens=True)

  @property
  def vocabulary(self) -> dict[str, int]:
    """Every token, added ones included, and its id."""
    return self.backend.get_vocab(with_added_tokens=True)

  def encode(self, text: str, add_special: bool = False) -> list[int]:
    """Ids of `text`; special tokens spelled in the text are recognised.

    `add_special` also puts what the vocabulary itself asks for around a document (such as a BOS). Leave it False for
    a rendered chat template, which already spells its own.
    """
    return self.backend.encode(text, add_special_tokens=add_special).ids

  def encode_batch(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
    return [e.ids for e in self.backend.encode_batch(list(texts), add_special_tokens=add_special)]

  def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
    return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

  def token(self, token_id: int | None) -> str | None:
    """The spelling of one id, as it stands in the vocabulary."""
    return None if token_id is None else self.backend.id_to_token(token_id)

  def token_bytes(self, token_id: int) -> bytes:
    """What one id adds to a text; a character may be spread over several. Nothing for an id without a spelling."""
    token = self.token(token_id) or ''
    if isinstance(self.backend.decoder, decoders.ByteLevel):
      table = _byte_table()
      return bytes(table[c] for c in token) if set(token) <= table.keys() else token.encode()
    if re.fullmatch(r'<0x[0-9A-F]{2}>', token):
      return bytes([int(token[3:5], 16)])
    return token.replace('\u2581', ' ').encode()

  @property
  def special_tokens(self) -> dict[str, str]:
    """bos_token, eos_token and pad_token, those that exist; chat templates may use them."""
    named = dict(bos_token=self.bos_id, eos_token=self.eos_id, pad_token=self.pad_id)
    return {name: self.token(i) for name, i in named.items() if i is not None}

  def to_directory(self, directory: str | pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as `transformers` and `from_directory` read them.

    End ids beyond `eos_id` belong in generation_config.json, which `weights.safetensors.export_hf` writes.
    """
    directory = pathlib.Path(directory)
    self.backend.save(str(directory / 'tokenizer.json'))
    fields = dict(self.special_tokens, tokenizer_class='PreTrainedTokenizerFast', clean_up_tokenization_spaces=False)
    if self.chat_template is not None:
      fields['chat_template'] = self.chat_template
    if self.max_length is not None:
      fields['model_max_length'] = self.max_length
    (directory / 'tokenizer_config.json').write_text(json.dumps(fields, indent=2, ensure_ascii=False) + '\n')


def from_directory(directory: str | pathlib.Path) -> Tokenizer:
  """Tokenizer of a Hugging Face directory: tokenizer.json, with special ids and template from the files beside it.

  Raises:
    ValueError: there is no tokenizer.json, or a special token is not in its vocabulary.
  """
  directory = pathlib.Path(directory)
  if not (directory / 'tokenizer.json').is_file():
    raise ValueError(f'{directory} has no tokenizer.json; fix: AutoTokenizer.from_pretrained(...).save_pretrained(...) '
                     'of transformers writes one')
  backend = tokenizers.Tokenizer.from_file(str(directory / 'tokenizer.json'))
  backend.no_padding()
  backend.no_truncation()
  fields = _read_json(directory / 'tokenizer_config.json')

  def special_id(name: str) -> int | None:
    token = fields.get(name)
    token = token['content'] if isinstance(token, dict) else token
    if token is not None and backend.token_to_id(token) is None:
      raise ValueError(f'{directory}/tokenizer_config.json: {name} = {token!r} is not in the vocabulary')
    return None if token is None else backend.token_to_id(token)

  eos_id = special_id('eos_token')
  pad_id = special_id('pad_token')
  declared = _read_json(directory / 'generation_config.json').get('eos_token_id')
  declared = _read_json(directory / 'config.json').get('eos_token_id') if declared is None else declared
  eos_ids = [eos_id] + (declared if isinstance(declared, list) else [declared])
  return Tokenizer(
      backend=backend, bos_id=special_id('bos_token'), eos_id=eos_id, pad_id=eos_id if pad_id is None else pad_id,
      eos_ids=_unique(eos_ids), chat_template=_directory_template(directory, fields))


def from_vocabulary(tokens: Sequence[str], merges: Sequence[str], special: Sequence[int], pre: str, *,
                    bos_id: int | None, eos_id: int | None, pad_id: int | None, eot_id: int | None = None,
                    add_bos: bool = False, chat_template: str | None = None, max_length: int | None = None,
                    plain_added: Sequence[int] = ()) -> Tokenizer:
  """Byte-level BPE from a GGUF file's lists.

  Args:
    tokens: spelling of each id, in the byte-level alphabet (special tokens: as they are).
    merges: 'left right' in rank order.
    special: ids of control tokens, matched whole in the text and dropped by `decode(skip_special=True)`.
    pre: a row of PRE_TOKENIZERS.
    plain_added: ids matched whole in the text but printed like text.

  Raises:
    ValueError: `pre` is unknown.
  """
  if pre not in PRE_TOKENIZERS:
    raise ValueError(f'tokenizer.ggml.pre = {pre!r} is not supported; known: {sorted(PRE_TOKENIZERS)}. '
                     'Load the Hugging Face directory of the model instead (tokenizer.json).')
  pairs = [tuple(m.split(' ')) for m in merges]
  backend = tokenizers.Tokenizer(models.BPE(
      vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, ignore_merges=pre in _IGNORES_MERGES))
  backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
  backend.decoder = decoders.ByteLevel()
  if pre in _NORMALIZERS:
    backend.normalizer = _NORMALIZERS[pre]()
  backend.add_special_tokens([_added(tokens[i], True) for i in special])
  backend.add_tokens([_added(tokens[i], False) for i in plain_added])
  if add_bos:
    bos = tokens[bos_id]
    backend.post_processor = processors.TemplateProcessing(
        single=f'{bos}:0 $A:0', pair=f'{bos}:0 $A:0 {bos}:1 $B:1', special_tokens=[(bos, bos_id)])
  return Tokenizer(backend, bos_id, eos_id, eos_id if pad_id is None else pad_id, _unique([eos_id, eot_id]),
                   chat_template, max_length)


def byte_level(vocab_size: int | None = None) -> Tokenizer:
  """One id per byte after three special tokens, with a ChatML template: for random models and tests.

  Raises:
    ValueError: `vocab_size` is smaller than the 259 ids it needs.
  """
  special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
  if vocab_size is not None and vocab_size < len(tokens):
    raise ValueError(f'vocab_size = {vocab_size}: the byte-level tokenizer needs at least {len(tokens)}')
  return from_vocabulary(tokens, [], range(len(special)), 'gpt-2', bos_id=1, eos_id=2, pad_id=0,
                         chat_template=CHATML)


@functools.cache
def _byte_table() -> dict[str, int]:
  """Character of the byte-level alphabet -> byte: itself where it is printable, else moved past 255 in order."""
  alphabet = set(pre_tokenizers.ByteLevel.alphabet())
  moved = [b for b in range(256) if chr(b) not in alphabet]
  return {chr(b): b for b in range(256) if b not in moved} | {chr(256 + n): b for n, b in enumerate(moved)}


def _added(text: str, special: bool) -> tokenizers.AddedToken:
  return tokenizers.AddedToken(text, special=special, normalized=False)


def _unique(ids) -> tuple[int, ...]:
  return tuple(dict.fromkeys(i for i in ids if i is not None))


def _read_json(path: pathlib.Path) -> dict:
  if not path.is_file():
    return {}
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except json.JSONDecodeError as error:
    raise ValueError(f'{path} is not valid JSON: {error}') from error


def _directory_template(directory: pathlib.Path, fields: dict) -> str | None:
  """The chat template: chat_template.jinja wins over the one in tokenizer_config.json."""
  file = directory / 'chat_template.jinja'
  if file.is_file():
    return file.read_text(encoding='utf-8')
  template = fields.get('chat_template')
  if isinstance(template, list):  # several named ones
    template = {row['name']: row['template'] for row in template}.get('default')
  return template
