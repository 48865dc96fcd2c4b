"""An OpenAI-compatible HTTP server over the sampler."""
