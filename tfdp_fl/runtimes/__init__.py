"""Where a cohort's shards run when one process is not enough."""

from tfdp_fl.runtimes.errors import WorkerError, WorkerLost, WorkerUnavailable
from tfdp_fl.runtimes.lifting import computation_from_function
from tfdp_fl.runtimes.mapped_array import MappedArray
from tfdp_fl.runtimes.ray_workers import RayWorkerRound, RayWorkers
from tfdp_fl.runtimes.tff_workers import TFFWorkers
from tfdp_fl.runtimes.worker import WorkerRound
from tfdp_fl.runtimes.worker_data import export_for_workers

__all__ = [
    "MappedArray",
    "RayWorkerRound",
    "RayWorkers",
    "TFFWorkers",
    "WorkerError",
    "WorkerLost",
    "WorkerRound",
    "WorkerUnavailable",
    "computation_from_function",
    "export_for_workers",
]
