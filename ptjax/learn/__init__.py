"""Training maths and the jitted update: losses, advantages, off-policy weights, optimizer, one step for all stages."""
