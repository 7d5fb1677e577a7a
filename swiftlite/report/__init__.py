"""Pages for people to look at: one HTML file each, without scripts and without anything from the network.

`page.py` has what a page is made of and turns it into HTML, `figure.py` draws, `run_page.py` and `comparison.py` tell
of runs. What `bench` and `evaluate` tell stands beside them. It reads the files of runs; it never changes one.
"""
