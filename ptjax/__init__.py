"""ptjax: post-training of language models in JAX, from open weights to a gated, better model."""
