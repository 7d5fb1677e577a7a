"""Write metrics to files, trackers and the run report."""
