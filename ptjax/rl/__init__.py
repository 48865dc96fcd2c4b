"""Reinforcement learning: curriculum, rollouts, rewards and the loop that joins them."""
