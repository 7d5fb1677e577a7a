"""Where metrics go: files, trackers, the run report."""
