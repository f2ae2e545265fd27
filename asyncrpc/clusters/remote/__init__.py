"""Workers of a cluster on other hosts: by SSH, and on the nodes of a Slurm job."""
