"""Verifiers and the sandboxes they run model-written code in. Never imports jax."""
