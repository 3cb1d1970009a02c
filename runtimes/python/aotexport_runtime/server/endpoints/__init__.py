"""The endpoints of a worker, on KServe's SDK, which is needed here and nowhere else."""
