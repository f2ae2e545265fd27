"""Variables as real launchers set them, without what no reader looks at.

torchrun of torch 2.13, Slurm 22.05, Open MPI 4.1.4 and MPICH 4.0.2 were asked for them;
the others are as their documentation has them.
"""

from __future__ import annotations

from typing import Final

TORCHRUN: Final = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "37913",
    "TORCHELASTIC_MAX_RESTARTS": "2",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "79815e99-37dc-4933-84e7-2057f7119f42",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM_JOB: Final = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_CPUS_ON_NODE": "3",
    "SLURM_JOBID": "10",
    "SLURM_JOB_CPUS_PER_NODE": "3,1",
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NAME": "cap.sh",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NODE_ALIASES": "(null)",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_SUBMIT_HOST": "vm",
    "SLURM_TASKS_PER_NODE": "3,1",
}
SLURM_BATCH: Final = {
    **SLURM_JOB,
    "SLURMD_NODENAME": "node1",
    "SLURM_GTIDS": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
SLURM_STEP: Final = {
    **SLURM_JOB,
    "SLURMD_NODENAME": "node1",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
SLURM_PMI2: Final = {  # what `srun --mpi=pmi2` adds
    "PMI_FD": "11",
    "PMI_JOBID": "10.0",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
OPEN_MPI: Final = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "478806017",
    "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_ID": "478806017.1",
    "PMIX_NAMESPACE": "478806017",
    "PMIX_RANK": "1",
    "PMIX_VERSION": "4.2.2rc2",
}
MPICH: Final = {
    "HYDI_CONTROL_FD": "7",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
# A batch script on two nodes calls mpirun -n 4.  mpirun starts its daemons by srun, so
# that the processes of the other node see the step of the daemons.
_DAEMONS: Final = {
    "SLURM_JOBID": "4",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "node[01-02]",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
OPEN_MPI_IN_SLURM: Final = {
    **_DAEMONS,
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_NAMESPACE": "1705050113",
    "PMIX_RANK": "3",
}
MPICH_IN_SLURM: Final = {
    **_DAEMONS,
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "6",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
KUBEFLOW: Final = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
SKYPILOT: Final = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_mycluster_1",
}
LEADER_WORKER_SET: Final = {
    "LWS_WORKER_INDEX": "3",
    "LWS_GROUP_SIZE": "4",
    "LWS_LEADER_ADDRESS": "vllm-0.vllm.default",
}
INDEXED_JOB: Final = {
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "train-0.train",
}


def every_name() -> set[str]:
    """Return the names of all variables here."""
    sets = (value for name, value in globals().items() if name.isupper())
    return {name for environment in sets for name in environment}
