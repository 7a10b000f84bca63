"""Where a cohort's shards run when one process is not enough."""

from tfdp_fl.engine.ray_workers import (
    RayWorkers,
    WorkerError,
    WorkerLost,
    WorkerUnavailable,
)

__all__ = ["RayWorkers", "WorkerError", "WorkerLost", "WorkerUnavailable"]
