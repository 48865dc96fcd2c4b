"""The machine under a job: devices, checkpoints, lineage and metrics."""
