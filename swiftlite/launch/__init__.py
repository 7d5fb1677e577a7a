"""Start, watch and restart the processes of a job, on one node or several."""
