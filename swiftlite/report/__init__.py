"""Write report pages. Each page is a single HTML file without scripts and without network access.

`page.py` defines the content of a page and renders HTML, `figure.py` draws charts, and `run_page.py` and
`comparison.py` create the pages of runs. The pages of `bench` and `evaluate` are in their packages. This package reads
the files of runs and never changes them.
"""
