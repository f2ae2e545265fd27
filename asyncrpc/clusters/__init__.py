"""Workers under a scheduler: Ray, Kubernetes, Slurm."""
