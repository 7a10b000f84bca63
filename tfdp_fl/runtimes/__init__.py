"""Where a cohort's shards run when one process is not enough."""

from tfdp_fl.runtimes.ray_workers import RayWorkerRound, RayWorkers
from tfdp_fl.runtimes.shard_workers import WorkerError, WorkerLost, WorkerUnavailable
from tfdp_fl.runtimes.worker_data import MappedArray, export_for_workers

__all__ = [
    "MappedArray",
    "RayWorkerRound",
    "RayWorkers",
    "WorkerError",
    "WorkerLost",
    "WorkerUnavailable",
    "export_for_workers",
]
