"""Makes the tiny Llama models under tests/data/weights/ with transformers, and their logits; needs torch, not ptjax.

`tiny_linear`: tied head, f32, one file, linear RoPE scaling. `tiny_llama3`: own head, bf16 in several shards, llama3
RoPE scaling past its original context, a BOS added by the tokenizer, two end tokens, the template in a file of its own.
`logits.npz` of each holds ids [T] and logits [T, V], computed in f32.

  python tests/reference/tiny_llama.py
"""

import json
import pathlib
import shutil

import numpy as np
import tokenizers
import torch
import transformers

DATA = pathlib.Path(__file__).resolve().parent.parent / 'data' / 'weights'
SHAPE = dict(vocab_size=272, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, intermediate_size=24, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1000.0,
             initializer_range=0.2)
MODELS = {
    'tiny_linear': dict(tie_word_embeddings=True, rope_scaling=dict(rope_type='linear', factor=4.0)),
    'tiny_llama3': dict(tie_word_embeddings=False, rope_scaling=dict(
        rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16)),
}
TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|eot|>"
            "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")


def tokenizer(with_bos: bool) -> tokenizers.Tokenizer:
  special = ['<|begin|>', '<|end|>', '<|start|>', '<|eot|>']
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {t: i for i, t in enumerate(alphabet + ['he', 'll', 'hell', 'Ġt'])}
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [('h', 'e'), ('l', 'l'), ('he', 'll'), ('Ġ', 't')]))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
  if with_bos:
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single='<|begin|> $A', special_tokens=[('<|begin|>', made.token_to_id('<|begin|>'))])
  return made


def main() -> None:
  for seed, (name, fields) in enumerate(MODELS.items()):
    directory = DATA / name
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(seed)
    llama3 = name == 'tiny_llama3'
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **fields))
    for parameter_name, parameter in model.named_parameters():
      if 'norm' in parameter_name:
        parameter.data.uniform_(0.5, 1.5)
    model.to(torch.bfloat16 if llama3 else torch.float32).save_pretrained(
        directory, max_shard_size='12kB' if llama3 else '1GB')
    text = tokenizer(with_bos=llama3)
    text.save(str(directory / 'tokenizer.json'))
    ends = [text.token_to_id('<|end|>'), text.token_to_id('<|eot|>')]
    (directory / 'tokenizer_config.json').write_text(json.dumps(dict(
        tokenizer_class='PreTrainedTokenizerFast', bos_token='<|begin|>', eos_token='<|end|>')))
    (directory / 'generation_config.json').write_text(json.dumps(dict(eos_token_id=ends)))
    (directory / 'chat_template.jinja').write_text(TEMPLATE)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = np.random.default_rng(seed).integers(0, SHAPE['vocab_size'], 48)
    with torch.no_grad():
      logits = loaded(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.savez_compressed(directory / 'logits.npz', ids=ids.astype(np.int32), logits=logits)
    print(name, sorted(f.name for f in directory.iterdir()), logits.std())


if __name__ == '__main__':
  main()
