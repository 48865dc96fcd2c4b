"""Where tasks come from: generators and users' files. Never imports jax."""
