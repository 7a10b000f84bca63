"""A hospital in NVFlare: its Client API around a `tfdp_fl.Silo`."""

import pathlib
import sys

import numpy as np
import nvflare.client as flare

from research import hospitals

data, folder, epsilon = sys.argv[1:]
flare.init()
site = flare.get_site_name()
(x, y), _ = hospitals.split(*hospitals.table(pathlib.Path(data) / f"{site}.csv"), 0)
silo = hospitals.silo(x, y, float(epsilon), pathlib.Path(folder) / site)
shapes = [weights.shape for weights in silo.get_weights()]
places = np.cumsum([np.prod(shape) for shape in shapes])[:-1]
while flare.is_running():
    received = flare.receive()
    flat = np.split(received.params["numpy_key"], places)
    weights = [part.reshape(shape) for part, shape in zip(flat, shapes, strict=True)]
    update = silo.train(weights, f"{flare.get_job_id()} {received.current_round}")
    flat = np.concatenate([part.ravel() for part in update.weights])
    meta = {"NUM_STEPS_CURRENT_ROUND": silo.num_people}  # NVFlare weighs by it.
    flare.send(flare.FLModel(params={"numpy_key": flat}, meta=meta))
